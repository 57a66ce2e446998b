"""FlexAttention's kernel options: those that are tried, the choice, the cache, and the calls that get them.

The trial runs on a CPU, where FlexAttention ignores its options. A stand-in records them, and gives each its own time.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex
from transformers import PreTrainedModel

from brorl.model import flex_attention, flex_options
from brorl.model.compilation import compiler_settings
from brorl.model.flex_attention import BLOCK, FlexContext, FlexLayout
from brorl.model.flex_options import FlexChoice, LayerAttention, choose_flex_options, fastest_options
from brorl.model.forward import check_packed, with_packed_passes
from brorl.model.tree_attention import HooksError, KVShape
from brorl.model.tree_path import TreeForward
from small_models import small_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # PyTorch hides it
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # the compiler does it
]
CPU = torch.device("cpu")
SMALL = LayerAttention(2, KVShape(1, 16, 16), torch.bfloat16, 300, 40)
BACKWARD, FORWARD = SMALL.options()


@pytest.mark.parametrize("size", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernels_take_the_options(size: int, dtype: torch.dtype) -> None:
    """PyTorch's templates demand that tiles divide the blocks of the mask, and these ratios of tiles."""
    known = torch_flex.FlexKernelOptions.__annotations__
    backward, forward = SMALL._replace(kv=KVShape(1, size, size), dtype=dtype).options()
    assert backward
    for prefix, stage in (("bwd_", backward), ("fwd_", forward)):
        for options in stage:
            numbers = {name.removeprefix(prefix): int(number) for name, number in map(split, options.split())}
            assert numbers.keys() <= known.keys()
            tiles = {name: number for name, number in numbers.items() if name.startswith("BLOCK")}
            assert len(tiles) == (4 if prefix == "bwd_" else 2)
            assert all(BLOCK % number == 0 for number in tiles.values())
            if prefix == "bwd_":
                assert tiles["BLOCK_N1"] % tiles["BLOCK_M1"] == tiles["BLOCK_M2"] % tiles["BLOCK_N2"] == 0
                assert size <= 128 or max(tiles.values()) < 128


def split(option: str) -> tuple[str, str]:
    name, _, number = option.partition("=")
    return name, number


def test_no_options_are_known_for_very_large_heads() -> None:
    assert SMALL._replace(kv=KVShape(1, 128, 512)).options() == ([], [])


@pytest.mark.parametrize("response_tokens", [1, 40, 3000])
def test_the_representative_pass_is_full_of_trees_whose_responses_share_a_beginning(response_tokens: int) -> None:
    attention = SMALL._replace(num_tokens=9000, response_tokens=response_tokens)
    positions, ends = attention.tokens()
    assert positions.size == 9088  # 71 blocks
    assert positions[0] == 0
    assert (np.diff(positions) <= 1).all()  # in preorder
    assert positions.max() == 256 + response_tokens - 1
    # a token of the first eighth has the responses of a whole tree below it, and the next token only its own
    size = 256 + 32 * response_tokens - 31 * (response_tokens // 8)
    open_tokens: list[int] = []  # whose subtrees have not ended
    for token in range(positions.size + 1):
        position = positions[token] if token < positions.size else 0
        while open_tokens and positions[open_tokens[-1]] >= position:
            assert ends[open_tokens.pop()] == token
        open_tokens.append(token)
    below = ends - np.arange(positions.size)
    if response_tokens // 8 and size <= positions.size:
        last_shared = 256 + response_tokens // 8 - 1
        assert below[last_shared] == size - last_shared
        assert below[last_shared + 1] == response_tokens - response_tokens // 8


Times = dict[str, float]


class Stand:
    """FlexAttention with a record of its options. Some raise an error, or change the output or its gradient."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: list[str] = []
        self.broken: set[str] = set()
        self.wrong: dict[str, tuple[float, float]] = {}  # factors of the output and of its gradient
        original = flex_attention.flex_attention

        def attend(*inputs: Tensor, kernel_options: dict[str, int] | None, **named: Any) -> Tensor:
            options = " ".join(f"{name}={number}" for name, number in (kernel_options or {}).items())
            self.options.append(options)
            if options in self.broken:
                raise RuntimeError("out of resource: shared memory")
            return Changed.apply(original(*inputs, **named), *self.wrong.get(options, (1.0, 1.0)))

        monkeypatch.setattr(flex_attention, "flex_attention", attend)
        monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)

    @property
    def tried(self) -> list[str]:
        return list(dict.fromkeys(self.options))

    def fastest(self, times: Times, seconds: Callable[[], float] = lambda: 0.0) -> FlexChoice | None:
        """Return the choice if the options take these times in milliseconds, and all others 9 ms."""

        def milliseconds(work: Callable[[], object]) -> float:
            work()
            return times.get(self.options[-1], 9.0)

        return fastest_options(SMALL, CPU, milliseconds, seconds)


class Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, of_gradient: float) -> Tensor:
        ctx.factor = of_gradient
        return factor * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.factor * grad, None, None


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(monkeypatch)


def test_the_fastest_options_win(stand: Stand) -> None:
    """Options of the forward pass are tried together with the best ones of the backward pass."""
    first, second, third = BACKWARD
    both = [f"{second} {forward}" for forward in FORWARD]
    times = {"": 4.0, first: 3.9, second: 3.0, third: 3.5, both[0]: 3.2, both[1]: 2.5}
    assert stand.fastest(times) == FlexChoice(both[1], 2.5, 4.0)
    assert stand.tried == ["", *BACKWARD, *both]


def test_pytorchs_own_options_stay_if_others_save_little(stand: Stand) -> None:
    assert stand.fastest({"": 4.0, BACKWARD[1]: 3.95, FORWARD[0]: 3.9}) == FlexChoice("", 4.0, 4.0)
    assert stand.tried == ["", *BACKWARD, *FORWARD]


def test_wrong_options_never_win(stand: Stand) -> None:
    wrong_output, wrong_gradient, good = BACKWARD
    broken = f"{good} {FORWARD[0]}"
    stand.wrong = {wrong_output: (1.2, 1.0), wrong_gradient: (1.0, 0.8), f"{good} {FORWARD[1]}": (float("nan"), 1.0)}
    stand.broken = {broken}
    times = {"": 4.0, wrong_output: 0.1, wrong_gradient: 0.1, good: 3.0, broken: 0.1, f"{good} {FORWARD[1]}": 0.1}
    assert stand.fastest(times) == FlexChoice(good, 3.0, 4.0)
    assert broken in stand.tried


def test_nothing_is_chosen_if_pytorchs_own_options_do_not_run(stand: Stand) -> None:
    stand.broken = {""}
    assert stand.fastest({}) is None
    assert stand.tried == [""]


@pytest.mark.parametrize(("compilation_s", "tries"), [(1.0, 6), (3.0, 3), (4.9, 2), (6.0, 2), (10.5, 1)])
def test_no_options_are_tried_that_would_end_after_10_s(stand: Stand, compilation_s: float, tries: int) -> None:
    """Each set of options takes the same time, and PyTorch's own are always tried."""

    def seconds() -> float:
        return compilation_s * len(stand.tried)

    choice = stand.fastest({"": 4.0, BACKWARD[0]: 3.0}, seconds)
    assert len(stand.tried) == tries
    best = ("", 4.0) if tries == 1 else (BACKWARD[0], 3.0)
    assert choice == FlexChoice(*best, 4.0, is_final=tries == 6)


def visible(position_T: np.ndarray) -> Tensor:
    """Return which tokens see which, shape [T, T]: the last token before it at each smaller depth of its tree."""
    sees = torch.zeros(position_T.size, position_T.size, dtype=torch.bool)
    path: list[int] = []
    for token, position in enumerate(position_T.tolist()):
        path = [*path[:position], token]
        sees[token, path] = True
    return sees


@pytest.mark.usefixtures("stand")
def test_rounding_agrees_and_a_missing_block_does_not() -> None:
    """The reference is dense attention in float64 with the mask from plain loops."""
    attention = LayerAttention(2, KVShape(1, 16, 16), torch.bfloat16, 1000, 100)
    trial = flex_options._Trial(attention, CPU)
    got = trial.with_options("")()
    inputs = [x.detach().double().requires_grad_() for x in (trial._query, trial._key, trial._value)]
    sees = visible(attention.tokens()[0])

    def dense(mask: Tensor) -> list[Tensor]:
        output = nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=0.25, enable_gqa=True)
        return [output.detach(), *torch.autograd.grad(output, inputs, trial._gradient.double())]

    def rounded(results: list[Tensor]) -> list[Tensor]:
        return [x.bfloat16() for x in results]

    assert all(map(flex_options._agrees, got, rounded(dense(sees))))
    sees[600:728, 128:256] = False  # half of the prompt is missing for one block of queries
    assert not any(map(flex_options._agrees, got, rounded(dense(sees))))


def on_cuda(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")


class Runs:
    """Choices by several runs with one cache folder."""

    def __init__(self, choice: FlexChoice | None) -> None:
        self.model = small_model(dtype=torch.float32)
        self.choice = choice
        self.measured: list[LayerAttention] = []
        self.lines: list[str] = []

    def choose(
        self, dtype: torch.dtype = torch.bfloat16, num_tokens: int = 1024, response_tokens: int = 200, kinds: int = 1
    ) -> str:
        shapes = [KVShape(2, 8 * kind, 8) for kind in range(1, kinds + 1)] * 2
        workload = dtype, num_tokens, response_tokens
        return choose_flex_options(self.model, shapes, workload, self.lines.append, self.measure)

    def measure(self, attention: LayerAttention, device: torch.device) -> FlexChoice | None:
        assert device.type == "cuda"
        self.measured.append(attention)
        return self.choice


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "brorl/flex_options.json"


def test_the_next_run_reads_the_choice_and_others_measure_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(FlexChoice(BACKWARD[0], 2.5, 4.0))
    on_cuda(monkeypatch, runs.model)
    line = (
        f"attention of a layer, forward and backward: 2.5 ms with {BACKWARD[0]}, 4 ms with PyTorch's own kernel options"
    )
    for _ in range(2):
        assert runs.choose() == BACKWARD[0]
        assert runs.lines.pop() == line
        assert runs.measured == [LayerAttention(4, KVShape(2, 8, 8), torch.bfloat16, 1024, 200)]
    assert runs.choose(response_tokens=256) == BACKWARD[0]  # as for 200 tokens
    assert len(runs.measured) == 1
    runs.choice = FlexChoice("", 4.0, 4.0)
    others: list[dict[str, Any]] = [{"dtype": torch.float32}, {"num_tokens": 2048}, {"response_tokens": 257}]
    for other in others:
        assert runs.choose(**other) == runs.choose(**other) == ""
    assert len(runs.measured) == 4
    assert runs.lines.pop() == (
        "attention of a layer, forward and backward: 4 ms with PyTorch's own kernel options for FlexAttention, the "
        "fastest of those tried"
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a different GPU")
    assert runs.choose() == ""
    monkeypatch.setattr(torch, "__version__", "9.0")
    assert runs.choose() == ""
    assert len(runs.measured) == 6
    assert len(json.loads(cache.read_text())) == 6


@pytest.mark.parametrize(
    "content",
    [
        "{", "[1]", "null", '{"KEY": 3}', '{"KEY": {"options": "bwd_BLOCK_M1=32"}}',
        '{"KEY": {"options": "bwd_BLOCK_M1=4096", "milliseconds": 1, "default_milliseconds": 2}}',
        '{"KEY": {"options": ["a"], "milliseconds": 1, "default_milliseconds": 2}}',
        '{"KEY": {"options": "", "milliseconds": "fast", "default_milliseconds": 2}}',
    ],
)  # fmt: skip
def test_a_damaged_choice_is_measured_again(content: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(FlexChoice(BACKWARD[0], 2.5, 4.0))
    on_cuda(monkeypatch, runs.model)
    runs.choose()
    (key,) = json.loads(cache.read_text())
    cache.write_text(content.replace("KEY", key))
    for _ in range(2):
        assert runs.choose() == BACKWARD[0]
        assert len(runs.measured) == 2


def test_options_left_untried_are_tried_by_the_next_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a choice that a different process stored during the trial is kept."""
    runs = Runs(FlexChoice("", 4.0, 4.0, is_final=False))
    on_cuda(monkeypatch, runs.model)
    assert runs.choose() == ""
    assert not cache.exists()
    runs.choice = FlexChoice(BACKWARD[0], 2.5, 4.0)
    measure = runs.measure

    def store_and_measure(*args: Any) -> FlexChoice | None:
        cache.parent.mkdir(parents=True)
        cache.write_text('{"different": {}}')
        return measure(*args)

    monkeypatch.setattr(runs, "measure", store_and_measure)
    assert runs.choose() == runs.choose() == BACKWARD[0]
    assert len(runs.measured) == 2
    assert len(json.loads(cache.read_text())) == 2


def test_a_choice_is_made_without_a_cache_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(FlexChoice(BACKWARD[0], 2.5, 4.0))
    on_cuda(monkeypatch, runs.model)
    cache.parent.write_text("not a folder")
    assert [runs.choose(), runs.choose()] == [BACKWARD[0]] * 2
    assert len(runs.measured) == 2


def test_nothing_is_tried_off_cuda_or_for_layers_that_differ(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(FlexChoice(BACKWARD[0], 2.5, 4.0))
    assert runs.choose() == ""
    on_cuda(monkeypatch, runs.model)
    assert runs.choose(kinds=2) == ""
    assert runs.measured == []
    runs.choice = None
    assert runs.choose() == ""
    assert runs.lines == []
    assert not cache.exists()


def test_the_options_are_constants_of_a_compiled_graph() -> None:
    """So passes of other lengths compile nothing more, and other options do."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    class Layer(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, context: FlexContext) -> Tensor:
            return context.of_heads(self, query, key, value, 0.25, None, None)

    torch.compiler.reset()
    layer = torch.compile(Layer(), backend=backend, dynamic=True, fullgraph=True)
    options = ["fwd_BLOCK_M=64 bwd_BLOCK_M1=32", ""]
    with compiler_settings(), torch.no_grad():
        for name, num_blocks in product(options, (3, 4, 5)):
            x = torch.randn(1, 2, num_blocks * BLOCK, 16)
            position = np.arange(num_blocks * BLOCK)
            layout = FlexLayout.of(position, np.full_like(position, position.size), None)
            layer(x, x, x, FlexContext(layout, *map(torch.from_numpy, layout.arrays), options=name))
    torch.compiler.reset()
    assert len(graphs) == 2
    constants = []
    for graph in graphs:
        (call,) = (node for node in graph.graph.nodes if node.target is torch.ops.higher_order.flex_attention)
        (kernel_options,) = (argument for argument in call.args if isinstance(argument, dict))
        constants.append({name: value for name, value in kernel_options.items() if "BLOCK_M" in name})
    assert constants == [{"fwd_BLOCK_M": 64, "bwd_BLOCK_M1": 32}, {}]


def test_the_check_of_packed_passes_uses_the_options(stand: Stand) -> None:
    model = small_model(dtype=torch.float32)
    check_packed(model, TreeForward(packed=True, flex_options=BACKWARD[0]))
    assert stand.tried == [BACKWARD[0]]
    stand.wrong = {BACKWARD[0]: (1.5, 1.5)}
    with pytest.raises(HooksError, match="the log-probs of LlamaForCausalLM change"):
        check_packed(model, TreeForward(packed=True, flex_options=BACKWARD[0]))


def test_options_that_fail_the_check_are_given_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model, default = small_model(dtype=torch.float32), TreeForward()
    works: set[tuple[bool, str]] = set()
    tried: list[tuple[bool, str]] = []

    def check(_model: PreTrainedModel, way: TreeForward, _autocast: bool) -> None:
        tried.append((way.compiled, way.flex_options))
        if tried[-1] not in works:
            raise HooksError(f"{way.flex_options or 'own'} fails")

    monkeypatch.setattr("brorl.model.forward.check_packed", check)
    ways = list(product((True, False), ("m=1", "")))
    packed = replace(default, packed=True)
    for number, (compiled, options) in enumerate(ways):
        works, lines = {ways[number]}, []
        tried.clear()
        chosen = with_packed_passes(model, default, lines.append, flex_options="m=1")
        assert chosen == replace(packed, compiled=compiled, flex_options=options)
        assert tried == ways[: number + 1]
        given_up = [line for line in lines if line == "FlexAttention without the options m=1: m=1 fails"]
        assert len(given_up) == (options == "")
    works = set()
    assert with_packed_passes(model, default, lambda _: None, flex_options="m=1") is default
