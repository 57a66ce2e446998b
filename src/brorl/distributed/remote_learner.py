"""A learner whose ranks are Ray actors: every rank receives each call, and rank 0 returns the result.

During a call, rank 0 also reports activities and lines for the user. Groups are sent once, through the object store.
The weights stay there and never pass through this process. If a rank dies or stalls, a `LearnerLostError` is raised,
and the updates since the last checkpoint are lost.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import NamedTemporaryFile
from time import monotonic
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from brorl.activity import Activity, Echo, Observe
from brorl.algorithms.advantages import EstimateAdvantages
from brorl.algorithms.groups import Group
from brorl.arrays import FloatArray
from brorl.distributed.actors import RemoteWeights, stored_form
from brorl.distributed.cluster import POLL_S, RayCluster
from brorl.errors import FirstRankError, LearnerLostError, UserError
from brorl.model.device import free_unused
from brorl.runs.step_record import UpdateRecord
from brorl.storage import storage_errors
from brorl.training.learner import Learner
from brorl.tree import RolloutTree

_GRACE_S = 5.0  # after one rank loses its connection, Ray reports the death of another within this time
_MAX_WAIT_S = 5.0

Report = Activity | str  # an activity, or a line for the user


# (rank, number of ranks, host and port of rank 0, echo, observe) -> the learner of this rank
BuildLearner = Callable[[int, int, tuple[str, int], Callable[[str], None], Observe], Learner]


class LearnerRank:
    """The learner of one rank. Ray turns this class into an actor.

    A rollout worker may use the same GPU between calls. `sent_dtype` is the dtype of the weights in the object store;
    None keeps the learner's.
    """

    def __init__(self, rank: int, shares_gpu: bool = False, sent_dtype: torch.dtype | None = None) -> None:
        self._rank = rank
        self._shares_gpu = shares_gpu
        self._sent_dtype = sent_dtype
        self._reports: SimpleQueue[Report] = SimpleQueue()
        self._learner: Any = None

    def meeting_point(self) -> tuple[str, int]:
        """Return this machine's address and a free port."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def build(self, build: BuildLearner, size: int, meeting_point: tuple[str, int], token: Path) -> None:
        """Check the folder shared with the driver (see `check_shared`), and make the learner."""
        machine = socket.gethostname()
        check_shared(token, machine)
        echo: Callable[[Report], None] = self._reports.put if self._rank == 0 else lambda _: None
        try:
            self._learner = build(self._rank, size, meeting_point, echo, echo)
        except FirstRankError:  # it already names the rank and its machine
            raise
        except UserError as error:
            raise UserError(f"learner rank {self._rank} on machine {machine}: {error}") from error

    def call(self, method: str, *arguments: Any) -> tuple[Any, list[Report]]:
        """Call a method of the learner and return its result (None except on rank 0) and the latest reports.

        `with_old_logprobs` returns only the old log-probs, not the groups.
        """
        result = getattr(self._learner, method)(*arguments)
        if self._rank:
            result = None
        elif method == "with_old_logprobs":
            result = [group.old_logprob_M for group in result]
        free_unused(self._shares_gpu)
        return result, self._drained()

    def weights(self) -> tuple[None, Any]:
        """Return two objects: None, and on rank 0 the stored form of the weights. All ranks help gather them."""
        weights = self._learner.weights()
        stored = None if self._rank else stored_form(weights, self._sent_dtype)
        for _ in weights if self._rank else ():
            pass
        free_unused(self._shares_gpu)
        return None, stored

    def reports(self) -> list[Report]:
        """Wait for reports and return them. Return an empty list if none arrive for a few seconds."""
        try:
            first = self._reports.get(timeout=_MAX_WAIT_S)
        except Empty:
            return []
        return [first, *self._drained()]

    def _drained(self) -> list[Report]:
        reports: list[Report] = []
        while True:
            try:
                reports.append(self._reports.get_nowait())
            except Empty:
                return reports


def check_shared(token: Path, machine: str) -> None:
    """Check that the driver's folder exists here and is writable. `token` is a file that the driver wrote there."""
    folder = token.parent
    fix = "set output_dir to storage that all machines mount at the same path"
    if not folder.is_dir():
        raise UserError(f"machine {machine} has a learner rank but cannot access the run directory {folder}; {fix}")
    if not token.is_file():
        raise UserError(
            f"machine {machine} has a learner rank, but its folder {folder} is not the run directory; it is a "
            f"different folder with the same path; {fix}"
        )
    try:
        with NamedTemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        raise UserError(f"machine {machine} cannot write to the run directory {folder} ({error}); {fix}") from error


class RemoteLearner:
    """Trains on the learner ranks of a cluster. Releasing the cluster ends them.

    The ranks make their learners while other processes start; `wait_until_built` waits for them. All ranks must be able
    to read and write the folder `shared`. A learner that sends no answer or report for `timeout_s` has stalled.
    `sent_dtype` is the dtype of the published weights; None keeps the learner's.
    """

    def __init__(
        self,
        cluster: RayCluster,
        build: BuildLearner,
        shared: Path,
        timeout_s: float,
        echo: Echo,
        observe: Observe,
        sent_dtype: torch.dtype | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._echo = echo
        self._observe = observe
        size = cluster.settings.learner_ranks
        shared_gpu = cluster.settings.shares_gpus
        remote: Any = ray.remote  # its types lack concurrency groups
        actor = remote(concurrency_groups={"reports": 1})(LearnerRank)
        self._ranks = [
            actor.options(**cluster.options("learner", rank)).remote(rank, shared_gpu, sent_dtype)
            for rank in range(size)
        ]
        cluster.on_release(self.close)
        self._ask_for_reports()
        meeting_point = self._ranks[0].meeting_point.remote()
        with storage_errors(shared):
            self._token = NamedTemporaryFile(dir=shared, prefix=".shared-")  # noqa: SIM115
        token = Path(self._token.name)
        self._builds = [rank.build.remote(build, size, meeting_point, token) for rank in self._ranks]

    def wait_until_built(self) -> None:
        """Wait until all ranks have made their learner."""
        if self._builds:
            self._wait(self._builds)
            self._token.close()
            self._builds = []

    def close(self) -> None:
        """End all ranks."""
        self._token.close()
        for rank in self._ranks:
            ray.kill(rank)

    def with_old_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        """See `Learner`."""
        old = self._call("with_old_logprobs", _without_verdicts(groups)) if groups else []
        return [replace(group, old_logprob_M=old_M) for group, old_M in zip(groups, old, strict=True)]

    def learn(
        self, groups: Sequence[Group], estimate_advantages: EstimateAdvantages, seed: int, lr_scale: float = 1.0
    ) -> UpdateRecord:
        """See `Learner`."""
        metrics: UpdateRecord = self._call("learn", _without_verdicts(groups), estimate_advantages, seed, lr_scale)
        return metrics

    def logprobs(self, trees: Sequence[RolloutTree]) -> list[FloatArray]:
        """See `Learner`."""
        logprobs: list[FloatArray] = self._call("logprobs", list(trees))
        return logprobs

    def weights(self) -> RemoteWeights:
        """Return a reference to the current weights. A process loads them only when it iterates over the result."""
        pairs = [rank.weights.options(num_returns=2).remote() for rank in self._ranks]
        self._wait([done for done, _ in pairs])
        return RemoteWeights(pairs[0][1])

    def num_parameters(self, only_trainable: bool = False) -> int:
        """See `Learner`."""
        self.wait_until_built()
        count: int = self._call("num_parameters", only_trainable)
        return count

    def save_pretrained(self, folder: Path) -> None:
        """See `Learner`."""
        self._call("save_pretrained", folder.resolve())

    def swap_averaged_weights(self) -> None:
        """See `Learner`."""
        self._call("swap_averaged_weights")

    def reset_reference(self, clear_optimizer: bool) -> None:
        """See `Learner`."""
        self._call("reset_reference", clear_optimizer)

    def state_dict(self) -> dict[str, Any]:
        """See `Learner`."""
        state: dict[str, Any] = self._call("state_dict")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Learner`."""
        self._call("load_state_dict", state)

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """See `Learner`."""
        self._call("load_optimizer_state", state)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method on all ranks. Large arguments are put into the object store once."""
        sent = [value if isinstance(value, int | float | bool) else ray.put(value) for value in arguments]
        results = self._wait([rank.call.remote(method, *sent) for rank in self._ranks])
        result, reports = results[0]
        self._pass_on(reports)
        return result

    def _wait(self, calls: Sequence[Any]) -> list[Any]:
        """Wait for calls and return their results in order, forwarding rank 0's reports meanwhile."""
        results: dict[Any, Any] = {}
        last_sign = monotonic()
        while len(results) < len(calls):
            pending = [call for call in calls if call not in results]
            answered, _ = ray.wait([*pending, self._reports], num_returns=1, timeout=POLL_S)
            if not answered and monotonic() > last_sign + self.timeout_s:
                raise LearnerLostError(f"the learner did not answer for {self.timeout_s:g} s")
            for call in answered:
                value = self._result_or_raise(call, pending)
                if call != self._reports:
                    results[call] = value
                    continue
                self._ask_for_reports()
                self._pass_on(value)
                if value:
                    last_sign = monotonic()
        return [results[call] for call in calls]

    def _result_or_raise(self, call: Any, pending: Sequence[Any]) -> Any:
        """Return the result of a finished call, or raise its error."""
        try:
            return _result_of(call)
        except RayTaskError as error:
            unfinished = [other for other in pending if other != call]
            if isinstance(error.cause, RuntimeError) and unfinished:  # perhaps another rank died
                for other in ray.wait(unfinished, num_returns=len(unfinished), timeout=_GRACE_S)[0]:
                    with suppress(RayTaskError):
                        _result_of(other)
            self.close()  # the other ranks would keep waiting for this one
            raise error.cause from error

    def _ask_for_reports(self) -> None:
        self._reports = self._ranks[0].reports.options(concurrency_group="reports").remote()

    def _pass_on(self, reports: Sequence[Any]) -> None:
        for report in reports:
            if isinstance(report, str):
                self._echo(report)
            else:
                self._observe(report)


def _without_verdicts(groups: Sequence[Group]) -> list[Group]:
    """Return the groups without verdicts and reward terms, which no learner reads, so less data is sent."""
    return [replace(group, verdicts=(), terms_L={}) for group in groups]


def _result_of(call: Any) -> Any:
    """Return the result of a call. If its process died, raise a `LearnerLostError`."""
    try:
        return ray.get(call)
    except RayTaskError:
        raise
    except RayError as error:
        raise LearnerLostError(f"a learner process died ({type(error).__name__})") from error
