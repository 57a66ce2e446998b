"""Ctrl-C, SIGTERM and a closed terminal stop long commands: real signals, and what is left of the processes."""

import os
import pty
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from brorl.runs.checkpoint import last_checkpoint, read_step
from brorl.training.stop_request import on_stop
from child_runs import Child
from run_support import SMALL, Outcome

pytestmark = pytest.mark.linux
SETTINGS = tuple(s for s in SMALL if not s.startswith(("--rollouts_per_prompt", "--evaluation.every", "--report")))
COMPARE = ("compare", "quickstart", "--sweep=rollouts_per_prompt=8,16", "--match=steps", "--budget=5000",
           "--eval-points=1", "--seeds=2", "--jobs=2", *SETTINGS, "--output-dir=out")  # fmt: skip
WITHIN_S = 400.0  # no matter how busy the machine is


class StartReceipt(Child):
    """A command in a process that is forked for it, its output in a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._log = folder / "said.txt"
        super().__init__(folder, *arguments, log=self._log)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something that the command does."""
        deadline = time.monotonic() + WITHIN_S
        while not happened():
            assert is_alive(self.pid), self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def ended(self) -> Outcome:
        return self.wait(WITHIN_S)._replace(out=self.said)

    def family(self) -> list[int]:
        """Return the processes that it started, and those that they started."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            parents[int(stat.parent.name)] = int(fields[1])
        found = [self.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[StartReceipt]:
    command = StartReceipt(folder, *arguments)
    try:
        yield command
    finally:
        for pid in [*command.family(), command.pid]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def num_steps(run: Path) -> int:
    """Count the whole metrics records after that of the start."""
    metrics = run / "metrics.jsonl"
    return max(metrics.read_bytes().count(b"\n") - 1, 0) if metrics.is_file() else 0


def until_none_is_alive(pids: list[int]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("reached", ["the comparison alone", "every process", "the comparison is killed"])
def test_a_comparison_saves_its_runs(tmp_path: Path, reached: str) -> None:
    """Kubernetes signals one process, Slurm all of them; a run that took both for two would discard its step."""
    runs = [tmp_path / "out/arms" / name / "seed-0" for name in ("N=8", "N=16")]
    with started(tmp_path, *COMPARE) as command:
        command.until(lambda: all(num_steps(run) >= 2 for run in runs))
        family = command.family()
        assert len(family) >= 3  # two runs, and the process that forks them
        if reached == "the comparison is killed":
            command.send(signal.SIGKILL)
        else:
            command.send(signal.SIGTERM)
            for pid in family if reached == "every process" else []:
                if is_alive(pid):
                    os.kill(pid, signal.SIGTERM)
        outcome = command.ended()
        until_none_is_alive(family)
    for run in runs:  # each ended after a step, with a checkpoint of it
        last = last_checkpoint(run / "checkpoints")
        assert last is not None
        assert read_step(last) == num_steps(run) >= 2
    if reached != "the comparison is killed":
        assert outcome.code == 130, outcome.out
        assert "stopping: 2 runs finish their steps and save" in outcome.out
        assert outcome.out.splitlines()[-1] == (
            "stopped: 0 of 4 runs are complete, 2 more up to their last checkpoint; continue with: brorl compare out"
        )


@pytest.mark.slow
def test_the_second_signal_discards_the_steps_under_way(tmp_path: Path) -> None:
    """Steps so long that none ends meanwhile."""
    endless = ("--prompts_per_step=64", "--sweep=optimizer.weight_decay=0.0,0.1", "--rollouts_per_prompt=4096",
               "--engine.memory_gib=0.1")  # fmt: skip
    arguments = [a for a in COMPARE if not a.startswith(("--sweep", "--prompts_per_step"))]
    with started(tmp_path, *arguments, *endless) as command:
        command.until(lambda: len([p for p in tmp_path.glob("out/arms/*/*/metrics.jsonl") if p.read_bytes()]) == 2)
        command.send(signal.SIGTERM)
        command.until(lambda: "stopping: 2 runs" in command.said)
        command.send(signal.SIGINT)
        assert command.ended().code == 130
    assert [num_steps(p.parent) for p in tmp_path.glob("out/arms/*/*/metrics.jsonl")] == [0, 0]
    last = command.said.splitlines()[-1]
    assert last.startswith("stopped: 0 of 4 runs are complete")
    assert last.endswith("; continue with: brorl compare out")


@pytest.mark.slow
def test_an_evaluation_keeps_its_parts(tmp_path: Path) -> None:
    arguments = ("eval", "quickstart", "--samples=8192", "--ks=1", "--engine.threads=1", "--output-dir=out")
    with started(tmp_path, *arguments) as command:
        command.until(lambda: any(tmp_path.glob("out/responses/part-*.parquet")))
        command.send(signal.SIGTERM)
        outcome = command.ended()
    done = len(list(tmp_path.glob("out/responses/part-*.parquet")))
    assert outcome.code == 130, outcome.out
    last = outcome.out.splitlines()[-1]
    assert last.startswith(f"stopped: {done} of ")
    assert last.endswith(" batches are stored; rerun the command to continue")
    assert not list(tmp_path.glob("out/responses/*.tmp"))


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_its_state(tmp_path: Path) -> None:
    """Nothing can be written to the terminal any more, and SIGHUP comes twice: from the kernel and from a shell."""
    run = tmp_path / "run"
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        command = [sys.executable, "-m", "brorl", "train", *SMALL, "--steps=1000", f"--output_dir={run}"]
        os.execv(sys.executable, command)
    try:
        deadline = time.monotonic() + WITHIN_S
        while num_steps(run) < 2:
            assert is_alive(pid)
            assert time.monotonic() < deadline
            if select.select([terminal], [], [], 0.05)[0]:
                os.read(terminal, 1 << 16)
        os.kill(pid, signal.SIGSTOP)  # both signals come before it can answer the first
        os.close(terminal)
        os.kill(pid, signal.SIGHUP)
        os.kill(pid, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    last = last_checkpoint(run / "checkpoints")
    assert last is not None
    assert 2 <= read_step(last) == num_steps(run) < 1000
    assert "stopped after step" in (run / "run.log").read_text()


@pytest.mark.slow
def test_a_plan_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path, "plan", "--pilot-rollouts=4096", "--engine.threads=1", "--output-dir=out") as command:
        command.until(lambda: (tmp_path / "out").is_dir() and "pilot: " in command.said)
        command.send(signal.SIGTERM)
        outcome = command.ended()
    assert outcome.code == 130, outcome.out
    assert outcome.out.splitlines()[-1] == "stopped: the plan is written only at the end; rerun the command"
    assert not (tmp_path / "out").exists()


def test_signals_are_what_they_were_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stops: list[int] = []
    with on_stop(stops.append, [signal.SIGINT, signal.SIGTERM]):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
    assert stops == [signal.SIGINT, signal.SIGTERM, signal.SIGTERM]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_other_threads_leave_signals_alone() -> None:
    seen = []

    def enter() -> None:
        with on_stop(print, [signal.SIGINT, signal.SIGTERM]):
            seen.append([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)])

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
