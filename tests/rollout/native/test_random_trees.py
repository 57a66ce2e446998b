"""Trees of random settings against a walk through the distributions of transformers, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import brorl.rollout.native_engine as native
from brorl.errors import OutOfMemoryError
from brorl.model import logprobs
from brorl.model.lora import LoraSettings, add_adapter
from brorl.rollout.engine import SampleTask, prompt_seed
from brorl.rollout.native.graphs import StepGraphs
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams, StopStrings
from brorl.tree import RolloutTree
from recorded_steps import RecordedSteps
from small_models import small_model
from small_tokenizers import STOPS, byte_level
from tree_invariants import check_tree

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32, "intermediate_size": 48}
LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
OTHERS: dict[str, dict[str, Any]] = {  # models without a Llama pass; contexts are longer than their sliding windows
    "gemma3_text": {**HEADS, **LAYERS, "sliding_window": 12},
    "gemma4_text": {**HEADS, **LAYERS, "sliding_window": 15, "global_head_dim": 16, "hidden_size_per_layer_input": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}
KINDS = ("llama", "qwen2", "qwen3", "mistral", "hooked", "tied", "adapters", "window", *OTHERS)
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 40)


def random_model(rng: np.random.Generator, kind: str, vocabulary: int) -> PreTrainedModel:
    """A model whose rows fork at once, or late and seldom."""
    scale, seed = float(rng.choice([0.1, 0.25, 0.4])), int(rng.integers(1 << 30))
    torch.manual_seed(seed)
    if kind in OTHERS:
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "vocab_size": vocabulary}
        more = {"vocab_size_per_layer_input": vocabulary} if kind == "gemma4_text" else {}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **ids, **more, **OTHERS[kind]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(float(parameter.dim() == 1), scale)
        return model.double().eval()
    options = {"tied": {"tie_word_embeddings": True}, "window": {"sliding_window": 13}}.get(kind, {})
    architecture = {"tied": "qwen2", "adapters": "llama", "window": "mistral"}.get(kind, kind)
    model = small_model(architecture, vocab_size=vocabulary, seed=seed, scale=scale, **options)
    if kind == "adapters":
        add_adapter(model, LoraSettings(rank=2))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.3)
    return model


def distribution(logits_V: np.ndarray, sampling: SamplingParams, stop_ids: set[int], depth: int) -> np.ndarray:
    """Log-probs of the next token at the sampling temperature, of the tokens that top-k and top-p keep."""
    score = logits_V / (sampling.temperature or 1)
    if depth < sampling.min_new_tokens:
        score[list(stop_ids)] = -np.inf
    mass_V = np.exp(score - score.max())
    if sampling.temperature and 0 < sampling.top_k < mass_V.size:
        mass_V[mass_V < np.sort(mass_V)[-sampling.top_k]] = 0
    if sampling.temperature and sampling.top_p < 1:
        order = np.argsort(-mass_V, kind="stable")
        share = mass_V[order] / mass_V.sum()
        mass_V[order[share.cumsum() - share >= sampling.top_p]] = 0
    with np.errstate(divide="ignore"):
        return np.log(mass_V / mass_V.sum())


def drawn_token(logprob_V: np.ndarray, uniform: float, sampling: SamplingParams) -> int:
    """The inverse of the cumulative distribution."""
    if not sampling.temperature:
        return int(logprob_V.argmax())
    edge_V = np.exp(logprob_V).cumsum()
    return int(np.searchsorted(edge_V, uniform * edge_V[-1], side="right"))


class Walk:
    """Walks each rollout through the distinct responses of a tree, with the logits of the model's own attention."""

    def __init__(self, model: PreTrainedModel, tree: RolloutTree) -> None:
        self.found: dict[tuple[int, ...], tuple[int, int]] = {}  # where a prefix is: response and tokens
        self._responses = [tokens for tokens, _ in tree.responses()]
        self._start = len(tree.prompt_ids) - 1
        width = max(map(len, self._responses))
        rows = [[*tree.prompt_ids, *r, *[1] * (width - len(r))] for r in self._responses]
        with torch.no_grad():
            logits_LTV = model(input_ids=torch.tensor(rows), use_cache=False).logits  # no token sees what follows it
        self._logits_LTV = logits_LTV.double().numpy()
        for index, tokens in enumerate(self._responses):
            for length in range(len(tokens) + 1):
                self.found.setdefault(tokens[:length], (index, length))

    def logits(self, prefix: tuple[int, ...]) -> np.ndarray:
        index, length = self.found[prefix]
        logits_V: np.ndarray = self._logits_LTV[index, self._start + length].copy()
        return logits_V


def expected_tree(
    model: PreTrainedModel, tree: RolloutTree, number: int, seed: int, sampling: SamplingParams, stop_ids: set[int],
    stop: StopStrings | None,
) -> tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], bool], dict[tuple[int, ...], float]]:  # fmt: skip
    """Counts of the responses, whether each was finished, and the log-prob of each node, by its prefix."""
    walk, num_rollouts = Walk(model, tree), tree.num_rollouts
    counts: dict[tuple[int, ...], int] = {}
    finished: dict[tuple[int, ...], bool] = {}
    logprobs: dict[tuple[int, ...], float] = {}
    blocks = -(-sampling.max_new_tokens // 16)
    keys = [(seed % 2**64) << 64 | number << 32 | block for block in range(blocks)]
    uniform_TN = np.concatenate([np.random.Generator(np.random.Philox(key=k)).random((16, num_rollouts)) for k in keys])
    texts: dict[tuple[int, ...], int] = {}

    def occurrences(prefix: tuple[int, ...]) -> int:
        if prefix not in texts:
            text = stop._tokenizer.decode(list(prefix), skip_special_tokens=True)
            texts[prefix] = sum(text.count(one) for one in stop.texts)
        return texts[prefix]

    for rollout in range(num_rollouts):
        prefix: tuple[int, ...] = ()
        ended = False
        while not ended and len(prefix) < sampling.max_new_tokens:
            logprob_V = distribution(walk.logits(prefix), sampling, stop_ids, len(prefix))
            token = drawn_token(logprob_V, uniform_TN[len(prefix), rollout], sampling)
            before, prefix = prefix, (*prefix, token)
            assert prefix in walk.found, f"no rollout of the tree draws {prefix}"
            logprobs[prefix] = logprob_V[token]
            ended = token in stop_ids
            if stop and len(prefix) > sampling.min_new_tokens:
                ended |= occurrences(prefix) > occurrences(before)
        counts[prefix] = counts.get(prefix, 0) + 1
        finished[prefix] = ended
    return counts, finished, logprobs


def check_random_trees(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: str) -> int:
    """Sample twice with random settings, with an update of the weights between; return the replayed steps."""
    has_texts = kind in ("llama", "qwen3", "hooked") and rng.random() < 0.3
    tokenizer = byte_level() if has_texts else None
    vocabulary = len(tokenizer) + 3 if tokenizer else int(rng.choice([17, 17, 64, 97, 1030]))
    model = random_model(rng, kind, vocabulary)
    draws, records = rng.random() < 0.8, rng.random() < 0.7
    captures: list[RecordedSteps] = []

    def capture() -> RecordedSteps:
        captures.append(RecordedSteps())
        return captures[-1]

    monkeypatch.setattr(native, "draws_on", lambda _: draws)
    monkeypatch.setattr(logprobs, "_FEW", vocabulary)  # a device that draws looks for a nucleus without the host
    lines: list[str] = []
    monkeypatch.setattr(native, "graphs_on", lambda *_: StepGraphs("auto", lines.append, capture) if records else None)
    texts = tuple(rng.choice(STOPS["byte_level"], 3, replace=False)) if tokenizer else ()
    stop = StopStrings(tokenizer, texts) if tokenizer else None
    shares = bool(rng.random() < 0.8)
    end_ids = tuple(rng.choice(vocabulary, int(rng.integers(1, 4)), replace=False).tolist())
    memory = 1 << 30
    engine = NativeEngine(model, end_ids, memory, share_prefixes=shares, stop=stop)
    for _ in range(2):
        longest = int(rng.choice(LENGTHS))
        shared = rng.integers(1, vocabulary, rng.choice([0, 12])).tolist()
        own = [rng.integers(1, vocabulary, rng.integers(1, 14)).tolist() for _ in range(rng.integers(1, 6))]
        prompts = [shared + tokens for tokens in own]
        rollouts = rng.choice([1, 2, 5, 11, 20], len(prompts)).tolist()
        sampling = SamplingParams(
            temperature=float(rng.choice([0.0, 0.3, 0.8, 1.0, 1.3])),
            top_p=float(rng.choice([1.0, 0.9])),
            top_k=int(rng.choice([0, 0, 7])),
            max_new_tokens=longest,
            min_new_tokens=int(rng.integers(0, min(longest, 4))),
            stop_token_ids=tuple(rng.choice(vocabulary, int(rng.integers(0, 3)), replace=False).tolist()),
        )
        seed, first = int(rng.integers(1 << 60)), int(rng.integers(0, 100))
        seeds = [prompt_seed(seed, first + i) for i in range(len(prompts))]
        if rng.random() < 0.5:  # as little as holds a few rows
            per_token = 2 * 2 * 4 * 16 * 8
            room = int(rng.integers(2, 12)) * (longest * per_token // 4 + 24 * vocabulary)
            engine._memory_bytes = room + 2 * len(prompts) * 26 * per_token
        try:
            trees = engine.sample(SampleTask(prompts, rollouts, sampling, seeds))
        except OutOfMemoryError:
            engine._memory_bytes = memory
            trees = engine.sample(SampleTask(prompts, rollouts, sampling, seeds))
        stop_ids = {*end_ids, *sampling.stop_token_ids}
        for number, (tree, prompt) in enumerate(zip(trees, prompts, strict=True)):
            check_tree(tree)
            assert (tree.prompt_ids, tree.num_rollouts) == (tuple(prompt), rollouts[number])
            expected = expected_tree(model, tree, first + number, seed, sampling, stop_ids, stop)
            check_against(tree, *expected)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
    assert not lines
    return sum(capture.replays for capture in captures)


def check_against(
    tree: RolloutTree,
    counts: dict[tuple[int, ...], int],
    finished: dict[tuple[int, ...], bool],
    logprobs: dict[tuple[int, ...], float],
) -> None:
    """Compare all numbers of a tree."""
    got: dict[Any, Any] = dict(tree.responses())
    assert got == counts
    for (tokens, _), leaf, ended in zip(tree.responses(), tree.leaf, tree.finished, strict=True):
        assert ended == finished[tokens]
        expected = [logprobs[tokens[: length + 1]] for length in range(len(tokens))]
        np.testing.assert_allclose(tree.logprob[tree.path(int(leaf))], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "window"])
def test_trees_invert_their_uniform_numbers(
    kind: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_random_trees(rng, monkeypatch, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_trees_invert_their_uniform_numbers(
    kind: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(check_random_trees(rng, monkeypatch, kind) for _ in range(4)) > 0
