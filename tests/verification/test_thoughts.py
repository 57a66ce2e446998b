"""Thoughts are not judged: the rule on texts, in front of every built-in verifier, and in the decoded text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from brorl.algorithms.settings import RewardShaping
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import Question
from brorl.sampling import StopStrings
from brorl.verification.domains import verifiers as verifiers_module
from brorl.verification.grade import StoredResponse, rescore
from brorl.verification.response_files import ResponseColumns, read_responses
from brorl.verification.sandbox.pool import Workers
from brorl.verification.settings import VerificationSettings
from brorl.verification.thoughts import THINK, ThoughtTags, make_decode
from brorl.verification.verifier import Verifier, try_verifier
from each_row import each_row

PLAIN, OPENED = "1 + 1?", "<|user|>1 + 1?<|assistant|><think>\n"
CODE = "```python\nparts = text.split('</think>')\n```"


@each_row(
    ("prompt", "response", "answer"),
    [
        (PLAIN, "42", "42"),
        (PLAIN, "", ""),
        (PLAIN, "<think>41</think>42", "42"),
        (PLAIN, " \n<think>\n41\n</think>\n\n42", "\n\n42"),
        (PLAIN, "<think></think>42", "42"),
        (PLAIN, "<think>41", None),
        (PLAIN, "42 <think>or 41", None),
        (PLAIN, "<think>a</think>41<think>b</think>42", "42"),
        (PLAIN, "<think>a</think>42<think>b", None),
        (PLAIN, "<think>a<think>b</think>41</think>42", "42"),
        (PLAIN, "Well, <think>41</think>42", "42"),
        (PLAIN, "41</think>42", "42"),
        (PLAIN, "<think>41</think>", ""),
        (OPENED, "41</think>42", "42"),
        (OPENED, "41", None),
        (OPENED, "", None),
        (OPENED, "<think>41</think>42", "42"),
        (OPENED, "a</think>41<think>b</think>42", "42"),
        ("Think in <think> and </think>.\nOK:", "42", "42"),  # a prompt that only names the tags
        ("<think>\n\n</think>\n\n", "42", "42"),  # a template without thinking
        # tags in the code of an answer
        (PLAIN, CODE, CODE),
        (PLAIN, f"<think>a</think>{CODE}", CODE),
        (OPENED, f"a</think>{CODE}\nIt splits at `</think>`.", f"{CODE}\nIt splits at `</think>`."),
        (PLAIN, "<think>a</think>~~~~\n<think>\n~~~\n~~~~", "~~~~\n<think>\n~~~\n~~~~"),
        (PLAIN, "<think>a</think>Use `s.find('<think>')`.", "Use `s.find('<think>')`."),
        (PLAIN, "<think>a</think>``</think>`` ends it", "``</think>`` ends it"),
        # and in the code of a thought, which may be unfinished
        (PLAIN, f"<think>{CODE}</think>42", "42"),
        (PLAIN, "<think>```python\nx = 1\n</think>```python\ny\n```", "```python\ny\n```"),
        (OPENED, "```python\nx = `\n</think>42", "42"),
        (OPENED, "I end with `</think>`, later", None),
        (OPENED, "I end with `</think>`, now: </think>42", "42"),
        (OPENED, "`41`</think>`42`", "`42`"),
        (PLAIN, "<think>a</think>```python\nprint(\n</think>42", "42"),  # a block that never ends is none
    ],
)  # fmt: skip
def test_the_answer_follows_the_last_thought(prompt: str, response: str, answer: str | None) -> None:
    assert THINK.answer(prompt, response) == answer


def test_other_tags() -> None:
    tags = ThoughtTags("[THINK]", "[/THINK]")
    assert tags.answer("x", "[THINK]41[/THINK]</think>42") == "</think>42"
    assert tags.answer("x[THINK]", "41") is None


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as made:
        yield made


@pytest.mark.linux
def test_the_rule_can_be_switched_off(workers: Workers) -> None:
    verifier = verifiers_module.make_verifiers(
        ["math"], VerificationSettings(thought_tags=None), RewardShaping(), workers
    )["math"]
    items = [(Prompt("q", OPENED, (1,), "42", "math"), text) for text in ("\\boxed{42}", "<think>\\boxed{42}")]
    assert [verdict.correct for verdict in verifier.verify_all(items)] == [True, True]


def whole(response: str, reference: str) -> bool:
    """A user's verifier."""
    return response == f"<think>.</think>{reference}"


@pytest.mark.linux
def test_the_functions_of_users_see_thoughts(workers: Workers) -> None:
    settings = VerificationSettings(functions={"own": f"{__file__}:whole"})
    verifier = verifiers_module.make_verifiers(["own"], settings, RewardShaping(), workers)["own"]
    items = [(Prompt("q", OPENED, (1,), "42", "own"), text) for text in ("<think>.</think>42", "42")]
    assert [verdict.correct for verdict in verifier.verify_all(items)] == [True, False]


def test_a_trial_answers_without_a_thought() -> None:
    """A prompt that opens a thought would leave the trial's right response in it."""
    verifier: Verifier = verifiers_module.make_verifiers(
        ["countdown"], VerificationSettings(), RewardShaping(), Workers()
    )["countdown"]
    prompts = [Prompt(str(n), OPENED, (1,), f"6 {n} -> {6 * n}", "countdown", "", f"6 times {n}?") for n in (7, 8)]
    trial = try_verifier(verifier, prompts)
    assert trial.right_verdict.correct
    assert [verdict.correct for _, verdict in trial.answers] == [True, True]


def test_stored_responses_are_judged_with_the_prompt_that_opened_their_thought() -> None:
    question = Question("q", "42 from 6 and 7?", "6 7 -> 42", "countdown")
    verifiers = verifiers_module.make_verifiers(["countdown"], VerificationSettings(), RewardShaping(), Workers())
    stored = [
        StoredResponse(f"rows.jsonl:{n}", "q", None, "6*7", prompt=text) for n, text in enumerate((None, PLAIN, OPENED))
    ]
    rescored, _ = rescore([(response, question) for response in stored], verifiers)
    assert [item.verdict.reason for item in rescored] == ["correct", "correct", "unfinished thought"]


def test_a_file_of_responses_has_the_prompt_that_opened_a_thought(tmp_path: Path) -> None:
    rows = [{"id": "q", "question": "?", "prompt": OPENED, "response": "6*7"}, {"id": "q", "response": "6*7"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row.prompt for row in read_responses(str(file), ResponseColumns())] == [OPENED, None]


def tokenizer_with(special: bool) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tags = [AddedToken(text, special=special) for text in ("<think>", "</think>")]
    made.add_tokens(tags)
    made.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<reserved>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


@pytest.mark.parametrize("special", [False, True])
def test_tags_stay_in_the_text_also_where_they_are_special_tokens(special: bool) -> None:
    tokenizer = tokenizer_with(special)
    decode = make_decode(tokenizer, THINK)
    ids = tokenizer("<think> a </think> b <reserved> <end>")["input_ids"]
    assert decode(ids) == "<think> a </think> b"
    assert decode(ids[3:]) == "b"  # without a tag
    assert make_decode(tokenizer, None)(ids) == ("a b" if special else "<think> a </think> b")


@pytest.mark.parametrize("tags", [["<think>"], ["", "</think>"], ["<t>", "<t>"], ["<t>", "</t> "], "<think>"])
def test_tags_are_two_different_texts(tags: object) -> None:
    with pytest.raises(ValueError, match="thought_tags"):
        VerificationSettings(thought_tags=tags)  # type: ignore[arg-type]


def test_settings_of_tags() -> None:
    assert VerificationSettings().thoughts == THINK
    assert VerificationSettings(thought_tags=None).thoughts is None
    assert VerificationSettings(thought_tags=["[THINK]", "[/THINK]"]).thoughts == ThoughtTags("[THINK]", "[/THINK]")  # type: ignore[arg-type]


PIECES = ["▁f", "▁=", "▁3", "▁!", "▁,", "▁n't", "▁'s", "▁.", "▁?"]


@each_row(
    ("model", "decoder"),
    [
        (models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in PIECES)], 0), decoders.Metaspace()),
        (models.WordLevel({piece: i for i, piece in enumerate(["<unk>", *PIECES])}, "<unk>"), decoders.Metaspace()),
        (models.BPE({piece: i for i, piece in enumerate(["<unk>", *PIECES])}, []), decoders.Metaspace()),
    ],
)
def test_a_verifier_sees_the_spaces_that_the_tokens_have(model: models.Model, decoder: decoders.Decoder) -> None:
    """Also of a tokenizer whose config asks for their removal, in each kind of model."""
    own = Tokenizer(model)
    own.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )  # fmt: skip
    ids = [*range(1, 1 + len(PIECES)), 3]
    assert make_decode(tokenizer, THINK)(ids) == "f = 3 ! , n't 's . ? 3"
    assert StopStrings(tokenizer, [" !"]).text(ids[:4]) == "f = 3"
