"""The places that a cluster reserves, the errors of its start, and a learner rank; without Ray processes."""

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

pytest.importorskip("ray")

from ray._private import worker

from brorl.config.reading import flat_settings, make_config, read_recipe
from brorl.distributed.actors import EngineActor
from brorl.distributed.cluster import RayCluster, _send_messages_of_ray, check_versions
from brorl.distributed.remote_learner import LearnerRank, check_shared
from brorl.distributed.remote_parts import build_cluster, place_learner, place_pool
from brorl.distributed.settings import ClusterSettings
from brorl.errors import FirstRankError, UserError
from brorl.rollout.engine import SampleTask
from brorl.sampling import SamplingParams
from brorl.training.inputs import RunInputs


def test_processes_that_take_turns_share_cpus(rng: np.random.Generator) -> None:
    """At the same time as the others each kind needs its own."""
    workers, ranks, verifiers, cpus = (int(n) for n in rng.integers(1, 50, 4))
    shape = ClusterSettings(
        nodes=1, rollout_workers=workers, learner_ranks=ranks, verifier_workers=verifiers, cpus_per_worker=cpus
    )
    assert shape.needed_cpus == cpus * max(workers, ranks, verifiers)
    assert shape.bundles("rollout") == [{"CPU": cpus}] * workers
    assert shape.bundles("learner") == shape.bundles("verifier") == []
    at_once = shape.model_copy(update={"mode": "async"})
    assert at_once.needed_cpus == cpus * (workers + ranks + verifiers)
    reserved = [bundle for kind in ("rollout", "learner", "verifier") for bundle in at_once.bundles(kind)]
    assert sum(bundle["CPU"] for bundle in reserved) == at_once.needed_cpus
    assert at_once.request("learner")["num_cpus"] == cpus


def test_an_evaluation_reserves_nothing_for_a_learner() -> None:
    overrides = {"cluster": {"nodes": 1, "learner_ranks": 9, "gpus_per_learner_rank": 1, "gpus_per_rollout_worker": 1}}
    config = make_config(read_recipe("quickstart"), flat_settings(overrides), "quickstart")
    cluster = build_cluster(config, print, learns=False)
    assert cluster is not None
    assert (cluster.settings.needed_cpus, cluster.settings.needed_gpus) == (1, 1)
    assert cluster.settings.bundles("learner") == []


def test_gpus_apart_and_colocated(rng: np.random.Generator) -> None:
    """Colocated processes have half of a GPU each, and together no more than the place that they share."""
    workers, ranks = (int(n) for n in rng.integers(1, 50, 2))
    shape = ClusterSettings(
        nodes=1, rollout_workers=workers, learner_ranks=ranks, gpus_per_rollout_worker=1, gpus_per_learner_rank=1
    )
    assert shape.needed_gpus == workers + ranks
    assert sum(bundle["GPU"] for kind in ("rollout", "learner") for bundle in shape.bundles(kind)) == workers + ranks
    shared = shape.model_copy(update={"placement": "colocated"})
    assert shared.needed_gpus == max(workers, ranks)
    assert shared.bundles("rollout") == [{"CPU": 1, "GPU": 1}] * max(workers, ranks)
    assert shared.bundles("learner") == []
    assert shared.request("rollout")["num_gpus"] + shared.request("learner")["num_gpus"] == 1
    learner_only = shared.model_copy(update={"gpus_per_rollout_worker": 0})
    assert (shape.shares_gpus, shared.shares_gpus, learner_only.shares_gpus) == (False, True, False)
    assert learner_only.request("learner")["num_gpus"] == 1


@pytest.mark.parametrize("placement", ["colocated", "apart"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_processes_that_share_a_gpu_are_told_so(placement: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sleeps after each task, and both processes return their caches; weights travel in vLLM's format."""
    overrides = {"nodes": 1, "gpus_per_learner_rank": 1, "gpus_per_rollout_worker": 1, "placement": placement}
    settings = {"cluster": overrides, "engine": {"kind": "vllm"}, "dtype": dtype, "device": "cuda"}
    config = make_config(read_recipe("quickstart"), flat_settings(settings), "quickstart")
    cluster = build_cluster(config, print)
    assert cluster is not None
    made: dict[str, Any] = {}

    class Pool:
        def __init__(self, recipe: Any, *rest: Any) -> None:
            made.update(recipe=recipe, pool=rest[-1])

        def close(self) -> None: ...

    monkeypatch.setattr("brorl.distributed.actors.RolloutActors", Pool)
    monkeypatch.setattr("brorl.distributed.remote_learner.RemoteLearner", lambda *given: made.update(sent=given[-1]))
    monkeypatch.setattr("brorl.rollout.vllm_engine.VllmEngine", lambda settings, *_, **__: settings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    place_pool(cluster, config, 9)
    place_learner(cluster, config, RunInputs("quickstart", *[None] * 8), Path(), print)  # type: ignore[arg-type]
    fractions = placement == "colocated"
    assert (made["pool"], made["recipe"]().sleeps) == (fractions, fractions)
    assert made["sent"] == (torch.bfloat16 if dtype == "bfloat16" else None)


@pytest.mark.parametrize("shares_gpu", [True, False])
def test_a_rollout_worker_returns_its_cache_after_a_task_if_it_shares_its_gpu(
    shares_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    engine: Any = SimpleNamespace(version=0, sample=lambda *_: events.append("sample"))
    worker = EngineActor(lambda: engine, 1, shares_gpu)
    worker.sample(SampleTask([[1]], 1, SamplingParams(max_new_tokens=2), 0))
    assert events == (["sample", "empty"] if shares_gpu else ["sample"])


def test_a_start_of_ray_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a plain Exception then."""

    def too_slow(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", too_slow)
    cluster = RayCluster(ClusterSettings(nodes=1))
    with pytest.raises(UserError, match="Ray did not start: The current node timed out"):
        cluster.connect()
    cluster.close()


def test_messages_of_ray_go_to_the_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    noted: list[str] = []
    _send_messages_of_ray(noted.append)
    message: dict[str, Any] = {"lines": ["A worker died"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(message, ignore_prefix=False)
    assert noted == ["A worker died"]
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "expected"), [("os._exit(1)", "go on with this\n"), ("words.communicate(b'withdrawn')", "")]
)
def test_the_exit_message_of_a_process_that_is_ended(end: str, expected: str) -> None:
    program = (
        f"import os\nfrom brorl.distributed.cluster import exit_message\nwords = exit_message('go on with this')\n{end}"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.stderr) == ("", expected)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (
            {"python": "3.11.7", "torch": "2.12.0"},
            "m1 has torch 2.12.0, but this machine has torch 2.13.0; run there: pip ",
        ),
        (
            {"python": "3.11.7"},
            "m1 has no torch, but this machine has torch 2.13.0; run there: pip install torch==2.13.0",
        ),
        (
            {"python": "3.12.1", "torch": "2.13.0"},
            "m1 has python 3.12.1, but .*; recreate its environment with Python 3.11.7",
        ),
    ],
)
def test_other_versions_are_named(versions: dict[str, str], expected: str) -> None:
    here = {"python": "3.11.7", "torch": "2.13.0"}
    check_versions("m1", here, here)
    with pytest.raises(UserError, match=expected):
        check_versions("m1", versions, here)


def test_another_folder_with_the_path_of_the_run_directory_is_not_shared(tmp_path: Path) -> None:
    token = tmp_path / "run" / "token"
    for error in ("m1 has a learner rank but cannot access the run directory", "different folder with the same path"):
        with pytest.raises(UserError, match=error):
            check_shared(token, "m1")
        token.parent.mkdir(exist_ok=True)
    token.touch()
    check_shared(token, "m1")
    assert [*token.parent.iterdir()] == [token]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("there is no model here"), f"learner rank 1 on machine {socket.gethostname()}: there is no model"),
        (FirstRankError("learner rank 0 on machine far: no model"), "learner rank 0 on machine far: no model"),
    ],
)
def test_an_error_names_the_rank_that_failed(error: UserError, expected: str, tmp_path: Path) -> None:
    def build(*_: object) -> NoReturn:
        raise error

    (tmp_path / "token").touch()
    with pytest.raises(UserError) as refusal:
        LearnerRank(1).build(build, 2, ("nowhere", 1), tmp_path / "token")
    assert str(refusal.value).startswith(expected)


@pytest.mark.parametrize("shares_gpu", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_returns_its_cache_after_its_work_if_it_shares_its_gpu(
    shares_gpu: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def weights() -> list[tuple[str, torch.Tensor]]:
        events.append("weights")
        return []

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    learner_rank = LearnerRank(rank, shares_gpu)
    learner_rank._learner = SimpleNamespace(logprobs=lambda _: events.append("logprobs"), weights=weights)
    learner_rank.call("logprobs", [])
    learner_rank.weights()
    assert events == (["logprobs", "empty", "weights", "empty"] if shares_gpu else ["logprobs", "weights"])


def test_the_weights_are_sent_in_the_format_of_the_engine() -> None:
    weight, index = torch.randn(5, 3), torch.arange(4)
    learner_rank = LearnerRank(0, sent_dtype=torch.bfloat16)
    learner_rank._learner = SimpleNamespace(weights=lambda: [("w", weight.t()), ("index", index)])
    _, stored = learner_rank.weights()
    sent = {name: torch.from_numpy(data).view(dtype).reshape(shape) for name, shape, dtype, data in stored}
    assert torch.equal(sent["w"], weight.t().to(torch.bfloat16))
    assert torch.equal(sent["index"], index)
