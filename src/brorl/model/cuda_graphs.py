"""CUDA graphs: records work at fixed addresses once, and replays it with one launch.

A step is a function without arguments that reads and writes tensors at fixed addresses. If a graph cannot record a
step, all work of its kind runs eagerly, and a message reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Generic, Literal, TypeVar

import torch

from brorl.activity import Echo
from brorl.errors import UserError, first_line

GraphChoice = Literal["auto", "on", "off"]
Step = Callable[[], None]
# Runs steps in order, as often as needed, then records them in order, and returns their replays. A step may use tensors
# made by an earlier one.
Capture = Callable[[Sequence[Step]], list[Step]]
Recording = TypeVar("Recording")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all captures on a device: always the same, since libraries keep memory per stream."""
    return torch.cuda.Stream(device)


class CudaCapture:
    """Records CUDA graphs that share one memory pool, since they are replayed one after another.

    A pool is released with its last graph, so later graphs need a new pool. If `forbids_waits`, a step that makes the
    host wait raises an error before the capture: a capture that fails halfway can leave CUDA's allocator in a bad
    state. No other thread may use the device then.
    """

    def __init__(self, device: torch.device, forbids_waits: bool = False) -> None:
        self._device = device
        self._forbids_waits = forbids_waits
        self._stream = _stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, steps: Sequence[Step]) -> list[Step]:
        """Warm up on a side stream, since libraries allocate at first use, then record the kernels of each step."""
        replays: list[Step] = []
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    self._warm_up(steps)
                    for step in steps:
                        graph = torch.cuda.CUDAGraph()
                        # Other threads, such as verifiers, may use the device during the capture.
                        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                            step()
                        replays.append(graph.replay)
            finally:  # even if a step failed: the caller reuses the memory that its kernels still write
                current.wait_stream(self._stream)
        return replays

    def _warm_up(self, steps: Sequence[Step]) -> None:
        before = torch.cuda.get_sync_debug_mode() if self._forbids_waits else None
        try:
            if self._forbids_waits:
                torch.cuda.set_sync_debug_mode("error")
            for step in steps:
                step()
        finally:
            if before is not None:
                torch.cuda.set_sync_debug_mode(before)


class GraphStore(Generic[Recording]):
    """The recordings of one kind of work, the least recently used one first.

    Args:
        work: What is recorded, for messages, such as `decoding`.
        choice: With `on`, a failure is an error. With `auto`, the work runs eagerly after a failure.
        echo: Receives a line about the failure.
        new_capture: Creates a `Capture` for recordings that share memory.
        max_recordings: Recordings to keep; the least recently used one is dropped first.
    """

    def __init__(
        self,
        work: str,
        choice: GraphChoice,
        echo: Echo,
        new_capture: Callable[[], Capture],
        max_recordings: int,
    ) -> None:
        self.enabled = True  # whether work is recorded; once False, always False
        self._work = work
        self._choice = choice
        self._echo = echo
        self._new_capture = new_capture
        self._max_recordings = max_recordings
        self._capture: Capture | None = None
        self._recordings: dict[Hashable, Recording] = {}

    @property
    def capture(self) -> Capture:
        """The capture for new recordings."""
        self._capture = self._capture or self._new_capture()
        return self._capture

    def get(self, key: Hashable) -> Recording | None:
        """Return a recording, and mark it as the most recently used; None if there is none."""
        recording = self._recordings.pop(key, None)
        if recording is not None:
            self._recordings[key] = recording
        return recording

    def add(self, key: Hashable, recording: Recording) -> None:
        """Keep a recording."""
        if len(self._recordings) == self._max_recordings:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[key] = recording

    def emptied(self) -> GraphStore[Recording]:
        """Return a store with the same settings and no recordings."""
        other = GraphStore[Recording](self._work, self._choice, self._echo, self._new_capture, self._max_recordings)
        other.enabled = self.enabled
        return other

    def clear(self) -> None:
        """Drop all recordings and their memory."""
        self._recordings.clear()
        self._capture = None

    def refuse(self, reason: str) -> None:
        """From now on, run everything eagerly, and report why. Raise a UserError if graphs are required."""
        if not self.enabled:
            return
        if self._choice == "on":
            raise UserError(
                f"engine.cuda_graphs = on, but {self._work} cannot be recorded as CUDA graphs: {reason}; set "
                "engine.cuda_graphs: auto"
            )
        self.enabled = False
        self.clear()
        self._echo(f"{self._work} launches its kernels one by one, without CUDA graphs: {reason}")

    def passes_trial(self, device: torch.device) -> bool:
        """Record and replay a small step. If that is not possible, refuse recordings."""
        written = torch.zeros(1, device=device)

        def step() -> None:
            written.fill_(1)

        try:
            (replay,) = self.capture([step])
            written.zero_()
            replay()
            reason = None if bool(written == 1) else "a trial changes nothing"
        except Exception as error:  # the driver or the build of PyTorch can fail in any way
            reason = f"{type(error).__name__}: {first_line(error)}"
        self.clear()  # the memory pool is released with the trial's graph
        if reason is not None:
            self.refuse(reason)
        return self.enabled
