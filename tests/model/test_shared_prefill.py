"""The prefill of prompts with shared prefixes against the plain one: keys, values, logits and the tokens computed."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from architectures import EXACT, tiny
from brorl.model import chunks
from brorl.model.forward import agrees
from brorl.model.llama_pass import LlamaPass
from brorl.model.shared_prefill import shared_prefill
from brorl.model.tree_attention import ModelPass, PromptCache, prefill, tree_attention
from path_checks import HEADS, WINDOW, gemma
from small_models import ARCHITECTURES, mostly_slow, small_model

Prompt = tuple[int, ...]
Compute = Callable[..., tuple[PromptCache, Tensor]]


def tokens(rng: np.random.Generator, number: int) -> Prompt:
    return tuple(rng.integers(0, 17, number).tolist())


def related_prompts(rng: np.random.Generator) -> list[Prompt]:
    """Prompts below a few stems, one of them below another; equal prompts, a prefix of others, and one by itself."""
    stems = [tokens(rng, int(rng.integers(5, 12))), tokens(rng, int(rng.integers(30, 45)))]
    stems.append(stems[1] + tokens(rng, int(rng.integers(1, 9))))
    ends = [[stem + tokens(rng, int(rng.integers(1, 12))) for _ in range(rng.integers(3, 7))] for stem in stems]
    prompts = [
        *(prompt for of_stem in ends for prompt in of_stem),
        ends[1][0],
        stems[1],
        stems[1],
        stems[0][:1],
        tokens(rng, 7),
    ]
    return [prompts[i] for i in rng.permutation(len(prompts))]


def num_distinct(prompts: list[Prompt]) -> int:
    return len({prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)})


def computed(model: PreTrainedModel, compute: Compute, way: ModelPass, prompts: list[Prompt]) -> list[Tensor]:
    """Return the logits, and the keys and values of the tokens of each prompt."""
    with torch.no_grad(), tree_attention(model):
        cache, logits_PV = compute(way, prompts)
    assert cache.length.tolist() == [len(prompt) for prompt in prompts]
    assert all(x.shape[2] == max(cache.length) and x.isfinite().all() for x in (*cache.key, *cache.value))
    return [logits_PV, *(x[p, :, :n] for x in (*cache.key, *cache.value) for p, n in enumerate(cache.length))]


def assert_equal_to_plain(model: PreTrainedModel, way: ModelPass, prompts: list[Prompt], bound: float) -> None:
    got, expected = (computed(model, compute, way, prompts) for compute in (shared_prefill, prefill))
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound)


def num_fed(model: PreTrainedModel, prompts: list[Prompt]) -> int:
    """Return how many tokens go through the model."""
    fed: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _m, args, _out: fed.append(args[0].numel()))
    computed(model, shared_prefill, ModelPass(model), prompts)
    hook.remove()
    return sum(fed)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_values_and_logits_are_those_of_the_plain_prefill(
    architecture: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the modules and by the Llama passes, with tiles of a few queries and of all; the sums differ by rounding."""
    model = small_model(architecture, seed=int(rng.integers(1 << 30)))
    ways = [ModelPass(model)]
    if architecture != "hooked":
        ways += [LlamaPass(model), LlamaPass(model, model.dtype)]
    for queries in (1, 7, 256):
        monkeypatch.setattr(chunks, "SCORES_PER_TILE", queries * 320 * HEADS)
        for way in ways:
            assert_equal_to_plain(model, way, related_prompts(rng), 1e-12)


def test_layers_with_windows_that_prompts_exceed(rng: np.random.Generator) -> None:
    model, prompts = gemma(3), related_prompts(rng)
    assert max(map(len, prompts)) > WINDOW + 5
    assert_equal_to_plain(model, ModelPass(model), prompts, 1e-12)
    assert num_fed(model, prompts) == num_distinct(prompts)


@pytest.mark.parametrize("model_type", mostly_slow(EXACT, "deepseek_v3", "gemma4_text", "gpt2"))
def test_other_architectures(model_type: str, rng: np.random.Generator) -> None:
    """Latent keys wider than values, layers of different heads, experts; some round their norms to float32."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = tiny(model_type, EXACT[model_type], torch.float64)
    prompts = related_prompts(rng)
    assert_equal_to_plain(model, ModelPass(model), prompts, 1e-4)
    assert num_fed(model, prompts) == num_distinct(prompts)


def test_matrices_in_bfloat16(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)), dtype=torch.float32)
    way, prompts = LlamaPass(model, torch.bfloat16), related_prompts(rng)
    got, expected = (computed(model, compute, way, prompts) for compute in (shared_prefill, prefill))
    assert all(agrees(a, b, torch.bfloat16) for a, b in zip(got, expected, strict=True))


def test_each_shared_prefix_is_computed_once(rng: np.random.Generator) -> None:
    model, prompts = small_model("hooked"), related_prompts(rng)
    assert num_fed(model, prompts) == num_distinct(prompts) < sum(map(len, prompts)) / 2
    assert num_fed(model, [prompts[0]] * 5) == len(prompts[0])


@pytest.mark.parametrize("shared", [0, 1, 4])
def test_prompts_with_little_in_common_are_computed_as_before(shared: int, rng: np.random.Generator) -> None:
    """Bitwise, although the prompts may start with a few equal tokens; a single prompt too."""
    model = small_model(seed=int(rng.integers(1 << 30)), dtype=torch.float32)
    stem = tokens(rng, shared)
    prompts = [(*stem, first, *tokens(rng, int(rng.integers(12, 20)))) for first in range(8)]
    assert num_fed(model, prompts) == sum(map(len, prompts))
    for some in (prompts, prompts[:1]):
        got, expected = (computed(model, compute, LlamaPass(model), some) for compute in (shared_prefill, prefill))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
