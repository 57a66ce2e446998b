"""Out of memory, references and optimizer states: what the learner carries on with, and what it stores."""

from copy import deepcopy
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from brorl.algorithms.settings import ImportanceCorrection, KLPenalty, PolicyLossSettings
from brorl.config.settings import TrainConfig
from brorl.errors import OutOfMemoryError, UserError
from brorl.model.chunks import MIN_NODES
from brorl.model.lora import add_adapter
from brorl.model.memory_prediction import predict_memory
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.model.settings import LoraSettings
from brorl.runs.checkpoint import TrainerState, save_checkpoint
from brorl.training.learner import TreeLearner
from learner_support import batch_of, learn
from recipes import recipe
from run_support import assert_identical, save_tiny_model
from small_models import assert_same_gradients, gradients, mostly_slow, random_tree, small_model

SETTINGS = recipe(learning_rate=1e-3, nodes_per_pass=128, max_grad_norm=1e9)
EVERYTHING = recipe(
    SETTINGS,
    mini_batches=2,
    loss=PolicyLossSettings(kind="gspo", clip_low=0.1, clip_high=0.1),
    kl=KLPenalty(coefficient=0.5),
    importance=ImportanceCorrection(correction="truncate"),
    old_logprobs="recompute",
)
CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")
CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")


class Full:
    """Memory that holds only so many tokens of a pass; fails on the way forward or on the way back."""

    def __init__(self, model: PreTrainedModel, tokens: int, error: RuntimeError, backward: bool = False) -> None:
        self.failures, self._tokens, self._error, self._backward = 0, tokens, error, backward
        self.largest = 0
        model.get_input_embeddings().register_forward_hook(self._look)

    def _look(self, _module: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        tokens = inputs[0].numel()
        if tokens <= self._tokens:
            self.largest = max(self.largest, tokens)
        elif self._backward and output.requires_grad:
            output.register_hook(self._fail)
        elif not self._backward:
            self._fail()

    def _fail(self, *_: object) -> None:
        self.failures += 1
        raise type(self._error)(str(self._error))


@pytest.mark.parametrize(
    ("error", "backward", "settings"),
    [
        (CUDA, False, SETTINGS),
        (CPU, True, SETTINGS),
        *(pytest.param(*v, marks=pytest.mark.slow) for v in ((CUDA, True, EVERYTHING), (CPU, False, EVERYTHING))),
    ],
)
def test_a_mini_batch_starts_again_with_half_the_nodes(
    error: RuntimeError, backward: bool, settings: TrainConfig, rng: np.random.Generator
) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1)
    calm = TreeLearner(deepcopy(model), settings)
    batch, said = batch_of(rng), []
    learner = TreeLearner(model, settings, said.append)
    full = Full(model, 45, error, backward)  # 128 nodes in a pass are too many, 64 or 32 are not
    expected, got = learn(calm, *batch, seed=0), learn(learner, *batch, seed=0)
    assert_same_gradients(gradients(model), gradients(calm.model), tolerance=1e-7)
    for name, value in asdict(expected).items():
        if value is not None and name not in ("nodes_per_pass", "out_of_memory_retries"):
            assert getattr(got, name) == pytest.approx(value, rel=1e-7, abs=1e-12), name
    assert full.failures == got.out_of_memory_retries == len(said) >= 1
    assert got.nodes_per_pass == 128 >> full.failures
    assert said[0] == "out of memory with 128 tree nodes per pass; retrying with engine.nodes_per_pass: 64"
    assert (expected.out_of_memory_retries, expected.nodes_per_pass) == (0, 128)
    assert learner.state_dict()["updates"] == settings.optimizer.mini_batches

    failures = full.failures
    again = learn(learner, *batch, seed=0)  # the smaller size stays
    assert (full.failures, again.out_of_memory_retries) == (failures, 0)
    resumed = TreeLearner(deepcopy(calm.model), settings)
    resumed.load_state_dict(learner.state_dict())
    assert resumed.state_dict()["max_nodes"] == got.nodes_per_pass

    raised = TreeLearner(deepcopy(calm.model), recipe(settings, nodes_per_pass=256))
    raised.load_state_dict(learner.state_dict())
    assert raised.state_dict()["max_nodes"] == 256


@pytest.mark.parametrize("error", [CUDA, CPU])
def test_log_probs_start_again_with_fewer_nodes_and_prompts(error: RuntimeError, rng: np.random.Generator) -> None:
    model = small_model(seed=1, num_hidden_layers=1)
    trees = [random_tree(rng, prompt_length=12, num_rollouts=6) for _ in range(8)]
    expected = TreeLearner(deepcopy(model), SETTINGS).logprobs(trees)
    learner = TreeLearner(model, SETTINGS)
    full = Full(model, 60, error)  # all prompts together have 96 tokens
    for lp, reference in zip(learner.logprobs(trees), expected, strict=True):
        np.testing.assert_allclose(lp, reference, rtol=1e-10)
    assert full.failures > 0
    assert not model.training


def test_memory_that_is_too_small_for_anything_ends_with_the_ways_out(rng: np.random.Generator) -> None:
    model = small_model(seed=1, num_hidden_layers=1)
    learner = TreeLearner(model, SETTINGS)
    before = deepcopy(model.state_dict())
    full = Full(model, 0, CUDA)
    with pytest.raises(OutOfMemoryError) as caught:
        learn(learner, *batch_of(rng), seed=0)
    assert isinstance(caught.value, UserError)
    for word in (
        "engine.nodes_per_pass",
        "lora.rank",
        "reference.offload",
        "engine.gradient_checkpointing",
        f"with {MIN_NODES} tree",
    ):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert full.failures == 4  # 128, 64, 32, 16
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_memory_that_runs_out_in_the_reference_leaves_the_models_own_weights(rng: np.random.Generator) -> None:
    model = small_model(seed=1, num_hidden_layers=1)
    learner = TreeLearner(model, recipe(SETTINGS, kl=KLPenalty(coefficient=0.5)))
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    before = deepcopy(model.state_dict())
    Full(model, 0, CUDA)
    with pytest.raises(OutOfMemoryError):
        learn(learner, *batch_of(rng), seed=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_memory_that_runs_out_for_the_moments_is_said_and_not_tried_again(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, calls = TreeLearner(small_model(seed=1, num_hidden_layers=1), SETTINGS), []

    def fail() -> None:
        calls.append(1)
        raise CUDA

    monkeypatch.setattr(learner._optimizer, "step", fail)
    with pytest.raises(OutOfMemoryError, match="adapters"):
        learn(learner, *batch_of(rng), seed=0)
    assert len(calls) == 1


def test_other_errors_are_not_taken_for_a_lack_of_memory(rng: np.random.Generator) -> None:
    model = small_model(seed=1, num_hidden_layers=1)
    full = Full(model, 0, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        learn(TreeLearner(model, SETTINGS), *batch_of(rng), seed=0)
    assert full.failures == 1


def weights_of(learner: TreeLearner) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in learner.weights()}


RESUMED = {
    "warm-up": recipe(SETTINGS, mini_batches=2, warmup_updates=10, weight_decay=0.1),
    "everything": recipe(EVERYTHING, max_grad_norm=1.0, ema_decay=0.7),
    "8 bits": recipe(SETTINGS, learning_rate=1e-2, states="8bit"),
}


@pytest.mark.parametrize("kind", mostly_slow(RESUMED, "everything"))
def test_a_restored_learner_continues_bitwise(kind: str, rng: np.random.Generator) -> None:
    """Some matrices are large enough to be quantized. An average changes no update."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": 300, "dtype": torch.float32}
    model, settings = small_model(seed=int(rng.integers(1 << 30)), **sizes), RESUMED[kind]
    learner, plain = TreeLearner(model, settings), TreeLearner(deepcopy(model), recipe(settings, ema_decay=None))
    batches = [batch_of(rng, num_groups=2) for _ in range(3)]
    assert learn(learner, *batches[0], seed=0) == learn(plain, *batches[0], seed=0)
    file = BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    restored, forgetful = TreeLearner(deepcopy(model), settings), TreeLearner(deepcopy(model), settings)
    restored.load_state_dict(state)
    for seed in (1, 2):
        expected = learn(learner, *batches[seed], seed=seed)
        assert learn(restored, *batches[seed], seed=seed) == learn(plain, *batches[seed], seed=seed) == expected
        learn(forgetful, *batches[seed], seed=seed)
    assert_identical(restored.state_dict(), learner.state_dict())
    assert_identical(weights_of(restored), weights_of(learner))
    with pytest.raises(AssertionError):
        assert_identical(weights_of(forgetful), weights_of(learner))
    if kind == "everything":
        for name in ("reference", "ema"):
            lost = {key: value for key, value in state.items() if key != name}
            with pytest.raises(ValueError, match=f"contains no {name} weights; resume with the kl.coefficient"):
                restored.load_state_dict(lost)


@pytest.mark.parametrize("clear", [False, True])
def test_a_reset_takes_the_current_weights_and_may_clear_the_optimizer(clear: bool, rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1)
    settings = recipe(SETTINGS, kl=KLPenalty(coefficient=0.5))
    learner, batch = TreeLearner(model, settings), batch_of(rng)
    learn(learner, *batch, seed=0)
    assert learn(learner, *batch, seed=0).reference_kl > 0
    other = TreeLearner(deepcopy(model), settings)  # its reference is the current weights, its optimizer is new
    if not clear:
        other.load_optimizer_state(deepcopy(learner.state_dict()))
    learner.reset_reference(clear_optimizer=clear)
    got, expected = learn(learner, *batch, seed=1), learn(other, *batch, seed=1)
    assert got == expected
    assert got.reference_kl == pytest.approx(0, abs=1e-12)
    for (_, a), (_, b) in zip(learner.weights(), other.weights(), strict=True):
        assert torch.equal(a, b)


def test_moments_of_another_run_are_taken_and_nothing_else(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1)
    batch = batch_of(rng)
    first = TreeLearner(model, recipe(SETTINGS, learning_rate=5e-2, betas=(0.5, 0.6)))
    learn(first, *batch, seed=0)
    state = deepcopy(first.state_dict())
    second = TreeLearner(deepcopy(model), recipe(SETTINGS, warmup_updates=4))
    second.load_optimizer_state(state)
    ours = second.state_dict()
    assert ours["updates"] == 0
    assert ours["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)
    for index, moments in state["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(ours["optimizer"]["state"][index][name], value)
    assert learn(second, *batch, seed=0).learning_rate == 1e-3 / 4

    wider = TreeLearner(small_model(hidden_size=48, num_hidden_layers=1, seed=1), SETTINGS)
    with pytest.raises(ValueError, match=r"trainable tensor 0 has shape \(17, 48\), its moments \(17, 32\)"):
        wider.load_optimizer_state(state)
    deeper = TreeLearner(small_model(num_hidden_layers=2, seed=1), SETTINGS)
    with pytest.raises(ValueError, match="has 12 trainable tensors, this model has 21"):
        deeper.load_optimizer_state(state)


def test_a_reset_without_a_reference_is_refused() -> None:
    learner = TreeLearner(small_model(seed=1, num_hidden_layers=1), SETTINGS)
    with pytest.raises(ValueError, match="no reference policy to reset"):
        learner.reset_reference(clear_optimizer=False)


@pytest.mark.parametrize(
    ("changes", "lora", "of_host"),
    [
        (
            {"kl": KLPenalty(coefficient=0.1), "ema_decay": 0.9},
            None,
            {"states": "host", "reference": False, "offloaded_reference": True},
        ),
        ({"kl": KLPenalty(coefficient=0.1), "states": "8bit"}, None, {}),
        pytest.param(
            {"kl": KLPenalty(coefficient=0.1), "ema_decay": 0.9},
            LoraSettings(rank=16),
            {"states": "host"},
            marks=pytest.mark.slow,  # peft takes seconds to import
        ),
    ],
)
def test_the_size_of_a_checkpoint_is_predicted(
    changes: dict[str, Any],
    lora: LoraSettings | None,
    of_host: dict[str, Any],
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    """What one process writes: weights, moments, reference and average, and at most 3% more for names and alignment.

    `of_host` are the settings with which a GPU keeps moments and reference in the memory of the host.
    """
    model = small_model(dtype=torch.float32, hidden_size=128, intermediate_size=512, num_hidden_layers=1)
    memory = MemorySettings("float32", 0, lora=lora, reference="kl" in changes, average="ema_decay" in changes)
    memory = replace(memory, states=changes.get("states", "device"))
    predicted = predict_memory(model.config, memory, Workload()).checkpoint_bytes
    on_a_gpu = replace(memory, device="cuda", **of_host)
    assert predict_memory(model.config, on_a_gpu, Workload()).checkpoint_bytes == predicted
    if lora is not None:
        add_adapter(model, lora)
    learner = TreeLearner(model, recipe(**changes, **({"lora": lora} if lora else {})))
    learn(learner, *batch_of(rng, 1), seed=0)
    save_tiny_model(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    state = TrainerState(step=1, learner=learner.state_dict())
    checkpoint = save_checkpoint(tmp_path, state, learner.save_pretrained, tokenizer)
    files = [*checkpoint.rglob("*.safetensors"), checkpoint / "trainer_state.pt"]
    written = sum(file.stat().st_size for file in files)
    assert predicted <= written <= 1.03 * predicted + 20_000
