"""Signs of collapse and the best evaluation, from metrics made here and from what a run leaves in its file."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from brorl.evaluation.settings import EvaluationSettings
from brorl.runs.step_record import from_json
from brorl.training.collapse import CollapseWatch, new_signs, remedy_for
from brorl.training.schedule import Evaluations
from brorl.training.settings import CollapseLimits
from made_up_runs import typed
from run_support import SMALL, command, metrics_without_times

SHORT = CollapseLimits(patience=2)


def update(step: int, entropy: float | None = None, kl: float | None = None) -> dict[str, Any]:
    measured = {} if entropy is None else {"entropy": entropy}
    return {"step": step, "update": {"loss": 0.1, "reference_kl": kl} | measured}


def evaluation(step: int, one: float, many: float, key: type = int) -> dict[str, Any]:
    at = {1: one, 64: many, 8: (one + many) / 2}
    pass_at = {key(k): {"value": v, "low": v - 0.02, "high": v + 0.03} for k, v in at.items()}
    return {"step": step, "evaluation": {"pass_at": pass_at, "num_prompts": 50}}


def recall(watch: CollapseWatch | Evaluations, records: Sequence[dict[str, Any]]) -> None:
    for record in records:
        watch.add(from_json(record))


def told(records: Sequence[dict[str, Any]], limits: CollapseLimits, window: int = 3) -> dict[int, dict[str, str]]:
    """What a run would have been told, after each of its steps."""
    signs_of = {r["step"]: new_signs(typed(records[: i + 1]), limits, window) for i, r in enumerate(records)}
    return {step: collapse for step, collapse in signs_of.items() if collapse}


def test_entropy_below_a_share_of_its_start_is_told_once() -> None:
    entropies = [1.0, 1.4, 1.2, 0.9, 0.5, 0.2, 0.11, 0.10, 0.10, 0.09, 0.08]
    signs = told([update(s, e) for s, e in enumerate(entropies, 1)], SHORT)
    expected = next(s for s in range(6, 12) if median(entropies[s - 3 : s]) < 0.1 * median(entropies[:3]))
    assert list(signs) == [expected] == [8]
    assert signs[8] == {"entropy": "the entropy fell from 1.2 to 0.11 nats per token, below 10% of its start"}
    assert "checkpoints/best" in remedy_for(signs[8])
    assert "optimizer.learning_rate" in remedy_for(signs[8])


def test_a_collapse_is_told_in_one_line() -> None:
    watch = CollapseWatch(SHORT, 10)
    recall(watch, [update(s, 1.0) for s in range(1, 16)] + [update(s, 0.01) for s in range(16, 21)])
    text = watch.line(from_json(update(21, 0.01))) or ""
    assert text.startswith("step 21: the model may be collapsing: the entropy fell")
    assert text.endswith(remedy_for(["entropy"]))
    assert "\n" not in text


def test_signs_are_those_of_medians_read_from_scratch(rng: np.random.Generator) -> None:
    """Random levels: told exactly where the condition, computed here, begins to hold, also for the second time."""
    again = 0
    for _ in range(30):
        entropies = (np.exp(rng.normal(0, 1.2, 60))).tolist()
        kls = [None if rng.random() < 0.1 else float(x) for x in np.exp(rng.normal(-0.3, 0.8, 60))]
        limits, w = CollapseLimits(entropy_fraction=0.5, reference_kl=1.0), int(rng.integers(1, 6))
        holds: dict[str, list[bool]] = {"entropy": [False], "reference_kl": [False]}
        for n in range(1, 61):
            low = n >= 2 * w and median(entropies[n - w : n]) < 0.5 * median(entropies[:w])
            measured = [kl for kl in kls[:n] if kl is not None]
            holds["entropy"].append(low)
            holds["reference_kl"].append(len(measured) >= w and median(measured[-w:]) > 1.0)
        signs = told([update(s, e, k) for s, (e, k) in enumerate(zip(entropies, kls, strict=True), 1)], limits, w)
        for sign, held in holds.items():
            begins = [s for s in range(1, 61) if held[s] and not held[s - 1]]
            assert [s for s, collapse in signs.items() if sign in collapse] == begins
            again += len(begins) > 1
    assert again


def test_a_kl_that_is_no_number_is_beyond_every_bound() -> None:
    records = [update(s, 1.0, math.nan if s > 3 else 0.1) for s in range(1, 9)]
    assert list(told(records, SHORT)) == [5]
    assert not told(records, CollapseLimits(reference_kl=None))


@pytest.mark.parametrize("key", [int, str])
def test_lost_coverage_without_a_gain_is_collapse(key: type) -> None:
    ones = [0.1, 0.2, 0.3, 0.3, 0.28, 0.27, 0.2]
    many = [0.8, 0.9, 0.9, 0.8, 0.7, 0.6, 0.5]
    records = [evaluation(10 * i, a, b, key) for i, (a, b) in enumerate(zip(ones, many, strict=True))]
    signs = told(records, SHORT)
    # At step 40 pass@64 is below its best for the second time, but pass@1 was better than the two times before.
    assert list(signs) == [50]
    assert signs[50] == {
        "coverage": "pass@64 fell from 0.900 [0.880, 0.930] to 0.600 over 2 evaluations while pass@1 no longer rose"
    }


def test_sharpening_is_not_collapse() -> None:
    """Coverage falls by far while pass@1 rises to the end, as in the quickstart."""
    records = [evaluation(10 * i, 0.1 + 0.02 * i, 0.99 - 0.03 * i) for i in range(12)]
    assert not told(records, SHORT)
    assert not told(records, CollapseLimits(patience=1))


def test_a_fall_within_the_intervals_is_noise() -> None:
    def fallen(to: float) -> list[dict[str, Any]]:
        return [evaluation(i, 0.3, 0.8 if i < 4 else to) for i in range(12)]

    assert not told(fallen(0.76), SHORT)  # [0.74, 0.79] meets [0.78, 0.83]
    assert list(told(fallen(0.74), SHORT)) == [5]
    assert not told([evaluation(i, 0.3, 0.8 if i % 2 else 0.7) for i in range(12)], SHORT)  # never twice in a row


def test_without_pass_at_1_there_is_no_saying_what_a_lost_coverage_bought() -> None:
    records = [evaluation(i, 0.3, 0.8 if i < 4 else 0.5) for i in range(12)]
    for record in records:
        del record["evaluation"]["pass_at"][1]
    assert not told(records, SHORT)


def test_several_signs_at_once_and_lines_without_numbers() -> None:
    records: list[dict[str, Any]] = [{"step": 0}]
    records += [update(s, 1.0 if s < 5 else 0.01, 0.1 if s < 5 else 1.7) for s in range(1, 9)]
    records[3] = {"step": 3, "update": {"loss": 1.0}}
    found = told(records, CollapseLimits(patience=1), window=2)
    assert [(step, list(signs)) for step, signs in found.items()] == [(6, ["entropy", "reference_kl"])]
    assert all(word in remedy_for(found[6]) for word in ("KL", "rollouts_per_prompt"))
    assert new_signs(typed([]), CollapseLimits()) == {}


def test_the_file_of_a_run_says_the_same_as_its_memory(rng: np.random.Generator) -> None:
    records = [
        update(s, float(rng.random()), float(rng.random()) + s / 20)
        | evaluation(s, float(rng.random()) / 9, 0.9 - s / 40)
        for s in range(1, 30)
    ]
    assert told(records, SHORT) == told(json.loads(json.dumps(records)), SHORT)
    assert len(told(records, SHORT)) > 1


def watched(every: int, records: Sequence[dict[str, Any]]) -> list[int]:
    """The steps at which a watch sees a sign of collapse, told line by line; a resumed one sees the same."""
    limits, seen = CollapseLimits(patience=2, stop=True), []
    watch = CollapseWatch(limits, every)
    for n, record in enumerate(records):
        resumed = CollapseWatch(limits, every)
        recall(resumed, records[:n])
        sign = watch.line(from_json(record))
        assert resumed.line(from_json(record)) == sign
        seen += [record["step"]] if sign else []
        watch.add(from_json(record))
    return seen


def test_evaluations_at_marks_do_not_count_so_that_they_change_nothing_that_is_trained() -> None:
    regular = [evaluation(step, 0.3, coverage) for step, coverage in ((0, 0.9), (10, 0.9), (20, 0.5), (30, 0.5))]
    at_marks = [evaluation(step, 0.3, 0.5) for step in (3, 7, 13, 17, 23)]
    assert watched(10, regular) == [30]
    assert watched(10, sorted(regular + at_marks, key=lambda record: record["step"])) == [30]
    assert watched(0, [evaluation(0, 0.3, 0.9), *at_marks]) == []
    assert watched(1, regular + at_marks[:0]) == [30]  # every step is regular: the sign is there


def test_evaluations_of_attempts_without_a_group_do_not_count() -> None:
    records = [evaluation(step, 0.3, coverage) for step, coverage in ((0, 0.9), (10, 0.9), (20, 0.5))]
    attempts = [evaluation(30, 0.3, 0.5) | {"attempt": attempt} for attempt in range(3)]
    assert watched(10, [*records, *attempts]) == []
    assert watched(10, [*records, *attempts, evaluation(30, 0.3, 0.5)]) == [30]


def test_the_best_evaluation_of_a_step_that_found_nothing_is_that_of_the_weights_before_it() -> None:
    evaluations = Evaluations(EvaluationSettings(every=1))
    evaluations.add(from_json(evaluation(0, 0.9, 0.9)))
    evaluations.add(from_json(update(1) | evaluation(1, 0.3, 0.9)))
    evaluations.add(from_json(update(2) | evaluation(2, 0.2, 0.9)))
    assert evaluations.best_step == 1
    evaluations.add(from_json(evaluation(3, 0.5, 0.9)))  # no update: the weights are those of step 2
    assert evaluations.best_step == 2


def test_a_larger_k_can_decide_which_evaluation_is_the_best() -> None:
    records = [update(s) | evaluation(s, s / 10, many) for s, many in ((1, 0.7), (2, 0.9), (3, 0.8), (4, 0.9))]
    for settings, best in ((EvaluationSettings(), 4), (EvaluationSettings(best_k=64, ks=(1, 64)), 2)):
        evaluations = Evaluations(settings)
        recall(evaluations, json.loads(json.dumps(records)))
        assert evaluations.best_step == best


def test_regular_evaluations_without_a_new_best_end_the_run() -> None:
    """Those at marks do not count, neither as a best nor as one without; a resumed run counts the same."""
    settings = EvaluationSettings(every=10, patience=2, best_k=64, ks=(1, 64))
    scores = ((0, 0.5), (10, 0.6), (13, 0.9), (20, 0.7), (25, 0.1), (30, 0.7), (37, 0.1), (40, 0.6))
    evaluations, records = Evaluations(settings), []
    for step, score in scores:
        assert evaluations.why_over() is None, step
        records.append(update(step) | evaluation(step, 0.9, score))
        evaluations.add(from_json(records[-1]))
    assert evaluations.why_over() == "2 evaluations in a row without a pass@64 above 0.700 (evaluation.patience = 2)"
    resumed = Evaluations(settings)
    recall(resumed, json.loads(json.dumps(records)))
    assert resumed.why_over() == evaluations.why_over()
    again = Evaluations(settings)  # resumed after its end: it goes on for as long as before
    recall(again, [*records[:-1], records[-1] | {"end_reason": evaluations.why_over()}])
    for step, stalls in ((45, False), (50, False), (55, False), (60, True)):
        again.add(from_json(update(step) | evaluation(step, 0.9, 0.6)))
        assert (again.why_over() is not None) == stalls, step
    never = Evaluations(EvaluationSettings(every=10))
    recall(never, records)
    assert never.why_over() is None


def test_a_best_at_the_end_of_a_run_counts_after_it_is_resumed() -> None:
    evaluations = Evaluations(EvaluationSettings(every=10, patience=2))
    recall(
        evaluations,
        [update(10) | evaluation(10, 0.3, 0.9), update(20) | evaluation(20, 0.8, 0.9) | {"end_reason": "collapse"}],
    )
    evaluations.add(from_json(update(30) | evaluation(30, 0.5, 0.9)))
    assert evaluations.why_over() is None
    evaluations.add(from_json(update(40) | evaluation(40, 0.5, 0.9)))
    assert evaluations.why_over() == "2 evaluations in a row without a pass@1 above 0.800 (evaluation.patience = 2)"


@pytest.mark.slow
def test_a_run_that_no_longer_rises_ends_with_its_best_and_can_be_resumed(tmp_path: Path) -> None:
    """With a learning rate of 1e-12 no evaluation after the first is better."""
    run = tmp_path / "run"
    stalling = ("--optimizer.learning_rate=1e-12", "--evaluation.every=1", "--evaluation.patience=2")
    options = ("--evaluation.keep_best=true", "--steps=9", "--output_dir", run)
    outcome = command("train", *SMALL, *stalling, *options)
    assert (outcome.code, outcome.err) == (0, "")
    assert "stopped after step 2: 2 evaluations in a row without a pass@1 above" in outcome.said
    assert "continue anyway: " in outcome.said
    assert (run / "checkpoints" / "best").resolve().name == "step-000001"
    assert command("resume", run).code == 0
    records = metrics_without_times(run)
    assert [r["step"] for r in records if "end_reason" in r] == [2, 4]
