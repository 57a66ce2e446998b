"""One line a step: the columns that a terminal has room for.

In: lines of the metrics. Out: a header, a legend and lines, none wider than the terminal. Where it is narrow, what
matters least is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rich.text import Text

from brorl.console.under_way import fitting
from brorl.format import duration
from brorl.runs.run_directory import Record

_GAP = "  "


@dataclass(frozen=True)
class StepResult:
    """A step that is over.

    Attributes:
        record: Its line of the metrics.
        carried: Groups that earlier steps had left over, of those that it learned from.
        left: Time until the end of the run, as text.
    """

    record: Record
    carried: int
    left: str

    @property
    def held_out(self) -> str:
        """pass@1 with its interval, if the step was evaluated."""
        estimates = self.record.get("evaluation", {}).get("pass_at", {})
        one = estimates.get(1, estimates.get("1"))
        return f"{one['value']:.3f} [{one['low']:.2f}, {one['high']:.2f}]" if one else ""

    @property
    def groups(self) -> str:
        """Groups that it learned from."""
        groups = self.record["kept"]["groups"]
        return f"{groups} ({self.carried} carried)" if self.carried else f"{groups}"

    @property
    def computed(self) -> str:
        """Share of the sampled tokens that was computed."""
        sampling = self.record["sampling"]
        return f"{sampling['unique_tokens'] / max(sampling['sampled_tokens'], 1):.1%}"

    @property
    def rate(self) -> str:
        """Rollouts per second."""
        return f"{self.record['sampling']['samples'] / self.record['seconds']['total']:,.0f}"

    @property
    def time(self) -> str:
        """Wall time."""
        seconds = self.record["seconds"]["total"]
        return f"{seconds:.2f}s" if seconds < 100 else duration(seconds)

    @property
    def phases(self) -> str:
        """Seconds of sampling, verifying and learning."""
        seconds = self.record["seconds"]
        return "/".join(_short(seconds.get(name, 0.0)) for name in ("generation", "verification", "training"))


class _Column(NamedTuple):
    """A column; the one with the lowest rank is the last to be left out."""

    head: str
    width: int
    rank: int
    cell: Callable[[StepResult], str]
    legend: str = ""
    style: str = ""


_COLUMNS = (
    _Column("step", 5, 0, lambda r: str(r.record["step"])),
    _Column("reward", 6, 1, lambda r: f"{r.record['sampling']['reward']:.3f}"),
    _Column("held-out pass@1", 18, 3, lambda r: r.held_out, style="bold green"),
    _Column("groups", 17, 2, lambda r: r.groups, "groups: prompts learned from"),
    _Column("sampled", 7, 6, lambda r: f"{r.record['sampling']['groups']:,}", "sampled: prompts sampled in this step"),
    _Column("computed", 8, 7, lambda r: r.computed, "computed: share of the tokens"),
    _Column("rollouts/s", 10, 8, lambda r: r.rate),
    _Column("time", 6, 4, lambda r: r.time),
    _Column("sample/verify/learn", 19, 9, lambda r: r.phases),
    _Column("left", 6, 5, lambda r: r.left),
)


class StepLines:
    """Lines of a fixed width.

    Args:
        width: Characters that there is room for.
    """

    def __init__(self, width: int) -> None:
        shown = {0}
        for rank in range(1, len(_COLUMNS)):
            wider = [c.width for c in _COLUMNS if c.rank in {*shown, rank}]
            if sum(wider) + len(_GAP) * (len(wider) - 1) > width:
                break
            shown.add(rank)
        self._columns = [c for c in _COLUMNS if c.rank in shown]
        self._width = width

    @property
    def header(self) -> str:
        """The heads of the columns."""
        return _GAP.join(_aligned(c, c.head) for c in self._columns)

    @property
    def legend(self) -> str:
        """What the columns mean that do not tell themselves."""
        first, *more = [c.legend for c in self._columns if c.legend] or [""]
        return fitting(first, more, self._width, "; ")

    def line(self, result: StepResult) -> Text:
        """Return the line of a step."""
        return Text(_GAP).join(Text(_aligned(c, c.cell(result)), style=c.style) for c in self._columns)


def _aligned(column: _Column, text: str) -> str:
    return text.rjust(column.width)


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"
