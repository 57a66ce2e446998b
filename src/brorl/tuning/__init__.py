"""Everything of `brorl tune`: pilot, candidates, race, clock, final and answer."""

from typing import Literal, get_args

Aim = Literal["pass@1", "pass@k", "coverage"]  # a tuning raises this score
AIMS: tuple[Aim, ...] = get_args(Aim)
