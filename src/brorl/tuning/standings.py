"""A race: arms of one budget of which fewer go on at each rung, so that the best is found for less.

All arms have the whole budget in their settings, because learning rates and orders fall over it. They pause at rungs, a
quarter, a half and all of the budget, and those that go on are continued, not started again. On the way an arm is
compared with those of its objective only: an order that falls lowers pass@1 first and raises it last. At a rung an arm
is dropped

- if its interval shows it behind the leader of its objective, and even on a straight line from the start it would not
  reach that leader's projected end; or
- if more arms are left than the next rung has room for. They take turns by objective, by their projected ends.

The projected end follows the power of the cost that leads from the start through the evaluations at half of the rung
and at the rung, with an exponent of at most 1; an arm that has turned stays where it is. So an arm that starts slowly
and still rises goes on. The user's own arm always goes on.

Source: successive halving (Jamieson and Talwalkar, arXiv 1502.07943); the projection and the intervals are ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import ceil, log2

from brorl.arrays import FloatArray
from brorl.evaluation.paired import conclusion_of, difference_interval
from brorl.format import interval

RUNGS = (0.25, 0.5, 1.0)  # fractions of the budget; each is evaluated at its half, too


def room_after(rung: int, num_arms: int) -> int:
    """Return how many of the arms that entered a race may go on after a rung, the user's own included: 2 or more."""
    return min(max(2, ceil(num_arms / (2 << rung))), num_arms)


def race_cost(num_arms: int, num_slots: int = 1) -> tuple[float, int]:
    """Return the longest that a race of one seed takes, with `num_slots` runs at a time.

    Returns:
        Budgets of a run, and evaluations, one after the other. The first rung has an evaluation of the start, of its
        half and of its end; half of a later rung is the end of the one before.
    """
    entering = [num_arms, *(room_after(rung, num_arms) for rung in range(len(RUNGS) - 1))]
    waves = [ceil(number / num_slots) for number in entering]
    lengths = [RUNGS[0], *(b - a for a, b in pairwise(RUNGS))]
    return sum(wave * length for wave, length in zip(waves, lengths, strict=True)), sum(waves) + 2 * waves[0]


@dataclass(frozen=True, eq=False)
class Course:
    """The scores of an arm on the tuning prompts, shape [S, P] each."""

    arm: str
    objective: str  # arms of one objective have scores that can be compared on the way
    start_SP: FloatArray  # at the start
    half_SP: FloatArray  # at half of the rung's cost
    rung_SP: FloatArray  # at the rung


@dataclass(frozen=True)
class Standing:
    """An arm at a rung."""

    arm: str
    score: float  # its mean score at the rung
    dropped: str | None  # why it does not go on; None if it does


def standings(courses: Sequence[Course], fraction: float, room: int, own: str) -> tuple[Standing, ...]:
    """Decide which arms go on at a rung, from the best score to the lowest.

    Args:
        courses: The arms that reached the rung; seeds and prompts are the same for all.
        fraction: The rung's fraction of the budget.
        room: How many arms may go on, at least 1.
        own: The user's own arm, which always goes on.

    Raises:
        ValueError: If there is no course.
    """
    if not courses:
        raise ValueError("a race needs at least one arm")
    ordered = sorted(courses, key=lambda course: -float(course.rung_SP.mean()))
    group = {course.arm: course.objective if fraction < 1 else "all" for course in courses}
    leaders = {group[course.arm]: course for course in reversed(ordered)}
    projected = {course.arm: _projected(course, fraction) for course in courses}
    reasons: dict[str, str] = {}
    for course in ordered:
        leader = leaders[group[course.arm]]
        behind = difference_interval(course.rung_SP, leader.rung_SP, seeds_paired=True)
        straight = float(course.start_SP.mean()) + float((course.rung_SP - course.start_SP).mean()) / fraction
        if course.arm != own and conclusion_of(behind) == "B leads" and straight < projected[leader.arm]:
            reasons[course.arm] = f"behind {leader.arm} by {interval(behind)}"
    going = [course.arm for course in ordered if course.arm not in reasons]
    by_end = sorted(going, key=lambda arm: (arm != own, -projected[arm]))  # the own arm first
    ranks = defaultdict[str, Iterator[int]](count)
    rank = {arm: next(ranks[group[arm]]) for arm in by_end}  # within its objective
    crowded = sorted(by_end, key=rank.__getitem__)[room:]
    reasons |= {arm: f"no room: its projected end is {projected[arm]:.3f}" for arm in crowded}
    return tuple(Standing(c.arm, float(c.rung_SP.mean()), reasons.get(c.arm)) for c in ordered)


def _projected(course: Course, fraction: float) -> float:
    start, half, now = (float(score_SP.mean()) for score_SP in (course.start_SP, course.half_SP, course.rung_SP))
    if (half - start) * (now - half) <= 0:
        return now
    exponent = min(log2((now - start) / (half - start)), 1.0)
    return min(max(start + (now - start) * float(fraction**-exponent), 0.0), 1.0)
