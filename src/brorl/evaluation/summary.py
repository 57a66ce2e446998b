"""Results of an evaluation over all prompts, by dataset and by domain, with 95% intervals; as tables and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from brorl.algorithms.groups import Group
from brorl.errors import option
from brorl.evaluation.pass_at_k import mean_with_interval, pass_at_k_of_each
from brorl.format import Estimate, counted, interval
from brorl.table import Result, Table
from brorl.verdict import is_failure, is_timeout


@dataclass(frozen=True)
class PromptResult:
    """Counts over the n responses to one prompt."""

    prompt_id: str  # name of the prompt
    data_set: str  # its dataset
    domain: str  # its domain, which decides the verifier
    num_samples: int  # responses, duplicates included, n
    num_correct: int  # correct responses, 0 to the number of verified ones
    num_truncated: int  # truncated responses, 0 to n
    num_distinct: int  # distinct responses. Each is verified once.
    sampled_tokens: int  # tokens of all responses
    unique_tokens: int  # tokens computed
    verifier_timeouts: int  # distinct responses whose verification timed out. They count as incorrect.
    verifier_failures: int  # distinct responses whose verification failed otherwise. They count as incorrect.
    # responses that could not be verified because of infrastructure failures, 0 to n. They do not count.
    num_unverified: int = 0

    @property
    def num_verified(self) -> int:
        """Number of responses with a verdict, from which pass@k is estimated."""
        return self.num_samples - self.num_unverified


@dataclass(frozen=True)
class Summary:
    """Results over some prompts."""

    num_prompts: int  # number of prompts, P
    num_samples: int  # responses per prompt, n
    # pass@k for each k: the mean over prompts of unbiased estimates, with its interval. A prompt with fewer than k
    # verified responses does not count for this k; a k without any prompt is missing.
    pass_at: dict[int, Estimate]
    solved: int  # prompts with at least one correct response
    tokens_per_response: float  # mean number of tokens of a response
    truncation_rate: float  # fraction of truncated responses, 0 to 1
    verifier_timeouts: int  # distinct responses whose verification timed out
    verifier_failures: int  # distinct responses whose verification failed otherwise
    num_distinct: int  # distinct responses
    sampled_tokens: int  # tokens of all responses
    unique_tokens: int  # tokens computed
    seconds: float | None  # time of sampling, verifying and storing; None if it is unknown
    # responses that could not be verified because of infrastructure failures. They do not count.
    num_unverified: int = 0
    # prompts that do not count, by k; only the k with such prompts
    left_out: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationSummary:
    """Results of an evaluation."""

    overall: Summary  # over all prompts
    by_data_set: dict[str, Summary]  # for each dataset, in the given order
    by_domain: dict[str, Summary]  # for each domain, in alphabetical order


_TOTALS = (
    "verifier_timeouts", "verifier_failures", "num_distinct", "sampled_tokens", "unique_tokens", "num_unverified",
)  # fmt: skip


def default_ks(num_rollouts: int) -> tuple[int, ...]:
    """Return 1 and the powers of 2 up to half the number of samples, at most 256.

    For larger k the estimate averages few subsets, which share most of their responses.
    """
    return (1, *(2**i for i in range(1, 9) if 2 ** (i + 1) <= num_rollouts))


def count(group: Group) -> PromptResult:
    """Count the correct, truncated and distinct responses of a verified group, and their tokens."""
    prompt, tree, reasons = group.prompt, group.tree, [verdict.reason for verdict in group.verdicts]
    return PromptResult(
        prompt_id=prompt.id,
        data_set=prompt.source,
        domain=prompt.domain,
        num_samples=tree.num_rollouts,
        num_correct=group.num_correct,
        num_truncated=tree.num_truncated,
        num_distinct=tree.num_responses,
        sampled_tokens=tree.num_sampled_tokens,
        unique_tokens=tree.num_unique_tokens,
        verifier_timeouts=sum(map(is_timeout, reasons)),
        verifier_failures=sum(map(is_failure, reasons)),
        num_unverified=group.num_unverified,
    )


def summarize(results: Sequence[PromptResult], ks: Sequence[int], seconds: float | None) -> Summary:
    """Average over prompts, all with the same number of responses."""
    numbers = {result.num_samples for result in results}
    if len(numbers) != 1:
        raise ValueError(
            f"expected prompts with one number of samples, got {sorted(numbers) or 'no prompt'}; summarize prompts of "
            "one evaluation"
        )
    n = numbers.pop()
    correct_P = np.array([result.num_correct for result in results], np.int64)
    verified_P = np.array([result.num_verified for result in results], np.int64)
    value_KP = {k: pass_at_k_of_each(correct_P, verified_P, k) for k in ks}

    total = {name: sum(getattr(result, name) for result in results) for name in (*_TOTALS, "num_truncated")}
    return Summary(
        num_prompts=len(results),
        num_samples=n,
        pass_at={k: mean_with_interval(value_P) for k, value_P in value_KP.items() if value_P.size},
        solved=int((correct_P > 0).sum()),
        tokens_per_response=total["sampled_tokens"] / (n * len(results)),
        truncation_rate=total.pop("num_truncated") / (n * len(results)),
        seconds=seconds,
        left_out={k: correct_P.size - value_P.size for k, value_P in value_KP.items() if value_P.size < correct_P.size},
        **total,
    )


def summarize_all(
    results: Sequence[PromptResult], ks: Sequence[int], seconds_of: Mapping[str, float]
) -> EvaluationSummary:
    """Summarize over all prompts, by dataset and by domain; see `summarize`."""
    sets = dict.fromkeys(result.data_set for result in results)
    domains = sorted({result.domain for result in results})
    return EvaluationSummary(
        overall=summarize(results, ks, sum(seconds_of[name] for name in sets)),
        by_data_set={s: summarize([r for r in results if r.data_set == s], ks, seconds_of[s]) for s in sets},
        by_domain={d: summarize([r for r in results if r.domain == d], ks, None) for d in domains},
    )


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
            "sessions": [dict(session) for session in self.sessions],
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
            "responses may differ from those of one session; sessions.json lists the sessions"
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
