"""Processes that share a learner: started once, they run functions on 2 or 3 ranks, one after the other."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from brorl.training.ranks import Ranks, join

TIMEOUT_S = 120.0


class RankProcesses:
    """Processes that wait for functions."""

    def __init__(self, size: int) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["brorl.training.learner", "peft"])
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._failures = 0  # after a failure all processes join again

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the results of `function(ranks, *arguments)` on the first `size` processes."""
        port = _free_port()
        for pipe in self._pipes:
            pipe.send((size, self._failures, port, function, arguments))
        results = []
        for pipe in self._pipes:
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError("a rank does not answer")
            results.append(pipe.recv())
        errors = [error for error, _ in results if error]
        self._failures += bool(errors)
        assert not errors, "\n".join(errors)
        return [result for _, result in results[:size]]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    joined = 1, 0
    while True:
        size, failures, port, function, arguments = pipe.recv()
        try:
            if (size, failures) != joined:
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()
                joined = size, failures
                if rank < size:
                    join(rank, size, "127.0.0.1", port, timeout_s=TIMEOUT_S / 2)
            pipe.send((None, function(Ranks(rank, size), *arguments) if rank < size else None))
        except BaseException:
            pipe.send((f"rank {rank}:\n{traceback.format_exc()}", None))


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
