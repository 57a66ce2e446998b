"""Stop strings: decoding every prefix of a response, and transformers' own criterion, are the references."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

from brorl.errors import UserError
from brorl.model.load import load_tokenizer
from brorl.sampling import StopStrings, check_stop, stop_tokens
from run_support import save_tiny_model
from small_tokenizers import TOKENIZERS

TEXTS = [
    "\n\n", "Question:", "é", "日", "。", "語。", ". ", "!", "Stop !", "Stop!", "don't", "a",
    "n ", " ", " Q", "n:a", ":",
]  # fmt: skip
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    return TOKENIZERS[name]()


def some_stops(rng: np.random.Generator) -> list[str]:
    return [TEXTS[i] for i in rng.permutation(len(TEXTS))[: rng.integers(1, 4)]]


def response(rng: np.random.Generator, tokenizer: PreTrainedTokenizerBase, length: int) -> list[int]:
    """Random tokens, of which some spell a text in which stop strings occur."""
    tokens: list[int] = []
    while len(tokens) < length:
        spelled = "".join(TEXTS[i] for i in rng.integers(0, len(TEXTS), 2))
        spell = rng.random() < 0.3
        tokens += tokenizer.encode(spelled, add_special_tokens=False) if spell else [int(rng.integers(len(tokenizer)))]
    return tokens[:length]


def plain_text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def plain_end(tokenizer: PreTrainedTokenizerBase, tokens: list[int], stops: list[str]) -> int | None:
    """Return the number of tokens of the shortest prefix whose decoded text contains a stop string."""
    ends = (n for n in range(1, len(tokens) + 1) if any(s in plain_text(tokenizer, tokens[:n]) for s in stops))
    return next(ends, None)


@every_tokenizer
def test_a_response_ends_with_the_first_prefix_whose_text_contains_a_stop_string(
    name: str, rng: np.random.Generator
) -> None:
    tokenizer, ended = tokenizer_of(name), 0
    for _ in range(30):
        stops, tokens = some_stops(rng), response(rng, tokenizer_of(name), 14)
        stop, expected = StopStrings(tokenizer, stops), plain_end(tokenizer, tokens, stops)
        ends = [n for n in range(1, len(tokens) + 1) if stop.end_with(tokens[:n])]
        assert next(iter(ends), None) == stop.length(tokens, 0) == expected, (stops, tokens)
        minimum = int(rng.integers(12))
        assert stop.length(tokens, minimum) == next((n for n in ends if n > minimum), None)
        if expected is None:
            assert stop.text(tokens) == plain_text(tokenizer, tokens)
        else:
            ended += 1
            text = plain_text(tokenizer, tokens[:expected])
            assert stop.text(tokens[:expected]) == text[: min(text.index(s) for s in stops if s in text)]
    assert ended > 5


def test_ends_are_those_of_transformers(rng: np.random.Generator) -> None:
    """Its criterion reads tokens of bytes as text, so characters that are split over tokens are left out."""
    tokenizer = tokenizer_of("byte_level")
    complete = [t for t in range(2, len(tokenizer)) if "\N{REPLACEMENT CHARACTER}" not in tokenizer.decode([t])]
    for _ in range(15):
        tokens = rng.choice(complete, 20).tolist()
        text, start = plain_text(tokenizer, tokens), int(rng.integers(20))
        stops = [*some_stops(rng), text[start : start + int(rng.integers(1, 8))]]
        criterion, stop = StopStringCriteria(tokenizer, stops), StopStrings(tokenizer, stops)
        prefixes = [tokens[:n] for n in range(1, 21)]
        done = [bool(criterion(torch.tensor([prefix]), None)) for prefix in prefixes]
        assert [stop.end_with(prefix) for prefix in prefixes] == done
        assert any(done)


def test_text_that_ended_before_stays_in_the_text() -> None:
    """With a minimum length a stop string can precede the one that ends the response."""
    tokenizer = tokenizer_of("byte_level")
    stop = StopStrings(tokenizer, ["\n\n", "n"])
    spelled = [tokenizer.encode(text, add_special_tokens=False) for text in ("a", "\n\n", "b", "\n", "\n", "<eos>")]
    tokens = [token for part in spelled for token in part]
    assert stop.text(tokens[:-1]) == "a\n\nb"
    assert stop.text(tokens) == "a\n\nb\n\n"  # the end token ended it
    assert stop.text(tokens[:-2]) == "a\n\nb\n"


def test_special_tokens_are_stop_tokens_and_not_strings() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    assert stop_tokens(tokenizer, ["Stop", "<|user|>"]) == (tokenizer.convert_tokens_to_ids("<|user|>"),)
    stop = StopStrings(tokenizer, ["Stop", "<|user|>"])
    assert stop.texts == ("Stop",)
    assert not StopStrings(tokenizer, ["<|user|>"])
    tokens = tokenizer.encode("a<|user|>", add_special_tokens=False)
    assert stop.text(tokens) == "a"
    tokens = tokenizer.encode("<|user|>aStop", add_special_tokens=False)
    assert stop.text(tokens, decode=lambda ids: tokenizer.decode(list(ids))) == "<|user|>a"  # tags of thoughts stay


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "word_pieces",
            "\n\n",
            r"has '\\n\\n', which no response of m can contain: its tokenizer turns this text into ''",
        ),
        ("word_pieces", "zz", r"turns this text into '\[UNK\]'"),
        (
            "byte_level",
            "a<|user|>",
            r"'<\|user\|>' is a special token of m, .*; set sampling.stop to '<\|user\|>' alone",
        ),
    ],
)
def test_a_text_with_which_no_response_can_end_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_stop("m", tokenizer_of(name), ["!", text])


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_tokenizers_that_fall_back_to_bytes_take_any_text(name: str) -> None:
    check_stop("m", tokenizer_of(name), [*TEXTS, "zz\n\t語", "  Question: ", "<|user|>"])


def test_added_tokens_are_listed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gemma has thousands of them, and the list takes milliseconds."""
    tokenizer = load_tokenizer(str(save_tiny_model(tmp_path)))
    tokenizer.add_tokens([f"<unused{i}>" for i in range(50)])
    listed, calls = tokenizer.get_added_vocab, []
    monkeypatch.setattr(tokenizer, "get_added_vocab", lambda: calls.append(None) or listed())
    check_stop("a", tokenizer, ["9"])
    assert len(calls) == 1
