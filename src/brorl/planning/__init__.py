"""Everything of `brorl plan`: pilot, step timing, step cost, gradient noise, recommendation, tables, figure."""

from typing import Literal, get_args

Aim = Literal["pass@1", "pass@k", "coverage"]  # what a plan or a tuning is for
AIMS: tuple[Aim, ...] = get_args(Aim)
