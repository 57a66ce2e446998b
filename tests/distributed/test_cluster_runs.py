"""Runs on a Ray cluster of this machine are the runs of one process, bit for bit, whatever happens to its processes."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import gethostname
from threading import Event
from threading import enumerate as enumerate_threads
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from ray_cluster import ray_cluster

pytest.importorskip("ray")

from brorl.distributed.cluster import RayCluster
from brorl.distributed.learner import RemoteLearner
from brorl.distributed.settings import ClusterSettings
from brorl.errors import LearnerLostError, UserError
from brorl.training.async_source import AsyncSource
from brorl.training.source import Batch
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
    *_CLUSTER,
    "--cluster.mode=async",
    "--importance.correction=truncate",
    "--optimizer.ema_decay=null",
)
_WHOLE_BATCH = "--cluster.prompts_per_task=64"  # a call of the engine is one task, as in one process


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(num_cpus=4):
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert command("train", *_RUN, "--output_dir", folder).code == 0
    return folder


@pytest.mark.usefixtures("cluster")
def test_a_cluster_trains_as_one_process_does(alone: Path, tmp_path: Path) -> None:
    """Weights, optimizer, reference, metrics and responses; the run is resumed without a cluster in between."""
    run = tmp_path / "run"
    first = command("train", *_RUN, *_CLUSTER, _WHOLE_BATCH, "--steps=2", "--output_dir", run)
    assert first.code == 0, first.said
    assert "cluster of 1 machine: 2 rollout workers (1 CPU thread each), 1 learner rank" in first.said
    assert command("resume", run, f"--steps={STEPS}", "--cluster.nodes=0").code == 0
    assert_same_run(run, alone)


@pytest.mark.usefixtures("cluster")
def test_the_loss_of_processes_leaves_no_trace(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of each kind is killed in one of the calls that it gets; the other run has one worker and no loss."""
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    one_worker = ("--cluster.nodes=1", "--cluster.rollout_workers=1", "--cluster.learner_ranks=2")
    counts = _Kills({}, rng, monkeypatch).counts
    outcome = command("train", *_RUN, *one_worker, "--output_dir", undisturbed)
    assert outcome.code == 0, outcome.said
    kill_at = {kind: int(rng.integers(1, number + 1)) for kind, number in counts.items()}
    kill_at["verifier"] = int(rng.integers(1, STEPS))
    print(kill_at)
    kills = _Kills(kill_at, rng, monkeypatch)
    outcome = command("train", *_RUN, *_CLUSTER, "--cluster.learner_ranks=2", "--output_dir", disturbed)
    assert outcome.code == 0, outcome.said
    assert kills.done == {*kill_at}
    assert re.search(r"a process of the learner died .*; continuing from .* \(restart 1 of at most 10\)", outcome.said)
    assert_same_run(disturbed, undisturbed)


@pytest.mark.usefixtures("cluster")
def test_an_asynchronous_run_survives_ctrl_c_and_losses(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted while it samples, resumed, and loses a rollout worker and a learner rank."""
    run = tmp_path / "run"
    next_batch = AsyncSource.next_batch

    def interrupted(source: AsyncSource, step: int) -> Batch:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return next_batch(source, step)

    monkeypatch.setattr(AsyncSource, "next_batch", interrupted)
    outcome = command("train", *_RUN, *_ASYNCHRONOUS, "--output_dir", run)
    assert outcome.code == 130, outcome.said
    assert "stopped after step 1" in outcome.said
    # A step submits 4 tasks or more and calls the learner several times, so the worker is missed before the rank dies.
    kills = _Kills({"rollout": int(rng.integers(2, 5)), "learner": int(rng.integers(14, 17))}, rng, monkeypatch)
    outcome = command("resume", run)
    assert outcome.code == 0, outcome.said
    assert kills.done == {"rollout", "learner"}
    assert re.search(r"rollout worker \d \(.*\) was lost", outcome.said)
    assert re.search(r"a process of the learner died .*; continuing from step-\d+ \(restart 1 of", outcome.said)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "sampling" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert all(record["sampling"]["staleness_max"] <= 1 for record in steps)
    assert "asynchronous source" not in {thread.name for thread in enumerate_threads()}


@pytest.mark.parametrize("action", ["interrupt", "terminate all"])
def test_a_signal_stops_a_cluster_and_leaves_no_process(alone: Path, tmp_path: Path, action: str) -> None:
    """Ctrl-C to the command, and SIGTERM to Ray's processes and the workers too; the run is continued without them."""
    harm = Harm(action, r"rename .*rollouts/step-000002.parquet")
    settings = ("--cluster.nodes=1", "--cluster.verifier_workers=1", _WHOLE_BATCH, "--output_dir=run")
    stopped = ChildRuns(tmp_path)("train", *_RUN, *settings, harms=[harm])
    assert stopped.code == 130, stopped.said
    assert "stopped after step 2" in stopped.said
    assert not [line for line in _command_lines() if str(tmp_path) in line or "brorl-ray-" in line]
    assert command("resume", tmp_path / "run", "--cluster.nodes=0").code == 0
    assert_same_run(tmp_path / "run", alone)


def test_workers_import_no_module_of_the_current_folder(tmp_path: Path) -> None:
    """Except the user's own verifier, which finds the modules beside it."""
    for package in ("safetensors", "peft", "numpy"):
        (tmp_path / f"{package}.py").write_text("raise RuntimeError('a module of the current folder')")
    (tmp_path / "beside.py").write_text("VERDICT = True")
    (tmp_path / "mine.py").write_text("import beside\n\ndef check(response, reference):\n    return beside.VERDICT\n")
    own = ("--verification.functions={countdown: mine:check}", "--dynamic_sampling.enabled=false")
    arguments = (*SMALL, "--steps=1", *own, "--cluster.nodes=1", "--cluster.verifier_workers=1", "--output_dir=run")
    outcome = ChildRuns(tmp_path)("train", *arguments)
    assert outcome.code == 0, outcome.said
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["sampling"]["reward"] == 1.0


@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_a_run_whose_ray_dies_says_how_to_continue(tmp_path: Path, victim: str) -> None:
    """Ray ends the program from its own threads; another process prints the line after that."""
    said, metrics = tmp_path / "said.txt", tmp_path / "run/metrics.jsonl"
    run = Child(tmp_path, "train", *SMALL, "--steps=500", "--cluster.nodes=1", "--output_dir=run", log=said)
    deadline = monotonic() + 400.0
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < 3:
        assert monotonic() < deadline, said.read_text()
        sleep(0.1)
    [process] = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if _parent(path.parent) == run.pid and victim in path.read_text().split("\0")[0]
    ]
    os.kill(process, signal.SIGKILL)
    assert run.wait(400.0).code == 1
    deadline = monotonic() + 60.0
    while not said.read_text().endswith("Continue from the last checkpoint with: brorl resume run\n"):
        assert monotonic() < deadline, said.read_text()
        sleep(0.1)
    assert "Ray ended it because one of Ray's own processes died" in said.read_text().splitlines()[-1]


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
    for name, more in (("here", ()), ("placed", (*_CLUSTER, _WHOLE_BATCH))):
        assert command(*options, *more, "--output-dir", tmp_path / name).code == 0
        results.append(json.loads((tmp_path / name / "evaluation.json").read_text()))
    here, placed = results
    assert len(here["prompts"]) == 3
    assert placed["prompts"] == here["prompts"]
    assert placed["settings"] == {**here["settings"], "prompts_per_task": 64}  # the weights' fingerprint among them


def test_a_comparison_on_a_cluster(tmp_path: Path) -> None:
    """Each run starts a cluster, and is the run without one; the comparison stays the same."""
    sweep = ("--sweep=rollouts_per_prompt=4,16", "--match=steps", "--budget=2", "--marks=1", "--seeds=1")
    settings = [one for one in SMALL if not one.startswith(("--rollouts_per_prompt", "--evaluation.every", "--report"))]
    folders = tmp_path / "here", tmp_path / "placed"
    for folder, more in zip(folders, (["--jobs=1"], ["--cluster.nodes=1", _WHOLE_BATCH]), strict=True):
        outcome = ChildRuns(tmp_path)("compare", "quickstart", *sweep, *settings, *more, "--output-dir", folder)
        assert outcome.code == 0, outcome.said
    assert "1 run at a time, each on a cluster of 1 machine" in outcome.said
    for run in ("arms/N=4/seed-0", "arms/N=16/seed-0"):
        assert_same_run(folders[1] / run, folders[0] / run)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["--cluster.cpus_per_worker=900"], ["900 CPUs", "4 on 1 machine", "cluster.cpus_per_worker"]),
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
    """A learner without a model, whose rank 0 never returns from a call, as if it waited for other ranks.

    Args:
        rank: The rank; the others raise an error.
    """

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
    """A stall is the loss of the learner. A machine without the model or the run directory is named."""
    import ray

    cluster = RayCluster(ClusterSettings(nodes=1))
    cluster.start()
    assert ray.is_initialized()
    try:
        learner = RemoteLearner(cluster, _stuck, tmp_path, 600.0, print, print)
        assert (learner.num_parameters(), learner.num_parameters(only_trainable=True)) == (1, 2)
        learner.timeout_s = 0.5
        with pytest.raises(LearnerLostError, match=r"did not answer for 0\.5 s"):
            learner.reset_reference(clear_optimizer=False)
        with pytest.raises(UserError, match=f"{gethostname()}.*cannot load nothing"):
            RemoteLearner(cluster, _without_model, tmp_path, 600.0, print, print).wait_until_built()
        assert not any(tmp_path.iterdir())
    finally:
        cluster.close()
    assert ray.is_initialized()  # it was started by another part of the program


@pytest.mark.usefixtures("cluster")
def test_the_error_of_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    """The other rank would wait for it."""
    import ray
    from ray.exceptions import RayActorError

    cluster = RayCluster(ClusterSettings(nodes=1, learner_ranks=2))
    cluster.start()
    try:
        learner = RemoteLearner(cluster, _stuck, tmp_path, 600.0, print, print)
        assert learner.num_parameters() == 1
        with pytest.raises(ValueError, match="rank 1 has other weights"):
            learner.reset_reference(clear_optimizer=False)
        for rank in learner._ranks:
            with pytest.raises(RayActorError):
                ray.get(rank.reports.options(concurrency_group="reports").remote())  # it would give an answer
    finally:
        cluster.close()


@pytest.mark.usefixtures("cluster")
def test_an_answer_that_has_come_is_no_stall(tmp_path: Path) -> None:
    """This process may have been stopped for longer than the timeout."""
    import ray

    cluster = RayCluster(ClusterSettings(nodes=1))
    cluster.start()
    try:
        learner = RemoteLearner(cluster, _stuck, tmp_path, 600.0, print, print)
        ray.wait(learner._builds)
        learner.timeout_s = -1.0
        learner.wait_until_built()
    finally:
        cluster.close()


def _stuck(rank: int, *_: Any) -> Any:
    return _Stuck(rank)


def _without_model(*_: Any) -> Any:
    raise UserError("cannot load nothing")


def test_a_cluster_needs_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes first."""
    monkeypatch.setattr("brorl.distributed.placement.find_spec", lambda _: None)
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
        from brorl.distributed.learner import RemoteLearner
        from brorl.distributed.workers import RayRolloutPool, VerifierWorkers

        self.counts = {"learner": 0, "rollout": 0}
        self.done: set[str] = set()
        self._ranks: dict[int, list[int]] = {}  # process ids of the ranks of a learner, once it has started
        self._kill_at = kill_at
        monkeypatch.undo()
        places: list[tuple[str, Any, str, Callable[[Any], int]]] = [
            ("learner", RemoteLearner, "_wait", lambda learner: rng.choice(self._ranks[id(learner)])),
            ("rollout", RayRolloutPool, "submit", lambda pool: rng.choice([process for _, process in pool.processes])),
            ("verifier", VerifierWorkers, "verify", lambda workers: workers.processes[0][1]),
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
