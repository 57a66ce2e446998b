"""Responses that end with a stop string: the same draws, cut where their decoded text contains one, and generate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from brorl.model.flat_path import FlatForward
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams, StopStrings
from brorl.tree import RolloutTree
from engine_checks import assert_same_trees
from small_models import mostly_slow, small_model
from small_tokenizers import STOPS, TOKENIZERS


@cache
def model_and_tokenizer(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = TOKENIZERS[name]()
    return small_model("llama", seed=1, vocab_size=len(tokenizer) + 3), tokenizer  # models have more tokens


def cut(tree: RolloutTree, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], minimum: int = 0) -> RolloutTree:
    """Cut each response after the first prefix whose decoded text has a new stop string, and count them again."""
    responses, logprobs, finished = [], [], []
    for (tokens, count), leaf, was_finished in zip(tree.responses(), tree.leaf, tree.finished, strict=True):
        texts = [tokenizer.decode(list(tokens[:n]), skip_special_tokens=True) for n in range(len(tokens) + 1)]
        counts = [sum(text.count(stop) for stop in stops) for text in texts]
        ends = [n for n in range(minimum + 1, len(tokens) + 1) if counts[n] > counts[n - 1]]
        end = ends[0] if ends else len(tokens)
        responses += [tokens[:end]] * count
        logprobs += [tree.logprob[tree.path(int(leaf))][:end].tolist()] * count
        finished += [bool(ends) or bool(was_finished)] * count
    return RolloutTree.from_responses(tree.prompt_ids, responses, logprobs, finished)


@pytest.mark.parametrize("name", mostly_slow(TOKENIZERS))
@pytest.mark.parametrize("minimum", mostly_slow([0, 3], 3))
def test_responses_are_those_without_stop_strings_cut_at_the_first(
    name: str, minimum: int, rng: np.random.Generator
) -> None:
    """In the tree, one row per rollout, the model's own cache, and rows that wait for memory."""
    model, tokenizer = model_and_tokenizer(name)
    prompts = [rng.integers(2, len(tokenizer), n).tolist() for n in (3, 7)]
    sampling = SamplingParams(temperature=1.5, max_new_tokens=12, min_new_tokens=minimum)
    seed = int(rng.integers(2**60))
    together = NativeEngine(model, 0).sample(SampleTask(prompts, 16, sampling, seed))
    stops = STOPS[name]
    expected = [cut(tree, tokenizer, stops, minimum) for tree in together]
    assert sum(tree.num_unique_tokens for tree in expected) < sum(tree.num_unique_tokens for tree in together)
    stop, depths = StopStrings(tokenizer, stops), []
    for ways in ({}, {"share_prefixes": False}, {"forward": FlatForward("a test")}):
        assert_same_trees(
            NativeEngine(model, 0, stop=stop, **ways).sample(SampleTask(prompts, 16, sampling, seed)), expected
        )
    memory = 4 * (12 * 512 + 3 * 8 * model.config.vocab_size) + 2 * 14 * 512  # 4 rows and twice the prompts, in float64
    engine = NativeEngine(model, 0, memory, observe=lambda seen: depths.append(seen.depth), stop=stop)
    assert_same_trees(engine.sample(SampleTask(prompts, 16, sampling, seed)), expected)
    assert depths != sorted(depths)  # rows waited


@pytest.mark.slow
def test_greedy_equals_generate(rng: np.random.Generator) -> None:
    model, tokenizer = model_and_tokenizer("byte_level")
    digit = tokenizer.encode("7", add_special_tokens=False)
    for _ in range(4):
        prompt = [*rng.integers(2, len(tokenizer), 4).tolist(), *digit]  # no stop string begins in it
        greedy = SamplingParams(0.0, max_new_tokens=8)
        (tree,) = NativeEngine(model, 0).sample(SampleTask([prompt], 1, greedy, seed=0))
        text = tokenizer.decode(list(tree.responses()[0][0]), skip_special_tokens=True)
        readable = re.findall(r"[ -~\n]{1,3}", text)
        stop = StopStrings(tokenizer, [*readable[len(readable) // 2 :][:1], "zz"])
        (tree,) = NativeEngine(model, 0, stop=stop).sample(SampleTask([prompt], 2, greedy, seed=0))
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, eos_token_id=0, pad_token_id=0,
            stop_strings=list(stop.texts), tokenizer=tokenizer,
        )  # fmt: skip
        expected = tuple(out[0, 5:].tolist())
        assert tree.responses() == [(expected, 2)]
