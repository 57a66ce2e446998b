"""Seconds and bytes of a step against hand computations for Qwen3-0.6B, and against the paper's own figures."""

from dataclasses import replace

import numpy as np
import pytest

from brorl.model.model_shape import PUBLISHED, ModelShape
from brorl.planning.cluster.cluster_plan import (
    QueueSettings,
    fastest_split,
    last_paying,
    problems,
    publish_seconds,
    savings,
    scale,
    ways_that_fit,
)
from brorl.planning.cluster.hardware import CASES, GPUS, UnitCost, UnitCosts
from brorl.planning.cluster.phases import TREE_BYTES, Job, RolloutWorker, ShardedLearner, smallest_worker
from brorl.planning.cluster.step_work import ResponseLengths, StepWork, distinct_fraction

QWEN3 = ModelShape(  # Qwen3-0.6B
    parameters=596_049_920, matmul_parameters=596_049_920, layers=28, hidden=1024, inner=3072, heads=16, head_dim=128,
    kv_size=28 * 2 * 8 * 128, vocabulary=151_936, source="test",
)  # fmt: skip
H100 = GPUS["H100"]
WORK = StepWork(
    prompts=8, rollouts=64, prompt_tokens=100.0, lengths=ResponseLengths(500.0, 500.0, 0.0), distinct_fraction=0.25,
    response_fraction=0.5, kept_fraction=0.5, mini_batches=4, passes=6, origins={},
)  # fmt: skip


def job(engine: str = "vllm", work: StepWork = WORK, model: ModelShape = QWEN3) -> Job:
    costs = UnitCosts.of(H100, engine, {"math": 1.0})  # type: ignore[arg-type]
    return Job(model, work, H100, costs, engine, reference=True, gradient_checkpointing=True)  # type: ignore[arg-type]


def test_a_decoding_step_that_reads() -> None:
    """100 rows with 100 + 250 tokens of context read weights of 1.19 GB and 4.0 GB of keys and values."""
    worker = RolloutWorker(job())
    read = 596_049_920 * 2 + 100 * 350 * 114_688
    for case, fraction, launch in (("best", 0.75, 0.0015), ("worst", 0.4, 0.006)):
        expected = launch + read / (3.35e12 * fraction)
        assert worker.step_seconds(np.array([100.0]), case)[0] == pytest.approx(expected)  # type: ignore[arg-type]


def test_a_decoding_step_that_computes() -> None:
    """1,000 rows of a few tokens: 2 operations per weight, and 4 per number of the heads and token of context."""
    work = replace(WORK, prompt_tokens=1.0, lengths=ResponseLengths(2.0, 2.0, 0.0))
    worker = RolloutWorker(job(work=work))
    operations = 1000 * (2 * 596_049_920 + 4 * 28 * 16 * 128 * 2)
    assert worker.step_seconds(np.array([1000.0]), "best")[0] == pytest.approx(0.0015 + operations / (989e12 * 0.6))


def test_the_tree_shares_rows_and_prompts() -> None:
    """The native engine decodes 16 of 64 rows, and reads a prompt once for them."""
    native = RolloutWorker(job("native"))
    assert native.rows_per_group == 16
    read = 596_049_920 * 2 + 16 * (250 + 100 / 16) * 114_688
    assert native.step_seconds(np.array([16.0]), "best")[0] == pytest.approx(0.008 + read / (3.35e12 * 0.6))
    alone = replace(WORK, shares_prompts=False)
    assert RolloutWorker(job(work=alone)).prefill_seconds("best") == pytest.approx(
        64 * RolloutWorker(job()).prefill_seconds("best")
    )


def test_sampling_takes_as_many_rounds_as_slots_need() -> None:
    worker = RolloutWorker(job())
    row = (250 + 100 / 64) * 114_688 + 12 * 151_936
    assert worker.slots == int((80e9 * 0.9 - 2 * 596_049_920) / row)
    rows = 64 * 10
    step = worker.step_seconds(np.array([min(rows, worker.slots)]), "middle")[0]
    rounds = rows / min(rows, worker.slots)
    assert worker.seconds(10, "middle") == pytest.approx(rounds * 500 * step + 10 * worker.prefill_seconds("middle"))


def test_the_learner_by_hand() -> None:
    """8 x (64 x 500 x 0.25 + 100) tokens, 6 passes, over 8 ranks at 40% of 989 TFLOP/s."""
    learner = ShardedLearner(job(), 8)
    tokens = 8 * (64 * 500 * 0.25 + 100)
    per_token = 2 * 596_049_920 + 4 * 28 * 16 * 128 * (100 + 250)
    assert learner.flops == pytest.approx(6 * tokens * per_token)
    assert learner.computing_seconds("best") == pytest.approx(learner.flops / (8 * 989e12 * 0.4))
    assert learner.state_bytes == 20 * 596_049_920 / 8
    moved = 5 * 2 * 596_049_920 + 4 * 596_049_920
    one = 4 * moved * 7 / 8 / (450e9 * 0.8)  # a pass for each of 4 mini-batches
    assert learner.communication_seconds("best") == pytest.approx(one)
    assert learner.seconds("best") == pytest.approx(max(learner.computing_seconds("best"), one) * 1.02)
    across = replace(learner, ranks=16)
    assert across.communication_seconds("best") == pytest.approx(4 * moved * 15 / 16 / (50e9 * 0.8))
    assert replace(learner, ranks=1).communication_seconds("best") == 0
    assert learner.tree_seconds("best") == pytest.approx(tokens * TREE_BYTES / 4e9)


def test_phases_add_up_or_overlap() -> None:
    for way in ways_that_fit(job(), 8):
        for case in CASES:
            phases = way.cases[case]
            parts = (phases.generation, phases.verification, phases.training)
            assert way.total(case) == pytest.approx(
                (sum(parts) if way.mode == "sync" else max(parts)) + phases.transfer
            )
        assert way.total("best") < way.total("middle") < way.total("worst")
        if way.placement == "apart":
            assert way.num_workers * way.worker.gpus + way.learner.ranks <= 8
    verified = 8 / 0.5 * 64 * 0.5 / (61 * 3) / (8 * 12)
    sync = fastest_split(job(), 8, "colocated", "sync")
    assert sync is not None
    assert sync.cases["best"].verification == pytest.approx(verified)
    assert publish_seconds(job(), 8, "best") == pytest.approx(0.5 + 2 * 596_049_920 / (450e9 * 0.8))


def test_the_split_is_the_fastest_of_all() -> None:
    found = fastest_split(job(), 8, "apart", "async")
    assert found is not None
    seconds = []
    for ranks in range(1, 8):
        learner = ShardedLearner(job(), ranks)
        worker = smallest_worker(job(), 8 - ranks)
        assert worker is not None
        sampling = worker.seconds(16 / (8 - ranks), "middle")
        seconds.append(max(sampling, learner.seconds("middle"), found.cases["middle"].verification))
    assert found.seconds == pytest.approx(min(seconds) + found.cases["middle"].transfer)
    assert found.learner.ranks == 1 + int(np.argmin(seconds))


def test_the_papers_step_lies_in_the_range() -> None:
    """64 H100: 98.1 h for 107 steps, and 72.4 samples per second of generation (the paper's tables)."""
    model = PUBLISHED["nvidia/Nemotron-Research-Reasoning-Qwen-1.5B"]
    work = StepWork(
        prompts=128, rollouts=512, prompt_tokens=512, lengths=ResponseLengths(7680, 15_360),
        distinct_fraction=distinct_fraction(512, 7680), response_fraction=1.0, kept_fraction=0.62, mini_batches=4,
        passes=6, origins={},
    )  # fmt: skip
    found = fastest_split(job("vllm", work, model), 64, "colocated", "sync")
    assert found is not None
    assert found.cases["best"].generation < 11_226_000 / 107 / 72.4 < found.cases["worst"].generation
    assert found.total("best") < 98.1 * 3600 / 107 < 1.05 * found.total("worst")


def test_a_model_that_does_not_fit_names_the_fix() -> None:
    large = replace(
        QWEN3, parameters=70_000_000_000, matmul_parameters=69_000_000_000, layers=80, hidden=8192, inner=28_672
    )
    assert ways_that_fit(job(model=large), 1) == []
    lines = list(problems(job(model=large), 1))
    assert "the learner needs 1,303.9 GiB of state" in lines[0]
    assert "lora.rank" in lines[0]
    assert "a rollout worker of 1 GPU needs 130.4 GiB of weights" in lines[1]
    worker = smallest_worker(job(model=large), 8)
    assert worker is not None
    assert worker.gpus == 2  # tensor parallel: 2 x 80 x 0.9 = 144 GB for 140 GB of weights, and 4 GB of rows
    assert worker.slots == int(4e9 / ((250 + 100 / 64) * 114_688 + 12 * 151_936))
    assert ways_that_fit(job(model=large), 64)


def test_a_worker_with_room_for_few_rows_is_a_reason() -> None:
    """10 rows fit next to the learner; fewer than 16 are not worth a worker."""
    learner = ShardedLearner(job(), 1)
    free = RolloutWorker(job(), 1, learner.state_bytes).free_bytes
    tokens = 250 + 100 / 64
    wide = replace(QWEN3, kv_size=int((free / 10.5 - 12 * 151_936) / tokens / 2))
    assert RolloutWorker(job(model=wide), 1, learner.state_bytes).slots == 10
    assert ShardedLearner(job(model=wide), 1).fits
    assert ways_that_fit(job(model=wide), 1) == []
    (line,) = problems(job(model=wide), 1)
    assert line.startswith("a rollout worker of 1 GPU needs 1.1 GiB of weights")
    assert "for each of at least 16 rows" in line
    assert ways_that_fit(job(model=wide), 2)
    assert list(problems(job(model=wide), 3)) == []


def test_what_the_tree_saves() -> None:
    rows = {row.name: row for row in savings(job("native"), 8)}
    nothing, prompts, planned = rows["nothing"], rows["prompts"], rows["prompts, prefixes (the plan)"]
    assert nothing.native
    assert prompts.native
    assert planned.native
    assert nothing.training
    assert planned.training
    assert nothing.native > prompts.native > planned.native
    per_group = 64 * 500 + 64 * 100, 64 * 500 * 0.25 + 100
    assert planned.training / nothing.training == pytest.approx(per_group[1] / per_group[0], rel=1e-6)


def test_ranges_and_origins() -> None:
    costs = UnitCosts.of(H100, "vllm", {"code": 1.0, "science": 1.0, "none of ours": 2.0})
    assert all(cost.source for cost in costs.all)
    assert {cost.origin for cost in costs.all} == {"published", "measured here", "assumed"}
    assert all(cost.best == cost.worst for cost in costs.all if cost.origin == "published")
    assert costs.verify.worst == pytest.approx((2 / 53 + 2 / 1784 + 2 * 2 / 122) / 4)
    cost = UnitCost("x", 4.0, 9.0, "s", "assumed", "test")
    assert [cost.at(case) for case in CASES] == [4.0, 6.0, 9.0]
    assert UnitCosts.of(H100, "vllm", {}, 3.0).verify_cores.origin == "given"


def test_scaling_of_a_small_job() -> None:
    """Whole groups go to workers, so that 16 sampled groups keep at most 16 workers busy."""
    rows = scale(job(), ("colocated", "sync"), (1, 2, 4, 32, 64), QueueSettings(steps=3))
    assert [row.num_gpus for row in rows] == [1, 2, 4, 32, 64]
    assert [row.gain is None for row in rows] == [True, False, False, True, False]
    assert rows[1].gain == pytest.approx(rows[0].result.seconds / rows[1].result.seconds)
    assert all(0 < row.useful_fraction <= 1.05 for row in rows)
    assert rows[-1].useful_fraction < 0.2 < 0.5 < rows[0].useful_fraction
    assert rows[-1].gain is not None
    assert rows[-1].gain < 1.5
    assert last_paying(rows) in (1, 2, 4)
    assert last_paying([]) is None
    between = scale(job(), ("colocated", "sync"), (1, 2, 3, 4), QueueSettings(steps=3))
    assert between[2].gain is None
    assert between[3].gain == rows[2].gain
    assert last_paying(between) == last_paying(rows)
    again = scale(job(), ("colocated", "sync"), (1, 2, 4, 32, 64), QueueSettings(steps=3))
    assert [row.result for row in rows] == [row.result for row in again]
