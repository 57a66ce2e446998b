"""The job of a cluster plan: the passes of its learner and the cores that verify, from the settings of a recipe."""

import pytest

from brorl.assemble.cluster_job import build_job
from brorl.config.reading import make_config
from brorl.model.model_shape import PUBLISHED
from brorl.planning.cluster.hardware import GPUS, Engine

SHAPE = next(iter(PUBLISHED.values()))


@pytest.mark.parametrize(
    ("of_recipe", "asked", "extra"),
    [("native", None, 0), ("vllm", None, 1), ("native", "vllm", 1), ("vllm", "native", 0)],
)
def test_the_learner_computes_the_log_probs_of_an_engine_with_other_numerics(
    of_recipe: Engine, asked: Engine | None, extra: int
) -> None:
    plain = build_job(make_config({"dtype": "float32"}, {}, "test"), GPUS["H100"], SHAPE)
    config = make_config({"dtype": "float32", "engine.kind": of_recipe}, {}, "test")
    job = build_job(config, GPUS["H100"], SHAPE, engine=asked)
    assert job.engine == (asked or of_recipe)
    assert job.work.passes == plain.work.passes + extra


@pytest.mark.parametrize(("placement", "cores"), [("colocated", 4.0), ("apart", 2.0)])
def test_colocated_processes_share_their_gpus(placement: str, cores: float) -> None:
    cluster = {"nodes": 1, "placement": placement, "rollout_workers": 4, "learner_ranks": 4, "verifier_workers": 4}
    gpus = {"gpus_per_rollout_worker": 1, "gpus_per_learner_rank": 1}
    config = make_config({"cluster": cluster | gpus, "verification.workers": 4}, {}, "test")
    job = build_job(config, GPUS["H100"], SHAPE)
    assert job.costs.verify_cores.best == cores
