"""An evaluation for people and for programs: tables, lines of progress, JSON.

In: the results of an evaluation and what it was made with. Out: rich tables, lines of text, a dictionary. Nothing is
computed here but ratios of what is in the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from brorl.evaluation.evaluate import PartProgress
from brorl.evaluation.pass_at_k import Estimate
from brorl.evaluation.summary import EvaluationSummary, PromptResult, Summary
from brorl.format import duration

_MADE_WITH = ("processor", "cuda", "platform", "threads", "python", "packages")  # of a sitting


@dataclass(frozen=True)
class EvaluationReport:
    """An evaluation with what belongs beside it.

    Attributes:
        summary: Its results.
        results: The counts of every prompt.
        settings: What decided the responses.
        unreadable: Ids of questions whose reference answer the verifier cannot read, by data set.
        sittings: Versions, machine and command of each sitting in which something was sampled.
    """

    summary: EvaluationSummary
    results: Sequence[PromptResult]
    settings: Mapping[str, Any]
    unreadable: Mapping[str, Sequence[str]]
    sittings: Sequence[Mapping[str, Any]]


def progress_line(progress: PartProgress) -> str:
    """Return how far an evaluation is, on one line."""
    done = f"{progress.set_done}/{progress.set_size} prompts"
    return (
        f"{progress.data_set}  {done}  pass@1 so far {progress.pass_at_1:.3f}  "
        f"{progress.tokens_per_second:,.0f} tokens/s  ETA {duration(progress.seconds_left)}"
    )


def pass_table(report: EvaluationReport) -> Table:
    """Make the table of pass@k by data set, by domain if there are several, and over all prompts."""
    overall = report.summary.overall
    ks = shown_ks(list(overall.pass_at))
    title = f"pass@k from n = {overall.num_samples:,}: mean over prompts [95% interval]"
    table = _table(title, "data set", "prompts", *(f"pass@{k}" for k in ks))
    for name, summary in _rows(report.summary):
        values = (_interval(summary.pass_at[k]) for k in ks)
        table.add_row(escape(name), f"{summary.num_prompts:,}", *values)
    return table


def response_table(report: EvaluationReport) -> Table:
    """Make the table of what the responses were like and what they cost."""
    table = _table("Responses", "data set", "solved", "tokens each", "cut off", "tokens", "computed", "seconds")
    for name, summary in _rows(report.summary):
        table.add_row(
            escape(name),
            f"{summary.solved:,}/{summary.num_prompts:,}",
            f"{summary.tokens_per_response:,.1f}",
            f"{summary.truncated_share:.1%}",
            f"{summary.sampled_tokens:,}",
            f"{summary.unique_tokens / summary.sampled_tokens:.1%}",
            "" if summary.seconds is None else f"{summary.seconds:,.1f}",
        )
    return table


def remarks(report: EvaluationReport) -> list[str]:
    """Say what a reader of the numbers should know."""
    overall = report.summary.overall
    lines = []
    lost, failed = overall.verifier_timeouts, overall.verifier_failures
    if lost or failed:
        lines.append(
            f"{lost:,} of {overall.num_distinct:,} verifications timed out and {failed:,} failed; they count as "
            "incorrect"
        )
    if overall.truncated_share > 0.05:
        lines.append(
            f"{overall.truncated_share:.0%} of the responses were cut at {report.settings['max_new_tokens']:,} tokens; "
            "a higher --max-new-tokens may find more of them correct"
        )
    sittings = report.sittings
    differing = [name for name in _MADE_WITH if any(s.get(name) != sittings[0].get(name) for s in sittings)]
    if differing:
        lines.append(
            f"its {len(sittings)} sittings differ in {', '.join(differing)}: the seconds are a mixture, and the "
            "responses need not be those of one sitting; sittings.json tells which parts are whose"
        )
    return lines


def shown_ks(ks: Sequence[int]) -> list[int]:
    """Return the k of the table: all up to three, else the smallest, the one in the middle and the largest."""
    ordered = sorted(ks)
    return ordered if len(ordered) <= 3 else [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def evaluation_record(report: EvaluationReport) -> dict[str, Any]:
    """Return everything as JSON can hold it."""
    summary = report.summary
    return {
        "settings": dict(report.settings),
        "overall": asdict(summary.overall),
        "by_data_set": {name: asdict(one) for name, one in summary.by_data_set.items()},
        "by_domain": {name: asdict(one) for name, one in summary.by_domain.items()},
        "unreadable_references": {name: list(ids) for name, ids in report.unreadable.items()},
        "prompts": [asdict(result) for result in report.results],
        "sittings": [dict(sitting) for sitting in report.sittings],
    }


def _rows(summary: EvaluationSummary) -> Iterator[tuple[str, Summary]]:
    yield from summary.by_data_set.items()
    if len(summary.by_domain) > 1:
        yield from ((f"domain {name}", one) for name, one in summary.by_domain.items())
    if len(summary.by_data_set) > 1:
        yield "all prompts", summary.overall


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(f" {column}", justify="right", no_wrap=True)
    return table


def _interval(estimate: Estimate) -> str:
    return escape(f"{estimate.value:.3f} [{estimate.low:.2f}, {estimate.high:.2f}]")
