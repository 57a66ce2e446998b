"""Recorded passes of the learner: the log-probs and gradients of the flat path, few recordings, and every fallback."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from brorl.algorithms.advantages import grpo
from brorl.algorithms.groups import Group
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.model import flex_attention, logits, tree_path
from brorl.model.flat_path import flat_chunk_logprobs
from brorl.model.flex_attention import BLOCK, MIN_TOKENS, few_sizes_multiple, padded_tokens
from brorl.model.forward import with_recorded_passes
from brorl.model.logprobs import NextToken, by_tree
from brorl.model.lora import add_adapter
from brorl.model.settings import LoraSettings
from brorl.model.tree_attention import enable_gradient_checkpointing
from brorl.model.tree_path import TreeForward, chunk_logprobs, tree_logprobs
from brorl.prompts.prompt import Prompt
from brorl.rollout.settings import EngineSettings
from brorl.training.learner import TreeLearner
from brorl.training.settings import OptimizerSettings
from brorl.tree import RolloutTree
from dense_attention import dense_attention
from path_checks import gemma, learned, some_trees, weights_of
from recorded_steps import RecordedSteps
from small_models import mostly_slow, random_tree, small_model

PACKED = TreeForward(packed=True)
NODES = 1024  # per pass; sizes are then multiples of 128


@pytest.fixture(autouse=True)
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "flex_attention", dense_attention)


class Recorder:
    """Stands in for CUDA: the captures, the lines for the user, and a path with recorded passes."""

    def __init__(self, model: PreTrainedModel, choice: str = "auto", **options: Any) -> None:
        self.captures: list[RecordedSteps] = []
        self.lines: list[str] = []
        self.spoil: Callable[[], object] = lambda: None
        self._model, self._choice, self._options = model, choice, options

    def __call__(self, _device: torch.device, _forbids_waits: bool) -> RecordedSteps:
        self.captures.append(RecordedSteps(lambda: self.spoil()))
        return self.captures[-1]

    def path(self) -> TreeForward:
        way = with_recorded_passes(
            self._model, PACKED, self.lines.append, self._choice, new_capture=self, **self._options
        )
        assert isinstance(way, TreeForward)
        return way

    def counts(self) -> tuple[int, int]:
        """Return the recorded passes and the replayed steps since the trial, which has a capture of its own."""
        return self.captures[-1].captures, self.captures[-1].replays


NEXT_TOKENS = [NextToken(), NextToken(1.3, 1, (5, 6), top_p=0.9, top_k=12)]  # no first token is 5 or 6


def without_first_tokens(trees: list[RolloutTree], *tokens: int) -> list[RolloutTree]:
    """Replace these tokens where they come first: a log-prob of -inf would be a wrong one in a sum."""
    changed = [np.where((tree.parent < 0) & np.isin(tree.token, tokens), tree.token + 2, tree.token) for tree in trees]
    return [replace(tree, token=token_M) for tree, token_M in zip(trees, changed, strict=True)]


@pytest.mark.parametrize("blocks", mostly_slow([False, True]))
@pytest.mark.parametrize("next_token", NEXT_TOKENS)
def test_recorded_passes_equal_the_flat_path(
    next_token: NextToken, blocks: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other trees, and weights that changed in place; with `blocks`, the logits of 50 rows are computed at a time."""
    if blocks:
        for module in (logits, tree_path):
            monkeypatch.setattr(module, "MAX_LOGITS", 50 * 17)
        monkeypatch.setattr("brorl.model.logprobs.LOGITS_PER_BLOCK", 50 * 17)
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=2, scale=0.3).train()
    recorder = Recorder(model)
    way = recorder.path()
    for _ in range(5):
        trees = without_first_tokens(some_trees(rng), 5, 6)
        weight_KO = weights_of(rng, trees)
        options = {"next_token": next_token, "entropy": True}
        expected, gradients = learned(model, trees, weight_KO, flat_chunk_logprobs, **options)
        got, got_gradients = learned(model, trees, weight_KO, chunk_logprobs, max_nodes=NODES, forward=way, **options)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        assert got_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(got_gradients[name], gradient, rtol=1e-9, atol=1e-10)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.02)
    passes, replays = recorder.counts()
    assert 1 <= passes <= 2  # the sizes of all trees are rounded to one or two
    assert replays >= 2 * 3  # forward and backward; the first pass of a size is not recorded
    assert not recorder.lines


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3", "gemma 3", "adapters", "checkpointing", "bfloat16", "whole logits"])
def test_every_kind_of_pass_is_recorded(case: str, rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(1 << 30)))
    if case.startswith("gemma"):
        model = gemma(3).float()
    else:
        model = small_model("qwen3" if case == "qwen3" else "llama", dtype=torch.float32, num_hidden_layers=2)
    if case == "adapters":
        add_adapter(model, LoraSettings(rank=4))
    if case == "checkpointing":
        enable_gradient_checkpointing(model)
    recorder = Recorder(model.train(), autocast=case == "bfloat16")
    way = replace(recorder.path(), whole_logits=case == "whole logits")
    bound = 0.1 if case == "bfloat16" else 1e-4
    trees = some_trees(rng)
    weight_KO = weights_of(rng, trees).float()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "bfloat16"):
            got, got_gradients = learned(model, trees, weight_KO, chunk_logprobs, max_nodes=NODES, forward=way)
            expected, gradients = learned(model, trees, weight_KO, flat_chunk_logprobs)
        torch.testing.assert_close(got, expected, rtol=bound, atol=bound)
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        for name, gradient in gradients.items():
            torch.testing.assert_close(got_gradients[name], gradient, rtol=bound, atol=bound * largest)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.02)
    passes, replays = recorder.counts()
    assert passes >= 1
    assert replays >= 4
    assert not recorder.lines


def groups_of(rng: np.random.Generator) -> list[Group]:
    groups = []
    for index in range(6):
        tree = random_tree(rng, num_rollouts=30, max_length=12)
        correct_L = np.arange(tree.num_responses) % 2 == 0
        prompt = Prompt(f"p{index}", "?", tree.prompt_ids, "a", "d")
        groups.append(Group(prompt, tree, correct_L, correct_L.astype(float)))
    return groups


def test_a_learner_makes_the_same_updates(rng: np.random.Generator) -> None:
    """Steps of two mini-batches, whose gradients a recorded pass adds to, with passes that occur once in between."""
    seed = int(rng.integers(1 << 30))
    models = [small_model(seed=seed, scale=0.3) for _ in range(2)]
    recorder = Recorder(models[1])
    paths = PACKED, recorder.path()
    optimizer = OptimizerSettings(old_logprobs="recompute", mini_batches=2)
    engine = EngineSettings(nodes_per_pass=256, attention="tiled")
    config = TrainConfig(dtype="float64", optimizer=optimizer, engine=engine)
    learners = [TreeLearner(model, config, forward=path) for model, path in zip(models, paths, strict=True)]
    for step in range(4):
        groups = groups_of(rng)
        records = [learner.learn(groups, grpo, step) for learner in learners]
        assert records[0].grad_norm == pytest.approx(records[1].grad_norm, rel=1e-9)
        assert records[0].old_policy_kl == pytest.approx(records[1].old_policy_kl, rel=1e-9, abs=1e-12)
    for plain, changed in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(changed, plain, rtol=1e-7, atol=1e-8)
    passes, replays = recorder.counts()
    assert passes >= 2
    assert replays > 3 * passes


def test_a_learner_records_the_second_of_two_passes_in_a_row(rng: np.random.Generator) -> None:
    """The autograd graph of the first, which is eager, has ended by then."""
    model = small_model(seed=int(rng.integers(1 << 30)))
    recorder = Recorder(model)
    engine = EngineSettings(nodes_per_pass=64, attention="tiled")
    optimizer = OptimizerSettings(mini_batches=1)
    learner = TreeLearner(
        model, TrainConfig(dtype="float64", engine=engine, optimizer=optimizer), forward=recorder.path()
    )
    group = groups_of(rng)[0]
    known = replace(group, tree=replace(group.tree, logprob=np.zeros(group.tree.num_nodes)))
    captures = len(recorder.captures)
    learner.learn([known] * 3, grpo, 0)
    assert len(recorder.captures) == captures + 1


def test_recordings_free_their_memory_when_it_runs_out(rng: np.random.Generator) -> None:
    """Those of smaller passes share new memory, and the update is that of eager passes."""
    seed = int(rng.integers(1 << 30))
    models = [small_model(seed=seed, scale=0.3) for _ in range(2)]
    recorder = Recorder(models[1])
    optimizer = OptimizerSettings(old_logprobs="recompute")
    engine = EngineSettings(nodes_per_pass=512, attention="tiled")
    config = TrainConfig(dtype="float64", optimizer=optimizer, engine=engine)
    learners = [TreeLearner(models[0], config, forward=PACKED), TreeLearner(models[1], config, forward=recorder.path())]
    groups = groups_of(rng)

    def run_out() -> None:
        recorder.spoil = lambda: None
        raise torch.OutOfMemoryError

    for step in range(4):
        if step == 2:
            assert recorder.counts()[1] > 0
            used = len(recorder.captures)
            recorder.spoil = run_out
        records = [learner.learn(groups, grpo, step) for learner in learners]
        assert records[1].out_of_memory_retries == (step == 2)
        assert records[0].grad_norm == pytest.approx(records[1].grad_norm, rel=1e-9)
    assert len(recorder.captures) == used + 1
    assert recorder.counts()[1] > 0
    assert records[1].nodes_per_pass == 256


def test_few_sizes_occur(rng: np.random.Generator) -> None:
    model = small_model(seed=1)
    recorder = Recorder(model)
    way = recorder.path()
    for _ in range(40):
        trees = [random_tree(rng, num_rollouts=int(rng.integers(20, 60)), max_length=20) for _ in range(6)]
        with torch.no_grad():
            got = list(chunk_logprobs(model, trees, max_nodes=NODES, forward=way))
        assert sum(chunk.logprob.numel() for chunk in got) == sum(tree.num_nodes for tree in trees)
    passes, replays = recorder.counts()
    assert passes < 15
    assert replays > 3 * passes


def test_a_parameter_without_a_gradient_keeps_none(rng: np.random.Generator) -> None:
    """AdamW would decay its weight if it had one of zeros."""
    model = small_model(seed=int(rng.integers(1 << 30)))
    model.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    way = Recorder(model).path()
    for _ in range(3):
        (chunk,) = chunk_logprobs(model, [random_tree(rng, num_rollouts=9)], max_nodes=NODES, forward=way)
        chunk.logprob.sum().backward()
    assert model.unused.grad is None
    assert all(p.grad is not None for name, p in model.named_parameters() if name != "unused")


def test_weights_at_other_addresses_have_a_recording_of_their_own(rng: np.random.Generator) -> None:
    """As those of a reference, which replace the weights for some passes."""
    model, trees = small_model(seed=int(rng.integers(1 << 30))), [random_tree(rng, num_rollouts=9)]
    recorder = Recorder(model)
    way = recorder.path()
    own = [parameter.data for parameter in model.parameters()]
    others = [1.5 * data for data in own]
    for _ in range(3):
        for weights in (own, others):
            for parameter, data in zip(model.parameters(), weights, strict=True):
                parameter.data = data
            with torch.no_grad():
                (chunk,) = chunk_logprobs(model, trees, max_nodes=NODES, forward=way)
                expected = torch.cat(tree_logprobs(model, trees))
            torch.testing.assert_close(chunk.logprob[chunk.index.argsort()], expected, rtol=1e-10, atol=1e-10)
    assert recorder.counts() == (2, 2 * 3)  # each is compared once, and replayed in the second and third round


def test_a_pass_is_not_overwritten_before_its_backward_pass(rng: np.random.Generator) -> None:
    model = small_model(seed=2)
    way = Recorder(model).path()

    def chunk() -> torch.Tensor:
        (made,) = chunk_logprobs(model, [random_tree(rng, num_rollouts=9)], max_nodes=NODES, forward=way)
        return made.logprob

    chunk()  # an eager pass
    first = chunk()
    chunk()
    with pytest.raises(RuntimeError, match="run its backward pass first"):
        first.sum().backward()


def test_nothing_is_recorded_while_an_eager_pass_has_an_autograd_graph(rng: np.random.Generator) -> None:
    """Its nodes, which add to the gradients, belong to a stream that is not captured."""
    model = small_model(seed=int(rng.integers(1 << 30)))
    recorder = Recorder(model)
    way = recorder.path()
    captures, trees = len(recorder.captures), [random_tree(rng, num_rollouts=9)]
    passes = [next(chunk_logprobs(model, trees, max_nodes=NODES, forward=way)) for _ in range(3)]
    assert len(recorder.captures) == captures
    for chunk in passes:
        chunk.logprob.sum().backward()
    del chunk, passes
    next(chunk_logprobs(model, trees, max_nodes=NODES, forward=way))
    assert recorder.counts() == (1, 2 + 1)


def test_a_copy_of_the_model_has_recordings_of_its_own(rng: np.random.Generator) -> None:
    """As in `brorl plan`: the model's recordings read the model's weights."""
    model, trees = small_model(seed=int(rng.integers(1 << 30))), [random_tree(rng, num_rollouts=9)]
    recorder = Recorder(model)
    way = recorder.path()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert way.graphs is not None
    captures = len(recorder.captures)
    paths = (model, way), (other, way), (other, replace(way, graphs=way.graphs.of(other)))
    for _ in range(3):
        for one, path in paths:
            weight_KO = weights_of(rng, trees)
            expected, gradients = learned(one, trees, weight_KO, flat_chunk_logprobs)
            got, got_gradients = learned(one, trees, weight_KO, chunk_logprobs, max_nodes=NODES, forward=path)
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
            for name, gradient in gradients.items():
                torch.testing.assert_close(got_gradients[name], gradient, rtol=1e-9, atol=1e-10)
    assert [capture.captures for capture in recorder.captures[captures:]] == [1, 1]


def test_casts_of_weights_end_with_a_recording(rng: np.random.Generator) -> None:
    """Autocast keeps them for later passes, but their memory belongs to the graphs, whose replays overwrite it."""
    model = small_model(seed=int(rng.integers(1 << 30)), dtype=torch.float32)
    recorder = Recorder(model, autocast=True)
    way = recorder.path()
    sizes = [[random_tree(rng, num_rollouts=n, prompt_length=n)] for n in (9, 300, 600)]

    def run(path: TreeForward, size: int) -> torch.Tensor:
        return torch.cat([c.logprob for c in chunk_logprobs(model, sizes[size], max_nodes=4096, forward=path)])

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = [run(PACKED, size) for size in range(3)]
        for size in (0, 0, 1, 1, 0, 2):
            torch.testing.assert_close(run(way, size), expected[size], rtol=0.05, atol=0.05)
    assert recorder.counts()[0] == 2


def test_a_chunk_can_own_no_nodes() -> None:
    """Two equal responses, one of them truncated, in chunks of their own."""
    model = small_model(seed=4)
    way = Recorder(model).path()
    row = [3 + i % 9 for i in range(36)]
    trees = [RolloutTree.from_responses([1, 2], [row, row], finished=[True, False])]
    for _ in range(2):
        chunks = list(chunk_logprobs(model, trees, max_nodes=16, forward=way))
        torch.testing.assert_close(by_tree(chunks, trees), tree_logprobs(model, trees))


def test_padding_is_at_most_an_eighth() -> None:
    sizes = range(1, 20_000)
    padded = [padded_tokens(size, few_sizes_multiple(size)) for size in sizes]
    assert all(
        size <= length <= max(MIN_TOKENS, size * 9 / 8 + BLOCK) for size, length in zip(sizes, padded, strict=True)
    )
    assert all(length % BLOCK == 0 for length in padded)
    assert len({length for length in padded if 8192 < length <= 16384}) == 8


@pytest.mark.parametrize("factor", [1.5, np.nan])
@pytest.mark.parametrize("choice", ["auto", "on"])
@pytest.mark.parametrize("during", ["trial", "run"])
def test_a_replay_that_differs_is_not_taken(during: str, choice: str, factor: float, rng: np.random.Generator) -> None:
    """In the trial against the model, later against the eager pass; the gradients of the step in progress are kept."""
    model = small_model(seed=int(rng.integers(1 << 30)))
    recorder = Recorder(model, choice)

    def spoil() -> None:
        with torch.no_grad():
            gradient = model.model.norm.weight.grad
            if gradient is not None:
                gradient.mul_(factor)

    if during == "trial":
        recorder.spoil = spoil
        if choice == "on":
            with pytest.raises(UserError, match=r"engine.cuda_graphs = on, but learning .* the gradients change"):
                recorder.path()
            return
        assert recorder.path() is PACKED
        assert recorder.lines == ["learning launches its kernels one by one, without CUDA graphs: the gradients change"]
        return
    way = recorder.path()
    recorder.spoil = spoil
    trees = [[random_tree(rng, num_rollouts=9)] for _ in range(3)]
    model.zero_grad()
    if choice == "on":
        with pytest.raises(UserError, match=r"set engine.cuda_graphs: auto"):
            learn_all(model, trees, way)
        return
    learn_all(model, trees, way)
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    learn_all(model, trees, PACKED)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-10, atol=1e-12)
    assert recorder.lines == ["learning launches its kernels one by one, without CUDA graphs: the gradients change"]


def learn_all(model: PreTrainedModel, batches: list[list[RolloutTree]], way: TreeForward) -> None:
    """Add up the gradients of several passes."""
    for trees in batches:
        (chunk,) = chunk_logprobs(model, trees, max_nodes=NODES, forward=way)
        chunk.logprob.sum().backward()
        del chunk


def test_what_cannot_be_recorded_runs_eagerly() -> None:
    model = small_model(seed=3)

    def failing(_device: torch.device, _forbids_waits: bool) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing.\nmore")

    lines: list[str] = []
    assert with_recorded_passes(model, PACKED, lines.append, new_capture=failing) is PACKED
    message = "RuntimeError: operation not permitted when stream is capturing"
    assert lines == [f"learning launches its kernels one by one, without CUDA graphs: {message}"]
    assert with_recorded_passes(model, PACKED, lines.append, "off", new_capture=failing) is PACKED
    tiled = TreeForward()
    assert with_recorded_passes(model, tiled, lines.append, new_capture=failing) is tiled
    assert len(lines) == 1
