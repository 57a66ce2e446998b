"""A learner rank: an actor with a learner, or one shard of it, and the calls on it.

The results are those of rank 0. Between two results it reports its activities and its lines for the user.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import NamedTemporaryFile
from typing import Any

import ray
import torch

from brorl.activity import Activity, Observe
from brorl.distributed.workers import stored_form
from brorl.errors import FirstRankError, UserError
from brorl.training.learner import Learner

Report = Activity | str  # an activity, or a line for the user
_LONGEST_WAIT_S = 5.0


@dataclass(frozen=True)
class RankPlace:
    """The number of a rank, and where the ranks meet."""

    rank: int  # its number, from 0
    size: int  # number of ranks
    address: str  # host of rank 0
    port: int  # A port of this host, at which the ranks meet


BuildLearner = Callable[[RankPlace, Callable[[str], None], Observe], Learner]


class LearnerRank:
    """The learner of one rank; Ray makes this class an actor.

    Args:
        rank: Its number.
        shares_gpu: Whether a rollout worker uses its GPU between two calls.
        sent_dtype: Number format of the weights in the object store; None for that of the learner.
    """

    def __init__(self, rank: int, shares_gpu: bool = False, sent_dtype: torch.dtype | None = None) -> None:
        self._rank = rank
        self._shares_gpu, self._sent_dtype = shares_gpu, sent_dtype
        self._reports: SimpleQueue[Report] = SimpleQueue()
        self._learner: Any = None

    def meeting_point(self) -> tuple[str, int]:
        """Return the address of this machine and a free port."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def build(self, build: BuildLearner, size: int, meeting_point: tuple[str, int], token: Path) -> None:
        """Make the learner.

        Args:
            build: Makes it.
            size: Number of ranks.
            meeting_point: The result of `meeting_point` of rank 0.
            token: A file of the driver that this machine must see, in a folder that it must write to.

        Raises:
            UserError: If the model cannot be loaded here, or the folder is not shared.
        """
        machine = socket.gethostname()
        check_shared(token, machine)
        echo: Callable[[Report], None] = self._reports.put if self._rank == 0 else lambda _: None
        try:
            self._learner = build(RankPlace(self._rank, size, *meeting_point), echo, echo)
        except FirstRankError:  # it names the rank and its machine
            raise
        except UserError as error:
            raise UserError(f"learner rank {self._rank} on machine {machine}: {error}") from error

    def call(self, method: str, *arguments: Any) -> tuple[Any, list[Report]]:
        """Call a method of the learner.

        Args:
            method: Its name.
            arguments: Its arguments.

        Returns:
            The result of rank 0, None of others; of groups their old log-probs alone. And the reports that were not
            fetched yet.
        """
        result = getattr(self._learner, method)(*arguments)
        if self._rank:
            result = None
        elif method == "with_old_logprobs":
            result = [group.old_logprob_M for group in result]
        self._give_way()
        return result, self._fetched()

    def weights(self) -> tuple[None, Any]:
        """Return nothing and the stored form of the weights, as two objects; every rank takes part in collecting."""
        weights = self._learner.weights()
        if self._rank:
            for _ in weights:
                pass
            self._give_way()
            return None, None
        stored = stored_form(weights, self._sent_dtype)
        self._give_way()
        return None, stored

    def reports(self) -> list[Report]:
        """Return reports, as soon as there are any, or an empty list after some seconds."""
        try:
            first = self._reports.get(timeout=_LONGEST_WAIT_S)
        except Empty:
            return []
        return [first, *self._fetched()]

    def _give_way(self) -> None:
        """Return the unused memory of this process for the rollout worker on the GPU."""
        if self._shares_gpu:
            torch.cuda.empty_cache()

    def _fetched(self) -> list[Report]:
        found = []
        while not self._reports.empty():
            try:
                found.append(self._reports.get_nowait())
            except Empty:
                break
        return found


def check_shared(token: Path, machine: str) -> None:
    """Check that the folder of a file of the driver is the same here, and can be written to.

    Args:
        token: The file.
        machine: Name of this machine.

    Raises:
        UserError: If not.
    """
    folder = token.parent
    fix = "set output_dir to storage that all machines mount at the same path"
    if not folder.is_dir():
        raise UserError(f"machine {machine} has a learner rank and cannot access the run directory {folder}; {fix}")
    if not token.is_file():
        raise UserError(
            f"machine {machine} has a learner rank, and its folder {folder} is not the run directory but another "
            f"folder with the same path; {fix}"
        )
    try:
        with NamedTemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        raise UserError(f"machine {machine} cannot write to the run directory {folder} ({error}); {fix}") from error
