"""One line per step, in columns.

In: lines of the metrics. Out: a legend, a header and lines that fit the terminal. A narrow terminal drops the least
important columns.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from rich.text import Text

from brorl.console.status_line import join_fitting
from brorl.format import duration
from brorl.runs.run_directory import Record

_GAP = "  "


class _Column(NamedTuple):
    head: str
    width: int
    rank: int  # the column of the highest rank is dropped first
    legend: str = ""
    style: str = ""


_COLUMNS = (
    _Column("step", 5, 0),
    _Column("reward", 6, 1),
    _Column("held-out pass@1", 18, 3, style="bold green"),
    _Column("groups", 17, 2, "groups: prompts in the update"),
    _Column("sampled", 7, 6, "sampled: prompts sampled"),
    _Column("computed", 8, 7, "computed: fraction of sampled tokens"),
    _Column("rollouts/s", 10, 8),
    _Column("time", 6, 4),
    _Column("sample/verify/learn", 19, 9),
    _Column("left", 6, 5),
)


def _cells(record: Record, carried: int, left: str) -> list[str]:
    """Return the text of every column for one step."""
    sampling, seconds, groups = record["sampling"], record["seconds"], record["kept"]["groups"]
    pass_at = record.get("evaluation", {}).get("pass_at", {})
    one = pass_at.get(1, pass_at.get("1"))
    phases = (seconds.get(name, 0.0) for name in ("generation", "verification", "training"))
    return [
        str(record["step"]),
        f"{sampling['reward']:.3f}",
        f"{one['value']:.3f} [{one['low']:.2f}, {one['high']:.2f}]" if one else "",
        f"{groups} ({carried} carried)" if carried else str(groups),
        f"{sampling['groups']:,}",
        f"{sampling['unique_tokens'] / max(sampling['sampled_tokens'], 1):.1%}",
        f"{sampling['samples'] / seconds['total']:,.0f}",
        f"{seconds['total']:.2f}s" if seconds["total"] < 100 else duration(seconds["total"]),
        "/".join(f"{s:.2f}" if s < 100 else f"{s:.0f}" for s in phases),
        left,
    ]


class StepLines:
    """Lines in columns of fixed widths, with a `header` of column heads and a `legend` that explains some of them.

    Args:
        width: Most characters of a line.
    """

    def __init__(self, width: int) -> None:
        by_rank = sorted(_COLUMNS, key=lambda column: column.rank)
        widths = accumulate(len(_GAP) + column.width for column in by_rank)
        num_shown = sum(total - len(_GAP) <= width for total in widths)
        self._shown = set(by_rank[: max(num_shown, 1)])
        shown = [column for column in _COLUMNS if column in self._shown]
        self.header = _GAP.join(c.head.rjust(c.width) for c in shown)
        self.legend = join_fitting([c.legend for c in shown if c.legend] or [""], width, "; ")

    def line(self, record: Record, carried: int, left: str) -> Text:
        """Return the line of a step.

        Args:
            record: The step's line of the metrics.
            carried: Groups of the update that come from earlier steps.
            left: Time until the end of the run.
        """
        cells = zip(_COLUMNS, _cells(record, carried, left), strict=True)
        return Text(_GAP).join(Text(text.rjust(c.width), style=c.style) for c, text in cells if c in self._shown)
