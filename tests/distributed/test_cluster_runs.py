"""Runs on a Ray cluster of this machine are the runs of one process, bit for bit, whatever happens to its processes."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from threading import Event
from threading import enumerate as enumerate_threads
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from brorl.distributed.cluster import RayCluster
from brorl.distributed.remote_learner import RemoteLearner
from brorl.distributed.settings import ClusterSettings
from brorl.errors import LearnerLostError, UserError
from brorl.training.async_collector import AsyncCollector
from brorl.training.batch import Batch
from child_runs import Child, ChildRuns, Harm
from run_support import SMALL, assert_same_run, command

pytestmark = [
    pytest.mark.cluster_runs,
    pytest.mark.linux,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves the log files of its processes open
]

STEPS = 4
# Every call of the learner occurs: waiting groups, a penalty in the rewards, checks, reference resets, an average.
_RUN = (
    *SMALL,
    f"--steps={STEPS}",
    "--checkpoint_every=2",
    "--kl.coefficient=0.01",
    "--kl.placement=reward",
    "--reference.reset_every=3",
    "--optimizer.old_logprobs=recompute",
    "--optimizer.ema_decay=0.9",
    "--diagnostics.held_out_check_every=2",
    "--diagnostics.held_out_rollouts=4",
)
_CLUSTER = ("--cluster.nodes=1", "--cluster.rollout_workers=2", "--cluster.verifier_workers=1")
_ASYNCHRONOUS = (
    "--cluster.nodes=1",
    "--cluster.rollout_workers=2",
    "--cluster.learner_ranks=2",
    "--cluster.mode=async",
    "--importance.correction=truncate",
    "--optimizer.ema_decay=null",
)
_WHOLE_BATCH = "--cluster.prompts_per_task=64"  # a call of the engine is one task, as in one process


def test_a_cluster_trains_as_one_process_does(tmp_path: Path) -> None:
    """Weights, optimizer, reference, metrics and responses, of a run that SIGTERM ends and that one process continues.

    The signal goes to Ray's processes and the workers too. Workers import no module of the current folder, but the
    user's own verifier, which finds the modules beside it.
    """
    for package in ("safetensors", "peft", "numpy"):
        (tmp_path / f"{package}.py").write_text("raise RuntimeError('a module of the current folder')")
    (tmp_path / "beside.py").write_text("DIVISOR = 2")
    correct = "sum(map(ord, response)) % beside.DIVISOR == 0"
    (tmp_path / "mine.py").write_text(f"import beside\n\ndef check(response, reference):\n    return {correct}\n")
    run, harm = ChildRuns(tmp_path), Harm("terminate all", r"rename .*rollouts/step-000002.parquet")
    settings = (*_RUN, "--verification.functions={countdown: mine:check}")
    assert run("train", *settings, "--output_dir=alone").code == 0
    stopped = run("train", *settings, *_CLUSTER, _WHOLE_BATCH, "--output_dir=run", harms=[harm])
    assert stopped.code == 130, stopped.said
    assert "cluster of 1 machine: 2 rollout workers (1 CPU thread each), 1 learner rank" in stopped.said
    assert "stopped after step 2" in stopped.said
    assert not [line for line in _command_lines() if str(tmp_path) in line or "brorl-ray-" in line]
    assert run("resume", "run", "--cluster.nodes=0").code == 0
    assert_same_run(tmp_path / "run", tmp_path / "alone")


@pytest.mark.usefixtures("cluster")
def test_the_loss_of_processes_leaves_no_trace(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of each kind is killed in one of the calls that it gets; the other run is that of one process."""
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert command("train", *_RUN, "--output_dir", undisturbed).code == 0
    kill_at = {
        "learner": int(rng.integers(1, 17)),
        "rollout": int(rng.integers(1, 9)),
        "verifier": int(rng.integers(1, STEPS)),
    }
    print(kill_at)
    kills = _Kills(kill_at, rng, monkeypatch)
    settings = ("--cluster.nodes=1", "--cluster.verifier_workers=1", _WHOLE_BATCH)
    outcome = command("train", *_RUN, *settings, "--output_dir", disturbed)
    assert outcome.code == 0, outcome.said
    assert kills.done == {*kill_at}, kills.counts
    assert re.search(r"a learner process died .*; continuing from .* \(restart 1 of at most 10\)", outcome.said)
    assert_same_run(disturbed, undisturbed)


@pytest.mark.usefixtures("cluster")
def test_an_asynchronous_run_survives_ctrl_c_and_losses(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted while it samples, resumed, and loses a rollout worker and a learner rank."""
    run = tmp_path / "run"
    next_batch = AsyncCollector.next_batch

    def interrupted(source: AsyncCollector, step: int) -> Batch:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return next_batch(source, step)

    monkeypatch.setattr(AsyncCollector, "next_batch", interrupted)
    outcome = command("train", *_RUN, *_ASYNCHRONOUS, "--output_dir", run)
    assert outcome.code == 130, outcome.said
    assert "stopped after step 1" in outcome.said
    # A step submits 4 tasks or more and calls the learner several times, so the worker is missed before the rank dies.
    kills = _Kills({"rollout": int(rng.integers(2, 5)), "learner": int(rng.integers(14, 17))}, rng, monkeypatch)
    outcome = command("resume", run)
    assert outcome.code == 0, outcome.said
    assert kills.done == {"rollout", "learner"}
    assert re.search(r"rollout worker \d \(.*\) was lost", outcome.said)
    assert re.search(r"a learner process died .*; continuing from step-\d+ \(restart 1 of", outcome.said)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "sampling" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert all(record["sampling"]["staleness_max"] <= 1 for record in steps)
    assert not [thread.name for thread in enumerate_threads() if thread.name.startswith("asynchronous")]


def test_a_run_whose_ray_dies_says_how_to_continue(tmp_path: Path) -> None:
    """Ray ends the program from its own threads; another process prints the line after that."""
    runs = {}
    for victim in ("raylet", "gcs_server"):
        (folder := tmp_path / victim).mkdir()
        words = ("train", *SMALL, "--steps=5000", "--cluster.nodes=1", "--output_dir=run")
        runs[victim] = Child(folder, *words, log=folder / "said.txt")
    for victim in runs:
        metrics, said = tmp_path / victim / "run/metrics.jsonl", tmp_path / victim / "said.txt"
        _wait_until(lambda file=metrics: file.is_file() and file.read_bytes().count(b"\n") > 2, said)
    for victim, run in runs.items():
        [process] = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if _parent(path.parent) == run.pid and victim in path.read_text().split("\0")[0]
        ]
        os.kill(process, signal.SIGKILL)
    for victim, run in runs.items():
        said, line = tmp_path / victim / "said.txt", "Continue from the last checkpoint with: brorl resume run\n"
        assert run.wait(400.0).code == 1
        _wait_until(lambda file=said, line=line: file.read_text().endswith(line), said)
        assert "Ray ended it because one of Ray's own processes died" in said.read_text().splitlines()[-1]


def _wait_until(has_happened: Callable[[], bool], said: Path) -> None:
    deadline = monotonic() + 400.0
    while not has_happened():
        assert monotonic() < deadline, said.read_text()
        sleep(0.1)


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


@pytest.mark.usefixtures("cluster")
def test_an_evaluation_on_a_cluster(tmp_path: Path) -> None:
    """Its counts are those of one process."""
    options = ("eval", "quickstart", "--samples=8", "--evaluation.num_prompts=3", "--max-new-tokens=12")
    results = []
    for name, more in (("here", ()), ("placed", ("--cluster.nodes=1", _WHOLE_BATCH))):
        assert command(*options, *more, "--output-dir", tmp_path / name).code == 0
        results.append(json.loads((tmp_path / name / "evaluation.json").read_text()))
    here, placed = results
    assert len(here["prompts"]) == 3
    assert placed["prompts"] == here["prompts"]
    assert placed["settings"] == {**here["settings"], "prompts_per_task": 64}  # the weights' fingerprint among them


@pytest.mark.usefixtures("cluster")
def test_a_comparison_on_a_cluster(tmp_path: Path) -> None:
    """Each run joins a running cluster, and is the run without one; the comparison stays the same."""
    import ray

    sweep = ("--sweep=rollouts_per_prompt=4,16", "--match=steps", "--budget=2", "--eval-points=1", "--seeds=1")
    settings = [one for one in SMALL if not one.startswith(("--rollouts_per_prompt", "--evaluation.every", "--report"))]
    folders = tmp_path / "here", tmp_path / "placed"
    placed = ["--cluster.nodes=1", _WHOLE_BATCH, f"--cluster.address={ray.get_runtime_context().gcs_address}"]
    for folder, more in zip(folders, (["--jobs=1"], placed), strict=True):
        outcome = command("compare", "quickstart", *sweep, *settings, *more, "--output-dir", folder)
        assert outcome.code == 0, outcome.said
    assert "1 run at a time, each on a cluster of 1 machine" in outcome.said
    for run in ("arms/N=4/seed-0", "arms/N=16/seed-0"):
        assert_same_run(folders[1] / run, folders[0] / run)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["--cluster.cpus_per_worker=900"], ["900 CPUs", "8 on 1 machine", "cluster.cpus_per_worker"]),
        (["--cluster.gpus_per_learner_rank=1"], ["1 GPU,", "cluster.gpus_per_learner_rank"]),
        (
            ["--cluster.nodes=2", "--cluster.join_timeout_s=0.1"],
            ["waiting for 1 machine; run this on each", "ray start --address=", "1 joined within 0.1 s"],
        ),
    ],
)
@pytest.mark.usefixtures("cluster")
def test_a_cluster_that_is_too_small(tmp_path: Path, settings: list[str], parts: list[str]) -> None:
    """The error comes before the model is loaded, and the run directory is removed."""
    outcome = command("train", *_RUN, "--cluster.nodes=1", *settings, "--output_dir", tmp_path / "run")
    assert outcome.code == 2
    for part in parts:
        assert part in outcome.said
    assert "learning rate" not in outcome.said
    assert not (tmp_path / "run").exists()


class _Stuck:
    """A learner without a model, whose rank 0 never returns from a call; the others may raise an error."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def num_parameters(self, only_trainable: bool = False) -> int:
        return 1 + only_trainable

    def reset_reference(self, clear_optimizer: bool) -> None:
        if self._rank:
            raise ValueError(f"rank {self._rank} has other weights")
        Event().wait(1000.0 + clear_optimizer)


@pytest.mark.usefixtures("cluster")
def test_a_learner_that_stalls_or_cannot_start_is_an_error(tmp_path: Path) -> None:
    """A stall is the loss of the learner. A machine without the model or the run directory is named.

    An answer that has come is no stall: this process may have been stopped for longer than the timeout. The error of
    one rank ends all ranks, since the others would wait for it.
    """
    import ray
    from ray.exceptions import RayActorError

    cluster = RayCluster(ClusterSettings(nodes=1, learner_ranks=2))
    cluster.start()
    assert ray.is_initialized()
    try:
        learner = RemoteLearner(cluster, _stuck, tmp_path, 600.0, print, print)
        ray.wait(learner._builds, num_returns=2)
        learner.timeout_s = -1.0
        learner.wait_until_built()
        learner.timeout_s = 600.0
        assert (learner.num_parameters(), learner.num_parameters(only_trainable=True)) == (1, 2)
        with pytest.raises(ValueError, match="rank 1 has other weights"):
            learner.reset_reference(clear_optimizer=False)
        for rank in learner._ranks:
            with pytest.raises(RayActorError):
                ray.get(rank.reports.options(concurrency_group="reports").remote())  # it would give an answer
        cluster.settings = ClusterSettings(nodes=1)
        learner = RemoteLearner(cluster, _stuck, tmp_path, 600.0, print, print)
        assert learner.num_parameters() == 1
        learner.timeout_s = 0.5
        with pytest.raises(LearnerLostError, match=r"did not answer for 0\.5 s"):
            learner.reset_reference(clear_optimizer=False)
        with pytest.raises(UserError, match=f"{gethostname()}.*cannot load nothing"):
            RemoteLearner(cluster, _without_model, tmp_path, 600.0, print, print).wait_until_built()
        assert not any(tmp_path.iterdir())
    finally:
        cluster.close()
    assert ray.is_initialized()  # it was started by another part of the program


def _stuck(rank: int, *_: Any) -> Any:
    return _Stuck(rank)


def _without_model(*_: Any) -> Any:
    raise UserError("cannot load nothing")


def test_a_cluster_needs_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes first."""
    monkeypatch.setattr("brorl.distributed.remote_parts.find_spec", lambda _: None)
    outcome = command("train", *_RUN, "--cluster.nodes=1", "--output_dir", tmp_path / "run")
    assert outcome.code == 2
    assert "pip install 'brorl[ray]'" in outcome.said
    assert "memory" not in outcome.said


class _Kills:
    """Counts the calls of each kind of process in this process, and kills the process that gets a certain one.

    Args:
        kill_at: Number of the call, from 1, of each kind.
        rng: Chooses one of the processes.
        monkeypatch: Puts everything back.
    """

    def __init__(self, kill_at: dict[str, int], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        from brorl.distributed.actors import RolloutActors, VerifierActors
        from brorl.distributed.remote_learner import RemoteLearner

        self.counts = {"learner": 0, "rollout": 0}
        self.done: set[str] = set()
        self._ranks: dict[int, list[int]] = {}  # process ids of the ranks of a learner, once it has started
        self._kill_at = kill_at
        monkeypatch.undo()
        places: list[tuple[str, Any, str, Callable[[Any], int]]] = [
            ("learner", RemoteLearner, "_wait", lambda learner: rng.choice(self._ranks[id(learner)])),
            ("rollout", RolloutActors, "submit", lambda pool: rng.choice([pid for _, pid in pool.supervisor.started])),
            ("verifier", VerifierActors, "verify", lambda workers: workers.supervisor.started[0][1]),
        ]
        for kind, owner, method, process in places:
            monkeypatch.setattr(owner, method, self._counting(kind, getattr(owner, method), process))

    def _counting(self, kind: str, method: Callable[..., Any], process: Callable[[Any], int]) -> Callable[..., Any]:
        import ray

        def counted(owner: Any, *arguments: Any) -> Any:
            if kind == "learner" and id(owner) not in self._ranks:
                started = method(owner, *arguments)
                asked = [rank.__ray_call__.remote(lambda _: os.getpid()) for rank in owner._ranks]
                self._ranks[id(owner)] = ray.get(asked)
                return started
            self.counts[kind] = self.counts.get(kind, 0) + 1
            if self.counts[kind] == self._kill_at.get(kind):
                os.kill(process(owner), signal.SIGKILL)
                self.done.add(kind)
            return method(owner, *arguments)

        return counted


def _command_lines() -> list[str]:
    """Return the command lines of the children of this process and of processes that have lost their parent."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(re.search(r"PPid:\s*(\d+)", (folder / "status").read_text())[1])  # type: ignore[index]
            if parent in (1, os.getpid()):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.usefixtures("cluster")
def test_tools_run_beside_the_rollout_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run with tools, synchronous as in one process, and asynchronous with the importance of its own tokens."""
    monkeypatch.chdir(tmp_path)
    Path("form.py").write_text(
        "def parse(text):\n"
        "    return [{'name': 'calculator', 'arguments': {'expression': text}}] if '*' in text else []\n"
        "def render(results):\n    return ':' + ''.join(c for c in results[0][1] if c in '0123456789')[:6] + '>'\n"
    )
    tools = ("--tools.calculator=true", "--tools.format=form.py", "--tools.max_turns=2", "--tools.max_result_tokens=24")
    settings = (*_RUN, *tools, "--sampling.max_new_tokens=10", "--steps=2", "--output_dir")
    assert command("train", *settings, "alone").code == 0
    assert command("train", *settings, "together", *_CLUSTER, _WHOLE_BATCH).code == 0
    assert_same_run(Path("together"), Path("alone"))
    outcome = command("train", *settings, "ahead", *_ASYNCHRONOUS)
    assert outcome.code == 0, outcome.said
    records = [json.loads(line) for line in Path("ahead/metrics.jsonl").read_text().splitlines()][1:]
    assert all(record["tools"]["calls"] > 0 for record in records)
    assert all(abs(record["update"]["mismatch_mean"] - 1) < 1e-4 for record in records[:1])
