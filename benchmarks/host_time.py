"""Host time of a packed, compiled pass on one CPU thread, by cause, without the work of FlexAttention.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py [--repeats N] [--layers N] [--hidden N]

A random Llama with 9 heads and 3 key-value heads computes one chunk of 256 tokens, forward and backward. FlexAttention
has no compiled backward pass on a CPU, so an operator stands in for it that returns zeros. It gets the lists of
blocks of the mask, as the kernel would. Figures are processor time, medians of passes in turns. Kernels are small, so
most of the rest would take the same time on a GPU's host; kernels and their start would not.

The parts are differences between passes with less and less in them:

- kernels: from the whole pass to one whose matrix products and fused loops are replaced by an empty Python function;
- generated code (inductor's Python around kernels: buffers, views): to one where a graph returns what it last returned;
- guards of Dynamo: to one with a filter that drops all of them;
- the rest of Dynamo: to one that calls the function that Dynamo calls, with the arguments that it passed before;
- AOTAutograd's wrappers: to one whose layers are a plain `torch.autograd.Function` of the weights that does nothing;
- autograd's nodes, with the addition of gradients: to one whose layers return their input.

The operator that stands in, and the parts outside the layers, are timed alone. Parts outside the layers are the layout
of the chunk with the tensors of its block mask, `compiled_layers` (with `replaced_forward`), `compiler_settings` within
it, and calls of layers through their hooks. The first pass includes compilation, with empty caches.

The last row is a recorded pass: graphs that do nothing stand in for CUDA graphs, so it has all of the host's work but
the two launches.
"""

import argparse
import os
import resource
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

CACHE = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = CACHE.name  # read when torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from harness import ABSENT, table  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._inductor.codecache import PyCodeCache  # noqa: E402
from torch._inductor.compile_fx import compile_fx  # noqa: E402
from torch._inductor.output_code import CompiledFxGraph  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from brorl.model import compilation, flex_attention  # noqa: E402
from brorl.model.chunks import ChunkLayout, split_into_chunks  # noqa: E402
from brorl.model.cuda_graphs import GraphStore, Step  # noqa: E402
from brorl.model.flex_attention import FlexLayout  # noqa: E402
from brorl.model.logits import replaced_forward  # noqa: E402
from brorl.model.logprobs import node_offsets  # noqa: E402
from brorl.model.pass_graphs import PassGraphs, RecordedPass  # noqa: E402
from brorl.model.tree_path import TreeForward  # noqa: E402
from brorl.tree import RolloutTree  # noqa: E402

PASSES = 4  # of a variant in each turn
FORWARD = TreeForward(packed=True, compiled=True)


class Times(NamedTuple):
    """Milliseconds of processor time of a pass."""

    forward: float
    backward: float


@torch.library.custom_op("brorl_benchmark::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Tensor]) -> Tensor:  # noqa: ARG001
    """Return zeros."""
    return torch.zeros_like(query)


@torch.library.custom_op("brorl_benchmark::attention_backward", mutates_args=())
def attention_backward(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:  # noqa: ARG001
    """Return zeros."""
    return [torch.zeros_like(x) for x in (query, key, value)]


@attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query)


@attention_backward.register_fake
def _(*inputs: Tensor) -> list[Tensor]:
    return [torch.empty_like(x) for x in inputs[:3]]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:3])
    ctx.num_blocks = len(inputs[3])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return *attention_backward(*ctx.saved_tensors, gradient.contiguous()), [None] * ctx.num_blocks


attention.register_autograd(_backward, setup_context=_save)


def stand_in(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, **_: Any) -> Tensor:
    """Take the place of FlexAttention."""
    mask = block_mask
    blocks = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    blocks += [mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices]
    return attention(query, key, value, blocks)


class Pass:
    """A pass over one chunk. `generated` are the modules that inductor wrote."""

    def __init__(self, num_layers: int, hidden: int) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=97, hidden_size=hidden, intermediate_size=4 * hidden // 3, num_hidden_layers=num_layers,
            num_attention_heads=9, num_key_value_heads=3,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).train()
        rng = np.random.default_rng(0)
        responses = rng.integers(0, 97, (4, 60)).tolist()
        self.trees = [RolloutTree.from_responses(rng.integers(0, 97, 8).tolist(), responses)]
        self.layers: list[Any] = list(self.model.model.layers)
        self.generated: list[types.ModuleType] = []

    def __call__(self, path: TreeForward = FORWARD) -> Times:
        """Run forward and backward."""
        start = time.process_time()
        (chunk,) = path.chunk_logprobs(self.model, self.trees, max_nodes=4096)
        middle = time.process_time()
        chunk.logprob.sum().backward()
        return Times(1e3 * (middle - start), 1e3 * (time.process_time() - middle))

    def compile(self) -> str:
        """Run the first pass, and return what it took."""
        load = PyCodeCache.load_by_key_path

        def recorded(*inputs: Any, **named: Any) -> types.ModuleType:
            self.generated.append(load(*inputs, **named))
            return self.generated[-1]

        start, before = time.process_time(), _children_s()
        with patch.object(PyCodeCache, "load_by_key_path", recorded):
            self()
        return (
            f"first pass: {time.process_time() - start:.1f} s of this process, {_children_s() - before:.1f} s of "
            "compilers that it started"
        )

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Replace all kernels inside the block."""
        with ExitStack() as stack:
            for module in self.generated:
                names = [name for name in vars(module) if name.startswith("cpp_fused")]
                for name in names:
                    stack.enter_context(patch.object(module, name, _nothing))
                stack.enter_context(patch.object(module, "extern_kernels", _Kernels()))
            yield

    @contextmanager
    def uncalled(self) -> Iterator[None]:
        """Let each graph return its last outputs inside the block."""
        call, last = CompiledFxGraph.__call__, {}

        def record(graph: CompiledFxGraph, inputs: list[Any]) -> Any:
            last[id(graph)] = call(graph, inputs)
            return last[id(graph)]

        def replay(graph: CompiledFxGraph, inputs: list[Any]) -> Any:
            inputs.clear()
            first, *rest = last[id(graph)]
            return (first if first is None else torch.empty_like(first), *rest)  # a new output for autograd

        with patch.object(CompiledFxGraph, "__call__", record):
            self()
        with patch.object(CompiledFxGraph, "__call__", replay):
            yield


class Graphs:
    """Stands in for CUDA graphs. The first replay is compared with the model; later ones do nothing."""

    def __call__(self, steps: Sequence[Step]) -> list[Step]:
        """Run steps, and return their replays."""
        for step in steps:
            step()
        return [self._replay(step) for step in steps]

    def _replay(self, step: Step) -> Step:
        left = [step]

        def replay() -> None:
            if left:
                left.pop()()

        return replay


def recorded(chunk: Pass, repeats: int) -> Times:
    """Return the medians of recorded passes."""
    store: GraphStore[RecordedPass] = GraphStore("learning", "on", print, Graphs, 1)
    path = replace(FORWARD, graphs=PassGraphs(chunk.model, store))
    chunk.model.zero_grad()
    times = [chunk(path) for _ in range(2 + repeats * PASSES)]  # the first runs eagerly, the second is recorded
    return Times(*np.median(times[2:], 0))


class _Kernels:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*_: object, **__: object) -> None:
    pass


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def layers_as(forward: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace the compiled forward of layers inside a block."""
    return patch.object(compilation, "compiled", lambda _function: forward)


def recompiled(layer: Any, **options: Any) -> Callable[..., Any]:
    """Compile the forward of a layer again. A copy of its code has its own graphs."""
    plain = compilation._plain_forward(type(layer))
    copied = types.FunctionType(plain.__code__.replace(), plain.__globals__, closure=plain.__closure__)
    copied.__defaults__, copied.__kwdefaults__ = plain.__defaults__, plain.__kwdefaults__
    graph: Callable[..., Any] = torch.compile(copied, dynamic=True, fullgraph=True, **options)
    return graph


class Direct:
    """Calls AOTAutograd's function of a layer with the arguments of its first call, except for the hidden states."""

    def __init__(self, layer: Any) -> None:
        self._graph = recompiled(layer, backend=self._backend)
        self._recorded: dict[Any, tuple[Callable[..., Any], list[Any], int]] = {}
        self._last: tuple[Callable[..., Any], list[Any]]

    def _backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        function = compile_fx(graph, inputs)

        def record(*arguments: Any) -> Any:
            self._last = function, list(arguments)
            return function(*arguments)

        return record

    def __call__(self, layer: Any, hidden: Tensor, **named: Any) -> Tensor:
        """Return the output of a layer."""
        if layer not in self._recorded:
            output: Tensor = self._graph(layer, hidden, **named)
            function, arguments = self._last
            (place,) = (i for i, argument in enumerate(arguments) if argument is hidden)
            arguments[place] = None
            self._recorded[layer] = function, arguments, place
            return output
        function, arguments, place = self._recorded[layer]
        arguments = [*arguments]
        arguments[place] = hidden
        (output,) = function(*arguments)
        return output


class _Node(torch.autograd.Function):
    """A layer that does nothing but give its weights a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, *weights)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *ctx.saved_tensors[1:]


def variants(chunk: Pass) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Return what is inside the passes, most first."""
    layer = chunk.layers[0]
    unguarded = recompiled(layer, options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe})
    direct = Direct(layer)
    weights = {layer: [*layer.parameters()] for layer in chunk.layers}

    @contextmanager
    def uncalled(forward: Callable[..., Any]) -> Iterator[None]:
        with layers_as(forward):
            chunk()  # compiles
            with chunk.uncalled():
                yield

    return {
        "whole": ExitStack,
        "no kernels": chunk.emptied,
        "no graphs": chunk.uncalled,
        "no guards": partial(uncalled, unguarded),
        "no Dynamo": partial(uncalled, direct),
        "only nodes": partial(layers_as, lambda layer, hidden, **_: _Node.apply(hidden, *weights[layer])),
        "no layers": partial(layers_as, lambda _layer, hidden, **_: hidden),
    }


def measured(chunk: Pass, repeats: int) -> dict[str, Times]:
    """Return the medians of all variants, which take turns."""
    kinds = variants(chunk)
    times: dict[str, list[Times]] = {name: [] for name in kinds}
    for _ in range(1 + repeats):  # the first warms up
        for name, inside in kinds.items():
            with inside():
                times[name].append(Times(*np.median([chunk() for _ in range(PASSES)], 0)))
    return {name: Times(*np.median(every[1:], 0)) for name, every in times.items()}


def alone(call: Callable[[], object], repeats: int, calls: int = 50) -> float:
    """Return the median milliseconds of a call."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(calls):
            call()
        times.append(1e3 * (time.process_time() - start) / calls)
    return float(np.median(times))


def outside(chunk: Pass, repeats: int) -> dict[str, float]:
    """Return the milliseconds of a pass that parts outside the graphs take."""
    model, trees = chunk.model, chunk.trees

    def layout() -> ChunkLayout:
        (slices,) = split_into_chunks(trees, 4096)
        layout = ChunkLayout(trees, node_offsets(trees), slices, with_prompts=True)
        attention = FlexLayout.of(layout.position_T, layout.end_T, None)
        flex_attention.FlexContext(attention, *map(torch.from_numpy, attention.arrays))
        return layout

    def enter(block: Callable[[], AbstractContextManager[None]]) -> None:
        with block():
            pass

    def call_layers() -> None:
        for layer in chunk.layers:
            layer(hidden, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False)

    hidden = torch.zeros(1)
    settings = alone(partial(enter, compilation.compiler_settings), repeats)
    with ExitStack() as stack:
        for layer in chunk.layers:
            stack.enter_context(replaced_forward(layer, lambda hidden, **_: hidden))
        calls = alone(call_layers, repeats)
    return {
        "layout and block mask": alone(layout, repeats),
        "compiler_settings": settings,
        "the rest of compiled_layers": alone(partial(enter, partial(compilation.compiled_layers, model)), repeats)
        - settings,
        "hooks and calls of layers": calls,
    }


def attention_ms(chunk: Pass, repeats: int) -> Times:
    """Return the milliseconds of a pass that the operators in the place of attention take."""
    hidden, num_layers = chunk.model.config.hidden_size, len(chunk.layers)
    query, key = torch.zeros(1, 9, 256, hidden // 9), torch.zeros(1, 3, 640, hidden // 9)
    blocks = [torch.zeros(1, 1, 2, 5, dtype=torch.int32)] * 8
    forward = partial(torch.ops.brorl_benchmark.attention.default, query, key, key, blocks)
    backward = partial(torch.ops.brorl_benchmark.attention_backward.default, query, query, key, key)
    with torch.no_grad():
        return Times(alone(forward, repeats) * num_layers, alone(backward, repeats) * num_layers)


def rows(chunk: Pass, repeats: int) -> Iterator[tuple[object, ...]]:
    """Yield the row of each cause."""
    times, stand_ins, outer = measured(chunk, repeats), attention_ms(chunk, repeats), outside(chunk, repeats)
    num_layers = len(chunk.layers)

    def row(name: str, part: Times, both: bool = True) -> tuple[object, ...]:
        backward = (f"{part.backward:.2f}", f"{1e3 * part.backward / num_layers:.0f}") if both else (ABSENT, ABSENT)
        return name, f"{part.forward:.2f}", f"{1e3 * part.forward / num_layers:.0f}", *backward

    def between(more: str, less: str) -> Times:
        return Times(*np.subtract(times[more], times[less]))

    yield row("kernels", between("whole", "no kernels"))
    yield row("the operator that stands in for attention", stand_ins)
    yield row("generated code", Times(*np.subtract(between("no kernels", "no graphs"), stand_ins)))
    yield row("guards", between("no graphs", "no guards"), both=False)
    yield row("the rest of Dynamo", between("no guards", "no Dynamo"), both=False)
    # Only the forward pass goes through Dynamo.
    wrappers = Times(between("no Dynamo", "only nodes").forward, between("no graphs", "only nodes").backward)
    yield row("AOTAutograd's wrappers", wrappers)
    yield row("autograd's nodes", between("only nodes", "no layers"))
    for name, milliseconds in outer.items():
        yield row(name, Times(milliseconds, 0.0), both=False)
    rest = times["no layers"].forward - sum(outer.values())
    yield row("the rest of the model, and log-probs", Times(rest, times["no layers"].backward))
    yield row("whole", times["whole"])
    yield row("whole, recorded", recorded(chunk, repeats))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=36)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with patch.object(flex_attention, "flex_attention", stand_in):
        chunk = Pass(options.layers, options.hidden)
        print(chunk.compile())
        columns = ("", "forward, ms", "us a layer", "backward, ms", "us a layer")
        print(table(columns, rows(chunk, options.repeats)))


if __name__ == "__main__":
    main()
