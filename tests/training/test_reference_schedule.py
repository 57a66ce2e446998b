"""When the reference is reset: against a decision that reads the whole history since the last reset anew."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from brorl.evaluation.settings import EvaluationSettings
from brorl.runs.step_record import from_json
from brorl.training.schedule import Evaluations, ReferenceSchedule
from brorl.training.settings import ReferenceSettings

Row = tuple[int, float | None, float | None]


def schedule_of(
    every: int = 0, kl_above: float | None = None, patience: int | None = None, cooldown: int = 20
) -> ReferenceSchedule:
    settings = ReferenceSettings(reset_every=every, reset_kl_above=kl_above, reset_patience=patience)
    return ReferenceSchedule(settings, Evaluations(EvaluationSettings(every=1)).regular_score, cooldown)


def resets(schedule: ReferenceSchedule, rows: Sequence[Row]) -> dict[int, str]:
    """Return the resets of a run with these numbers, which decides before it takes a record."""
    reasons = {}
    for step, kl, score in rows:
        record = record_of(step, kl, score)
        if why := schedule.why_reset(from_json(record)):
            reasons[step] = record["reference_reset"] = why
        schedule.add(from_json(record))
    return reasons


def record_of(step: int, kl: float | None, score: float | None) -> dict[str, Any]:
    evaluation = (
        {} if score is None else {"evaluation": {"pass_at": {"1": {"value": score, "low": score, "high": score}}}}
    )
    return {"step": step, "update": {"reference_kl": kl}, **evaluation}


def random_history(rng: np.random.Generator, steps: int) -> list[Row]:
    rows: list[Row] = []
    for step in range(1, steps + 1):
        kl = float(rng.choice([0.1, 0.5, 2.0, np.nan, np.inf], p=[0.3, 0.3, 0.3, 0.05, 0.05]))
        score = round(float(rng.random()), 1) if rng.random() < 0.5 else None
        rows.append((step, kl if rng.random() < 0.9 else None, score))
    return rows


def from_the_whole_history(rows: Sequence[Row], every: int, kl_above: float, patience: int, cooldown: int) -> list[int]:
    """Steps of the resets, decided at each step from all rows since the last one."""
    steps, last = [], 0
    for step, *_ in rows:
        since = [row for row in rows if last < row[0] <= step]
        kls = [float(kl) for _, kl, _ in since if kl is not None][-5:]
        high = sum(not kl <= kl_above for kl in kls)
        scores = [score for *_, score in since if score is not None]
        place = max((i for i, s in enumerate(scores) if all(s > earlier for earlier in scores[:i])), default=-1)
        stalled = len(scores) - 1 - place if scores else 0
        due = bool(every) and step - last >= every
        if due or (step - last > cooldown and ((len(kls) == 5 and high >= 3) or stalled >= patience)):
            steps.append(step)
            last = step
    return steps


def test_resets_are_those_of_the_whole_history(rng: np.random.Generator) -> None:
    kinds = set()
    for _ in range(40):
        settings = (
            int(rng.choice([0, 15, 40])), float(rng.choice([0.3, 1.0])), int(rng.integers(1, 6)), int(rng.integers(12))
        )  # fmt: skip
        rows = random_history(rng, 80)
        reasons = resets(schedule_of(*settings), rows)
        assert list(reasons) == from_the_whole_history(rows, *settings)
        kinds |= {
            next(w for w in ("every", "kl_above", "patience") if f"reference.reset_{w}" in r) for r in reasons.values()
        }
    assert kinds == {"every", "kl_above", "patience"}


def test_interrupted_at_every_step_equals_uninterrupted(rng: np.random.Generator) -> None:
    settings: dict[str, Any] = {"every": 25, "kl_above": 0.4, "patience": 3, "cooldown": 6}
    rows = random_history(rng, 100)
    whole = resets(schedule_of(**settings), rows)
    assert len(whole) > 3
    for at in range(len(rows)):
        schedule = schedule_of(**settings)
        for step, kl, score in rows[:at]:
            record = record_of(step, kl, score) | ({"reference_reset": ""} if step in whole else {})
            schedule.add(from_json(json.loads(json.dumps(record))))
        assert resets(schedule, rows[at:]) == {step: why for step, why in whole.items() if step > at}


def test_resets_at_intervals_count_from_the_last_reset() -> None:
    assert list(resets(schedule_of(every=200), [(s, 0.1, 0.5) for s in range(1, 701)])) == [200, 400, 600]
    assert not resets(schedule_of(), [(s, 1e9, 0.0) for s in range(1, 701)])
    # A reset for another reason moves the next one by the interval.
    rows: list[Row] = [(s, 9.0 if 20 <= s < 25 else 0.1, None) for s in range(1, 60)]
    assert list(resets(schedule_of(every=30, kl_above=1.0, cooldown=5), rows)) == [22, 52]


def test_one_noisy_step_is_no_spike() -> None:
    quiet = [0.1] * 40
    for spikes, expected in (((20,), []), ((20, 21), []), ((20, 22, 24), [24]), ((20, 21, 22), [22])):
        kls = [50.0 if step in spikes else kl for step, kl in enumerate(quiet)]
        rows: list[Row] = [(s, kl, None) for s, kl in enumerate(kls) if s]
        assert list(resets(schedule_of(kl_above=1.0, cooldown=10), rows)) == expected, spikes


def test_cooldown_holds_resets_back_and_forgets_nothing() -> None:
    high: list[Row] = [(s, 5.0, None) for s in range(1, 25)]
    assert list(resets(schedule_of(kl_above=1.0, cooldown=10), high)) == [11, 22]
    assert list(resets(schedule_of(kl_above=1.0, cooldown=0), high)) == [5, 10, 15, 20]
    falling: list[Row] = [(s, None, 1.0 / s) for s in range(1, 16)]
    assert list(resets(schedule_of(patience=3, cooldown=7), falling)) == [8]


def test_a_stall_is_evaluations_without_a_new_best() -> None:
    scores = [0.2, 0.3, 0.3, 0.25, 0.31, 0.31, 0.1, float("nan"), 0.05, 0.04]
    rows: list[Row] = [(10 * (i + 3), None, score) for i, score in enumerate(scores)]
    assert list(resets(schedule_of(patience=3), rows)) == [100]
    (reason,) = resets(schedule_of(patience=3), rows).values()
    assert reason == "3 evaluations in a row without a score above 0.31 (reference.reset_patience = 3)"
    # After a reset what comes is compared with itself: the lower scores that follow rise, so there is no stall.
    assert not resets_after(schedule_of(patience=3), rows[:8], [(s, None, s / 1e4) for s in range(101, 200)])


def resets_after(schedule: ReferenceSchedule, first: Sequence[Row], then: Sequence[Row]) -> dict[int, str]:
    assert list(resets(schedule, first)) == [first[-1][0]]
    return resets(schedule, then)
