"""The result of an evaluation, as tables, lines and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brorl.evaluation.summary import EvaluationSummary, PromptResult, Summary
from brorl.format import counted, interval
from brorl.table import Result, Table
from brorl.wording import option

_ENVIRONMENT = ("processor", "cuda", "platform", "threads", "python", "packages")  # of a session


@dataclass(frozen=True)
class EvaluationResult(Result):
    """The result of an evaluation."""

    path: Path  # folder with `evaluation.json` and every response
    summary: EvaluationSummary  # pass@k with 95% intervals, and totals: over all prompts, by dataset, by domain
    prompts: Sequence[PromptResult]  # the counts of every prompt
    settings: Mapping[str, Any]  # everything that decides the responses
    # ids of questions whose reference answer the verifier cannot read, by dataset
    unreadable: Mapping[str, Sequence[str]]
    sessions: Sequence[Mapping[str, Any]]  # versions, machine and command of each process that sampled
    # how the settings differ from those of the run's own evaluations, and the command that repeats them; empty if they
    # do not differ, or the model is not from a run
    differences: Sequence[str] = ()

    def parts(self) -> Iterator[Table | str]:
        """Yield the tables, the remarks, the files, and the differences from the run's own evaluations."""
        for table in (pass_table(self), response_table(self)):
            yield from ("", table)
        yield from (f"- {remark}" for remark in remarks(self))
        yield f"\nwritten: {self.path / 'evaluation.json'}; every response: {self.path / 'responses'}"
        yield from self.differences

    def __repr__(self) -> str:
        pass_at = self.summary.overall.pass_at
        scores = ", ".join(f"pass@{k} {interval(pass_at[k])}" for k in shown_ks([*pass_at]))
        return f"EvaluationResult({str(self.path)!r}: {scores})"

    def record(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        summary = self.summary
        return {
            "settings": dict(self.settings),
            "overall": asdict(summary.overall),
            "by_data_set": {name: asdict(part) for name, part in summary.by_data_set.items()},
            "by_domain": {name: asdict(part) for name, part in summary.by_domain.items()},
            "unreadable_references": {name: list(ids) for name, ids in self.unreadable.items()},
            "prompts": [asdict(result) for result in self.prompts],
            "sittings": [dict(session) for session in self.sessions],
        }


def pass_table(result: EvaluationResult) -> Table:
    """Return the table of pass@k by dataset, by domain if there are several, and over all prompts."""
    overall = result.summary.overall
    ks = shown_ks(list(overall.pass_at))
    return Table(
        f"pass@k from n = {overall.num_samples:,}: mean over prompts [95% interval]",
        ("dataset", *(f"pass@{k}" for k in ks)),
        tuple(
            (name, *(interval(summary.pass_at[k], end_digits=2) if k in summary.pass_at else "" for k in ks))
            for name, summary in _rows(result.summary)
        ),
    )


def response_table(result: EvaluationResult) -> Table:
    """Return the table of the number, length and cost of the responses."""
    return Table(
        "Responses",
        ("dataset", "solved", "tokens\neach", "cut off", "tokens", "computed", "seconds"),
        tuple(
            (
                name,
                f"{summary.solved:,}/{summary.num_prompts:,}",
                f"{summary.tokens_per_response:,.1f}",
                f"{summary.truncation_rate:.1%}",
                f"{summary.sampled_tokens:,}",
                f"{summary.unique_tokens / summary.sampled_tokens:.1%}",
                "" if summary.seconds is None else f"{summary.seconds:,.1f}",
            )
            for name, summary in _rows(result.summary)
        ),
    )


def remarks(result: EvaluationResult) -> list[str]:
    """Return warnings about the numbers: failed verifications, truncated responses, sessions on different machines."""
    overall, sessions = result.summary.overall, result.sessions
    lines = []
    if overall.verifier_timeouts or overall.verifier_failures:
        lines.append(
            f"{overall.verifier_timeouts:,} of {overall.num_distinct:,} verifications timed out and "
            f"{overall.verifier_failures:,} failed; they count as incorrect"
        )
    if overall.num_unverified:
        lines.append(
            f"{overall.num_unverified:,} of {overall.num_prompts * overall.num_samples:,} responses could not be "
            "verified because of infrastructure failures; they do not count, and the responses hold the reasons"
        )
    for k, number in overall.left_out.items():
        lines.append(f"pass@{k} is without {counted(number, 'prompt')} of fewer than {k} verified responses")
    if overall.truncation_rate > 0.05:
        lines.append(
            f"{overall.truncation_rate:.0%} of the responses were cut at {result.settings['max_new_tokens']:,} tokens; "
            f"with a higher {option('max-new-tokens')}, more of them may be correct"
        )
    if differing := [name for name in _ENVIRONMENT if any(s.get(name) != sessions[0].get(name) for s in sessions)]:
        lines.append(
            f"the {len(sessions)} sessions differ in {', '.join(differing)}: the seconds are a mixture, and the "
            "responses may differ from those of one session; sittings.json lists the sessions"
        )
    return lines


def shown_ks(ks: Sequence[int]) -> list[int]:
    """Return the k of the table: all up to three, else the smallest, the one in the middle and the largest."""
    ordered = sorted(ks)
    return ordered if len(ordered) <= 3 else [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def _rows(summary: EvaluationSummary) -> Iterator[tuple[str, Summary]]:
    yield from summary.by_data_set.items()
    if len(summary.by_domain) > 1:
        yield from ((f"domain {name}", part) for name, part in summary.by_domain.items())
    if len(summary.by_data_set) > 1:
        yield "all prompts", summary.overall
