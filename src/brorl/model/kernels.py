"""C kernels for float32 on a CPU, compiled for this processor on first use.

Without a C compiler, PyTorch computes the same functions with more operations and passes over memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brorl.arrays import IntArray
from brorl.errors import UserError
from brorl.storage import cache_folder

CompileChoice = Literal["auto", "on", "off"]

KEYS_PER_BLOCK = 16  # keys whose scores are computed together; see kernels.c
_NUM_SUMS = 16  # partial sums over tokens, added in a fixed order for any number of threads
_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
_TIMEOUT_S = 120.0
_NEEDED_BYTES = 1 << 20  # free space in the folder of compiled code
_ARGUMENTS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "n": ctypes.c_int}
_SIGNATURES = {
    "rms_norm": "pipfpiiin",
    "rms_norm_backward": "pipfppipiiiin",
    "rotate": "pipppiiiin",
    "gated": "pppin",
    "gated_backward": "pppppin",
    "draw_tokens": "pifppppin",
    "attend_rows": "pppippipppppipiiiin",
    "attend_nodes": "pppppipppippiiiiin",
    "attend_nodes_backward": "pppppppipppippppppppiiiiin",
}


class KernelsError(UserError):
    """The kernels cannot be compiled or loaded."""


class Kernels:
    """The compiled functions of a shared library. All tensors are float32 on the CPU."""

    def __init__(self, library: Path) -> None:
        self._functions = ctypes.CDLL(str(library))
        for name, signature in _SIGNATURES.items():
            function = getattr(self._functions, name)
            function.argtypes = [_ARGUMENTS[letter] for letter in signature]
            function.restype = None

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a C function with the tensors' addresses and the number of threads."""
        addresses = (x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
        getattr(self._functions, name)(*addresses, torch.get_num_threads())

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Divide vectors by their root mean square, and multiply by a weight; shape [T, h] or [T, H, h]."""
        x = _with_dense_tokens(x)
        out = torch.empty(x.shape)
        self._call("rms_norm", x, x.stride(0), weight, epsilon, out, *_rows(x))
        return out

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, epsilon: float, grad: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of `x` (written to `out` if given) and of `weight` in `rms_norm`."""
        x, grad = _with_dense_tokens(x), grad.contiguous()
        out = torch.empty(x.shape) if out is None else out
        sums = torch.zeros(_NUM_SUMS, x.shape[-1])
        outputs = out, out.stride(0), sums, _NUM_SUMS
        self._call("rms_norm_backward", x, x.stride(0), weight, epsilon, grad, *outputs, *_rows(x))
        return out, sums.sum(0)

    def rotate(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, out: Tensor | None = None) -> Tensor:
        """Rotate the pairs (d, d + D / 2) of heads by the angles of their positions, into `out` if given."""
        x_THD = _with_dense_tokens(x_THD)
        out = torch.empty(x_THD.shape) if out is None else out
        self._call("rotate", x_THD, x_THD.stride(0), cos_TD, sin_TD, out, out.stride(0), *x_THD.shape)
        return out

    def gated(self, gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
        """Write silu(gate) * up to `out`, which may be either input. All must be contiguous."""
        self._call("gated", gate, up, out, gate.numel())
        return out

    def gated_backward(self, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return silu(gate) * up, and the gradient of `up`. Overwrite `grad` with the gradient of `gate`."""
        gated, grad_up = torch.empty_like(gate), torch.empty_like(up)
        self._call("gated_backward", gate, up, grad, gated, grad_up, gate.numel())
        return gated, grad_up

    def draw_tokens(
        self, logits_RV: Tensor, temperature: float, row_K: Tensor, uniform_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw a token for each of K rollouts; see `native.draw.draw_tokens`. Ascending rows are fastest."""
        logits_RV, row_K, uniform_K = logits_RV.contiguous(), row_K.contiguous(), uniform_K.contiguous()
        token_K, logprob_K = torch.empty_like(row_K), torch.empty_like(uniform_K)
        drawn = row_K, uniform_K, token_K, logprob_K
        self._call("draw_tokens", logits_RV, logits_RV.shape[1], 1 / temperature, *drawn, row_K.numel())
        return token_K, logprob_K

    def attend_rows(
        self, query_RHD: Tensor, key_RKD: Tensor, value_RKD: Tensor, prompt_key: Tensor, prompt_value: Tensor,
        prompt_R: Tensor, length_P: Tensor, pages: Tensor, slot_BR: Tensor, position: int,
    ) -> Tensor:  # fmt: skip
        """Store each row's new key and value; return the new token's attention to the prompt and the row, [R, H, D].

        Args:
            query_RHD: Scaled queries.
            key_RKD: Keys.
            value_RKD: Values.
            prompt_key: Contiguous keys of the prompts in blocks; see `in_blocks`.
            prompt_value: Contiguous values of the prompts, shape [P, K, S, D].
            prompt_R: Prompt of each row, int64.
            length_P: Tokens of each prompt, int64.
            pages: Addresses of the memory of B blocks of keys [slots, K, D, 16], and of values [slots, K, 16, D],
                int64, shape [2, B].
            slot_BR: The slot of each row in each block, int64. In the last block, each row has its own slot.
            position: Index of the new token in its row.
        """
        query_RHD = query_RHD.contiguous()
        key_RKD, value_RKD = _with_dense_tokens(key_RKD), _with_dense_tokens(value_RKD)
        if key_RKD.stride(0) != value_RKD.stride(0):
            key_RKD, value_RKD = key_RKD.contiguous(), value_RKD.contiguous()
        out = torch.empty(query_RHD.shape)
        rows, heads, width = query_RHD.shape
        num_kv_heads = key_RKD.shape[1]
        prompts = prompt_key, prompt_value, prompt_value.shape[2], prompt_R, length_P
        sizes = rows, num_kv_heads, heads // num_kv_heads, width
        self._call(
            "attend_rows", query_RHD, key_RKD, value_RKD, key_RKD.stride(0), *prompts, pages[0], pages[1], slot_BR,
            position, out, *sizes,
        )  # fmt: skip
        return out

    def attend_nodes(self, nodes: NodeStack, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention of nodes to their prompts and ancestors, [F, H, D], and its log-sum-exps, [F, H].

        The inputs, all contiguous, are scaled queries, keys, values, and the prompts' keys and values [P, K, S, D].
        """
        query, key, value, prompt_key, prompt_value = inputs
        blocks = in_blocks(prompt_key)
        out, lse = torch.empty(query.shape), torch.empty(query.shape[:2])
        prompts = blocks, prompt_value, prompt_key.shape[2]
        self._call("attend_nodes", query, key, value, *prompts, *nodes.arguments(), out, lse, *nodes.sizes(query, key))
        return out, lse

    def attend_nodes_backward(
        self, nodes: NodeStack, inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor, grad_FHD: Tensor
    ) -> list[Tensor]:
        """Return the gradients of the inputs of `attend_nodes`."""
        query, key, _, prompt_key, prompt_value = inputs
        blocks = [in_blocks(x) for x in (prompt_key, prompt_value)]
        grads = [torch.zeros(x.shape) for x in inputs]
        grad_FHD = grad_FHD.contiguous()
        self._call(
            "attend_nodes_backward", *inputs, *blocks, prompt_key.shape[2], *nodes.arguments(), out, lse, grad_FHD,
            *grads, *nodes.sizes(query, key),
        )  # fmt: skip
        return grads


class NodeStack:
    """The nodes of P trees for the kernels: in preorder, tree by tree, each with all of its ancestors.

    `prompt_F` is ascending; `depth_F` is 0 for the first token after the prompt.
    """

    def __init__(self, prompt_F: IntArray, depth_F: IntArray, length_P: IntArray) -> None:
        self._start = np.searchsorted(prompt_F, np.arange(length_P.size + 1))
        self._arrays = [np.ascontiguousarray(array, np.int64) for array in (length_P, self._start, depth_F)]
        self._deepest = int(depth_F.max()) + 1
        self._num_prompts = length_P.size

    def arguments(self) -> tuple[int, ...]:
        """Return the arguments that describe the nodes."""
        return *(array.ctypes.data for array in self._arrays), self._deepest

    def sizes(self, query_FHD: Tensor, key_FKD: Tensor) -> tuple[int, ...]:
        """Return the numbers of nodes, prompts, key-value heads and query heads per such head, and the head size."""
        num_nodes, num_heads, width = query_FHD.shape
        num_kv_heads = key_FKD.shape[1]
        return num_nodes, self._num_prompts, num_kv_heads, num_heads // num_kv_heads, width


def in_blocks(x_PKSD: Tensor) -> Tensor:
    """Return keys or values in blocks of tokens, padded with 0, shape [P, K, S / 16, D, 16]."""
    num_tokens = x_PKSD.shape[2]
    tokens = torch.nn.functional.pad(x_PKSD, (0, 0, 0, padded_to_blocks(num_tokens) - num_tokens))
    blocks: Tensor = tokens.unflatten(2, (-1, KEYS_PER_BLOCK)).transpose(3, 4).contiguous()
    return blocks


def _rows(x: Tensor) -> tuple[int, int, int]:
    """Return the number of tokens, vectors per token, and vector size of a 2- or 3-dimensional tensor."""
    return x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.shape[-1]


def _with_dense_tokens(x: Tensor) -> Tensor:
    """Return a tensor whose memory is dense within each token."""
    dense = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if dense else x.contiguous()


def padded_to_blocks(num_tokens: int) -> int:
    """Round a number of tokens up to whole blocks of keys."""
    return -(-num_tokens // KEYS_PER_BLOCK) * KEYS_PER_BLOCK


_choice: CompileChoice = "auto"


def use_kernels(choice: CompileChoice) -> None:
    """Set whether this process uses the kernels: auto (if there is a C compiler), on (required), or off."""
    global _choice  # one per process, like PyTorch's number of threads
    _choice = choice
    if choice == "on" and isinstance(loaded := _load(), str):
        raise KernelsError(f"engine.compile = on, and {loaded}; install a C compiler, or set engine.compile: auto")


def kernels_choice() -> CompileChoice:
    """Return the choice set by `use_kernels`."""
    return _choice


def kernels() -> Kernels | None:
    """Return the kernels of this process, or None if it has none."""
    loaded = None if _choice == "off" else _load()
    return loaded if isinstance(loaded, Kernels) else None


def kernels_of(x: Tensor) -> Kernels | None:
    """Return the kernels if they can compute with this tensor, and otherwise None."""
    return kernels() if x.dtype is torch.float32 and x.device.type == "cpu" else None


def describe_kernels() -> str:
    """Return `compiled`, `off (engine.compile)`, or `not compiled: ` and the reason."""
    if _choice == "off":
        return "off (engine.compile)"
    loaded = _load()
    return "compiled" if isinstance(loaded, Kernels) else f"not compiled: {loaded}"


TRITON_DEVICES = {"cuda"}
TRITON_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_triton: ContextVar[bool] = ContextVar("triton", default=False)


@contextmanager
def using_triton(use: bool) -> Iterator[None]:
    """Set whether this thread may use the Triton kernels inside the block.

    They need PyTorch for CUDA, compute in float32, round once, and have no gradients. The engine compares them with
    PyTorch's operations before it uses them; see `brorl.rollout.native_engine`.
    """
    if use:
        keep_compiled_code()
    token = _triton.set(use)
    try:
        yield
    finally:
        _triton.reset(token)


def suits_triton(x: Tensor) -> bool:
    """Return whether this thread may use the Triton kernels, and they can compute with this tensor."""
    suits = x.device.type in TRITON_DEVICES and x.dtype in TRITON_DTYPES
    return suits and _triton.get() and not torch.is_grad_enabled()


def keep_compiled_code() -> None:
    """Let PyTorch and Triton keep what they compile in the user's cache folder, unless the user set a folder.

    PyTorch's default, a folder of temporary files, remains if the cache folder is not writable or full.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow to import

    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    try:
        if folder is not None and folder != default_cache_dir():  # some modules of PyTorch set it to the default
            return
        kept = cache_folder() / "torchinductor"
        for made in (kept.parent, kept):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=kept) as file:
            file.write(bytes(_NEEDED_BYTES))
    except (OSError, RuntimeError, KeyError):  # RuntimeError: no home folder; KeyError: a user without a name
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kept)
    # Otherwise, kernels outside of graphs would not be found here, unless a graph was compiled before them.
    os.environ.setdefault("TRITON_CACHE_DIR", str(kept / "triton"))


@cache
def _load() -> Kernels | str:
    """Return the kernels, or the reason there are none."""
    try:
        return Kernels(compile_kernels())
    except subprocess.CalledProcessError as error:
        lines: list[str] = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        return f"{error.cmd[0]} failed: {lines[0]}"
    except (OSError, RuntimeError, subprocess.TimeoutExpired, AttributeError) as error:  # RuntimeError: no home folder
        return str(error)


def compile_kernels() -> Path:
    """Return the shared library for this processor. Compile it unless it is in the user's cache folder."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler is found (CC, cc, gcc, clang)")
    machine = "-march=native" if platform.machine() in ("x86_64", "i686") else "-mcpu=native"
    command = [compiler, *_FLAGS, machine]
    # A compiler's macros identify its version and the instructions it uses.
    macros = _run([*command, "-dM", "-E", "-x", "c", os.devnull])
    # If PyTorch has loaded GNU's OpenMP, both use the same threads.
    if "__clang__" not in macros and hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        command.append("-fopenmp")
    digest = hashlib.sha256("\n".join([*command, macros, _SOURCE.read_text("utf-8")]).encode()).hexdigest()
    folder = cache_folder()
    library = folder / f"kernels-{digest[:16]}.so"
    if library.is_file():
        return library
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        unlinked, linked = Path(made, "kernels.o"), Path(made, "kernels.so")
        _run([*command, "-c", str(_SOURCE), "-o", str(unlinked)])
        # Link without -fopenmp: PyTorch has already loaded the OpenMP functions.
        undefined = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
        _run([compiler, "-shared", *undefined, str(unlinked), "-o", str(linked), "-lm"])
        linked.replace(library)
    return library


def _run(command: list[str]) -> str:
    done: Any = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    output: str = done.stdout
    return output


def attend_stack(kernels: Kernels, nodes: NodeStack, *inputs: Tensor) -> Tensor:
    """Attend from nodes to their prompts and paths, differentiable; see `Kernels.attend_nodes`.

    In preorder, the ancestors of a node form a stack. The backward pass recomputes the scores, so memory grows with the
    number of nodes, not with the length of their paths.
    """
    output: Tensor = _AttendStack.apply(kernels, nodes, *(x.contiguous() for x in inputs))  # type: ignore[no-untyped-call]
    return output


class _AttendStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, nodes: NodeStack, *inputs: Tensor) -> Tensor:
        out, lse = kernels.attend_nodes(nodes, *inputs)
        ctx.kernels = kernels
        ctx.nodes = nodes
        ctx.save_for_backward(*inputs, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_FHD: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        return None, None, *ctx.kernels.attend_nodes_backward(ctx.nodes, tuple(inputs), out, lse, grad_FHD)
