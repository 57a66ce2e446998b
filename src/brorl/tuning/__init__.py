"""The implementation of `brorl tune`: pilot, candidates, race, clock, final and answer."""

from typing import Literal, get_args

Aim = Literal["pass@1", "pass@k", "coverage"]  # the score to raise
AIMS: tuple[Aim, ...] = get_args(Aim)
