"""What a run is doing at this moment, as the parts that do the work report it.

In: nothing. Out: small values. A part reports what it knows itself: the engine its rollouts, the collector its rounds,
the learner its mini-batches, the loop its steps and phases. Whoever observes them puts them together. Reports never
change what is computed; an observer returns quickly, and may raise to end the work that reports to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A step begins.

    Attributes:
        number: The step.
    """

    number: int


@dataclass(frozen=True)
class Phase:
    """A phase begins; the one before it is over.

    Attributes:
        name: `loading`, `evaluating`, `saving`, or a phase of a step as it is named in the metrics (`generation`, ...).
        detail: What exactly is under way; empty where the name tells.
    """

    name: str
    detail: str = ""


@dataclass(frozen=True)
class Round:
    """Prompts are about to be sampled for a step.

    Attributes:
        step: The step.
        number: Number of the round in the step, from 1 on; every later one refills what dynamic sampling dropped.
        groups: Groups that the step has so far, those carried from earlier steps included.
        wanted: Groups that it needs.
    """

    step: int
    number: int
    groups: int
    wanted: int


@dataclass(frozen=True)
class Decoding:
    """A call of the engine has decoded one more position.

    Attributes:
        finished: Rollouts that have ended.
        rollouts: All rollouts of the call, over all prompts.
        tokens: Distinct tokens that the call has computed.
        depth: Position of the tokens that were drawn last, from 1 on.
    """

    finished: int
    rollouts: int
    tokens: int
    depth: int


@dataclass(frozen=True)
class Updating:
    """The learner is about to make an update.

    Attributes:
        done: Updates that the step has made.
        updates: All updates of the step.
    """

    done: int
    updates: int


Activity = Step | Phase | Round | Decoding | Updating
Observe = Callable[[Activity], None]


def unobserved(_: Activity) -> None:
    """Observe nothing."""
