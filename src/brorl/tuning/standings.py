"""A race: arms of one budget of which fewer go on at each rung, so that the best is found for less.

All arms have the whole budget in their settings, because learning rates and orders fall over it. They pause at rungs, a
quarter, a half and all of the budget, and those that go on are continued, not started again. If more arms are left than
the next rung has room for, the best by their projected ends go on, taking turns by objective: an order that falls
lowers pass@1 first and raises it last. The user's own arm always goes on.

The projected end follows the power of the cost that leads from the start through the evaluations at half of the rung
and at the rung, with an exponent of at most 1; an arm that has turned stays where it is. So an arm that starts slowly
and still rises goes on.

Source: successive halving (Jamieson and Talwalkar, arXiv 1502.07943); the projection is ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, log2

RUNGS = (0.25, 0.5, 1.0)  # fractions of the budget; each is evaluated at its half, too


def room_after(rung: int, num_arms: int) -> int:
    """Return how many of the arms that entered a race may go on after a rung, the user's own included: 2 or more."""
    return min(max(2, ceil(num_arms / (2 << rung))), num_arms)


@dataclass(frozen=True)
class Course:
    """The mean scores of an arm on the tuning prompts."""

    arm: str
    objective: str  # arms of one objective have scores that can be compared on the way
    start: float  # at the start
    half: float  # at half of the rung's cost
    rung: float  # at the rung

    def projected(self, fraction: float) -> float:
        """Return the score to expect at the end, from a rung at a fraction of the budget."""
        if (self.half - self.start) * (self.rung - self.half) <= 0:
            return self.rung
        exponent = min(log2((self.rung - self.start) / (self.half - self.start)), 1.0)
        return min(max(self.start + (self.rung - self.start) * float(fraction**-exponent), 0.0), 1.0)


@dataclass(frozen=True)
class Standing:
    """An arm at a rung."""

    arm: str
    score: float  # its mean score at the rung
    dropped: str | None  # why it does not go on; None if it does


def standings(courses: Sequence[Course], fraction: float, room: int, own: str) -> tuple[Standing, ...]:
    """Decide which `room` arms go on at a rung, the own arm among them; return all from the best score to the lowest.

    At the end of the budget, arms of all objectives are compared.
    """
    projected = {course.arm: course.projected(fraction) for course in courses}
    by_end = sorted(courses, key=lambda course: (course.arm != own, -projected[course.arm]))  # the own arm first
    ranks = defaultdict[str, Iterator[int]](count)
    rank = {course.arm: next(ranks[course.objective if fraction < 1 else ""]) for course in by_end}
    going = {course.arm for course in sorted(by_end, key=lambda course: rank[course.arm])[:room]}
    return tuple(
        Standing(c.arm, c.rung, None if c.arm in going else f"no room: its projected end is {projected[c.arm]:.3f}")
        for c in sorted(courses, key=lambda course: -course.rung)
    )
