"""Gemma 3 270M base: windows of 512 tokens in 15 of 18 layers, 262,144 tokens, no chat template; in float32."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from brorl.model.flat_path import FlatForward
from brorl.model.forward import choose_forward
from brorl.model.load import check_vocabulary, end_tokens, load_model, load_tokenizer
from brorl.model.logprobs import by_tree
from brorl.model.tree_path import TreeForward
from brorl.prompts.question import Question
from brorl.prompts.rendering import render
from brorl.prompts.settings import PromptFormat
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from real_models import real_model_or_skip
from real_reference import LOGPROB_BOUND, assert_trees_equal_rows, generated_tokens, greedy_tokens

pytestmark = pytest.mark.real_models
QUESTIONS = ("The capital of France is", "Question: What is 3 + 2?\nAnswer:")
LICENSE = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_model_or_skip("gemma-3-270m")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_model(str(folder), torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[tuple[int, ...]]:
    questions = [Question(f"q{i}", text, "", "math") for i, text in enumerate(QUESTIONS)]
    return [prompt.token_ids for prompt in render(questions, PromptFormat(), load_tokenizer(str(folder)))]


def test_prompts_and_end_tokens_are_those_of_its_tokenizer(
    folder: Path, model: PreTrainedModel, prompts: list[tuple[int, ...]]
) -> None:
    """Without a chat template: the text, behind the token of the beginning, and stop strings that end a response."""
    tokenizer, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder), ["\n", "<mask>"])
    for prompt, text in zip(prompts, QUESTIONS, strict=True):
        assert prompt[0] == tokenizer.convert_tokens_to_ids("<bos>")
        assert prompt[1:] == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    check_vocabulary("gemma", model.config, ours)
    assert len(tokenizer) == model.get_input_embeddings().weight.shape[0] == 262_144
    end = tokenizer.convert_tokens_to_ids(["<eos>", "<mask>"])
    assert end_tokens(model, ours, ["\n", "<mask>"]) == tuple(sorted(end))


def test_greedy_equals_generate(model: PreTrainedModel, prompts: list[tuple[int, ...]]) -> None:
    end = [model.config.eos_token_id]
    expected = generated_tokens(model, prompts, end, max_new_tokens=8)
    assert greedy_tokens(model, prompts, end, max_new_tokens=8, forward=choose_forward(model)) == expected


def test_trees_equal_rows(model: PreTrainedModel, prompts: list[tuple[int, ...]], rng: np.random.Generator) -> None:
    forward = choose_forward(model, context=512)
    assert isinstance(forward, TreeForward)
    assert_trees_equal_rows(model, forward, prompts, [model.config.eos_token_id], int(rng.integers(1 << 30)))


def last_logprobs(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Return the log-probs of a response by plain transformers; logits of all positions would take gigabytes."""
    ids = torch.tensor([[*prompt, *response]])
    logits_TV = model(input_ids=ids, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1]
    return torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


@torch.no_grad()
def test_beyond_its_window(
    folder: Path, model: PreTrainedModel, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine and learner against plain transformers, where layers without their windows would give other log-probs."""
    row = load_tokenizer(str(folder))(LICENSE.read_text())["input_ids"]
    start = int(rng.integers(len(row) - 600))
    prompt = (row[0], *row[start + 1 : start + 560])
    forward = choose_forward(model, context=len(prompt) + 4)
    assert isinstance(forward, FlatForward)
    assert forward.reason == "its sliding window has 512 tokens, and a context 564"
    engine = NativeEngine(model, [model.config.eos_token_id], forward=forward)
    (tree,) = engine.sample(SampleTask([prompt], 2, SamplingParams(max_new_tokens=4), seed=int(rng.integers(1 << 30))))
    (learned_M,) = by_tree(list(forward.chunk_logprobs(model, [tree])), [tree])
    responses = [tokens for tokens, _ in tree.responses()]
    expected = [last_logprobs(model, prompt, response) for response in responses]
    for leaf, row_logprobs in zip(tree.leaf, expected, strict=True):
        path = tree.path(int(leaf))
        np.testing.assert_allclose(tree.logprob[path], row_logprobs, rtol=0, atol=LOGPROB_BOUND)
        np.testing.assert_allclose(learned_M[path], row_logprobs, rtol=0, atol=LOGPROB_BOUND)

    monkeypatch.setattr(model.config, "sliding_window", len(prompt) + 4)
    without_windows = [last_logprobs(model, prompt, response) for response in responses]
    assert max(float((a - b).abs().max()) for a, b in zip(expected, without_windows, strict=True)) > 10 * LOGPROB_BOUND
