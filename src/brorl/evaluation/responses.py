"""`brorl eval`: responses stored in batches of prompts, and the result as tables and JSON.

Each batch is one Parquet file (`part-*.parquet`) with one row per distinct response; its metadata contains the counts
for each prompt. A file gets its final name once it is complete, and a batch's responses depend only on the batch. So a
stored batch is never sampled again, and a resumed evaluation gives the same result as an uninterrupted one. A folder
with a different evaluation, or with other files, is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from brorl.activity import Echo
from brorl.algorithms.groups import Group, main_failure
from brorl.errors import UnverifiedResponsesError, UserError, first_line, option
from brorl.evaluation.evaluator import BatchCounts, Evaluator, PromptBatch, PromptCounts, Summary, summarize
from brorl.format import counted, duration, interval, short, short_repr
from brorl.rollout.engine import Sampler
from brorl.runs.stored_rollouts import responses_table
from brorl.storage import dotted_items, parquet_bytes, read_json_file, replace_file, storage_errors
from brorl.table import Result, Table
from brorl.verification.grade import Grader

_METADATA = b"brorl"
_RERUN = "rerun the command"


@dataclass(frozen=True)
class ResponseStore:
    """An evaluation's folder."""

    path: Path  # must exist

    @property
    def settings_file(self) -> Path:
        """File with the evaluation's settings."""
        return self.path / "settings.json"

    @property
    def sessions_file(self) -> Path:
        """File with the versions, machine and command of each process that sampled."""
        return self.path / "sessions.json"

    @property
    def responses(self) -> Path:
        """Folder with one Parquet file per batch."""
        return self.path / "responses"

    def check(self, settings: Mapping[str, Any], complete: bool = False) -> None:
        """Check that the folder is empty or contains an evaluation with these settings.

        Unless `settings` is `complete`, the stored evaluation may have additional settings.
        """
        if not self.settings_file.is_file():
            names = sorted(p.name for p in self.path.iterdir() if not p.name.startswith(".") and p.name != "env.json")
            if names:
                raise UserError(
                    f"{option('output-dir', self.path)} is not empty ({names[0]}, ...) and contains no evaluation; "
                    "choose a different folder"
                )
            return
        stored = dict(dotted_items(read_json_file(self.settings_file, f"choose a different {option('output-dir')}")))
        wanted = dict(dotted_items(json.loads(json.dumps(settings))))
        for name in (*wanted, *(stored if complete else ())):
            old, new = stored.get(name), wanted.get(name)
            if old != new:
                raise UserError(
                    f"{option('output-dir', self.path)} contains a different evaluation: {name} is {_shown(old)} there "
                    f"and {_shown(new)} here; choose a different folder, or use the settings of that evaluation to "
                    "continue it"
                )

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Store the settings unless they are already stored. Remove temporary files left by a killed process."""
        self.check(settings, complete=True)
        with storage_errors(self.settings_file, _RERUN):
            for left in (*self.path.glob(".*.tmp"), *self.responses.glob(".*.tmp")):
                left.unlink()
            if not self.settings_file.is_file():
                replace_file(self.settings_file, json.dumps(settings, indent=2).encode())
            self.responses.mkdir(exist_ok=True)  # after the settings: `check` rejects a folder without them

    def add_session(self, environment: Mapping[str, Any]) -> None:
        """Store this process's versions, machine and command. An evaluation may resume on a different machine."""
        sessions = [*self.sessions(), dict(environment)]
        with storage_errors(self.sessions_file, _RERUN):
            replace_file(self.sessions_file, json.dumps(sessions, indent=2).encode())

    def sessions(self) -> list[dict[str, Any]]:
        """Return the environment of each process that sampled, in order."""
        if not self.sessions_file.is_file():
            return []
        sessions: list[dict[str, Any]] = read_json_file(self.sessions_file, f"delete it and {_RERUN}")
        return sessions

    def file_of(self, number: int) -> Path:
        """Return a batch's file; batches are numbered from 0."""
        return self.responses / f"part-{number:05d}.parquet"

    @property
    def num_stored(self) -> int:
        """Number of stored batches."""
        return sum(1 for _ in self.responses.glob("part-*.parquet"))

    def read(self, number: int, batch: PromptBatch) -> BatchCounts | None:
        """Return a stored batch's counts, or None if the batch is not stored."""
        file = self.file_of(number)
        if not file.is_file():
            return None
        try:
            metadata = json.loads(parquet.read_schema(file).metadata[_METADATA])
            prompts = tuple(PromptCounts(**counts) for counts in metadata["results"])
            seconds = float(metadata["seconds"])
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file} is damaged ({first_line(error)}); delete it and {_RERUN}") from error
        if [counts.prompt_id for counts in prompts] != [prompt.id for prompt in batch.prompts]:
            raise UserError(f"{file} does not contain the prompts of batch {number}; delete it and {_RERUN}")
        return BatchCounts(prompts, seconds)

    def write(self, number: int, source: str, grader: Grader, groups: Sequence[Group], counts: BatchCounts) -> None:
        """Store a batch on disk. Raise an error if most of its responses could not be verified."""
        _check_verified(groups)
        metadata = {"results": [asdict(prompt) for prompt in counts.prompts], "seconds": counts.seconds}
        with_texts = [replace(group, texts=grader.texts(group)) for group in groups]
        table = responses_table(number, with_texts).drop_columns(["step", "reward"])
        table = table.add_column(0, "source", pa.array([source] * len(table), pa.string()))
        table = table.replace_schema_metadata({_METADATA: json.dumps(metadata).encode()})
        file = self.file_of(number)
        with storage_errors(file, _RERUN):
            replace_file(file, parquet_bytes(table))


def _check_verified(groups: Sequence[Group]) -> None:
    """Raise an error if most responses could not be verified."""
    lost = sum(group.num_unverified for group in groups)
    responses = sum(group.tree.num_rollouts for group in groups)
    if 2 * lost > responses:
        raise UnverifiedResponsesError(
            f"{lost:,} of {responses:,} responses could not be verified (most often: {main_failure(groups)}); "
            "free up memory or stop other processes, then rerun the command to continue"
        )


def _shown(value: Any) -> str:
    return "not set" if value is None else short_repr(value)


def evaluate_batches(
    batches: Sequence[PromptBatch],
    evaluator: Evaluator,
    sampler: Sampler,
    store: ResponseStore,
    echo: Echo = lambda _: None,
) -> list[BatchCounts]:
    """Evaluate the batches not stored yet, and report progress after each. Return the counts of all batches."""
    counts_of = {number: counts for number, batch in enumerate(batches) if (counts := store.read(number, batch))}
    missing = [number for number in range(len(batches)) if number not in counts_of]
    left = sum(len(batches[number].prompts) for number in missing)
    started = perf_counter()
    new = 0
    for number in missing:
        batch = batches[number]
        keep = partial(store.write, number, batch.source, evaluator.grader)
        counts_of[number] = evaluator.evaluate(sampler, batch, keep)
        new += len(batch.prompts)
        seconds_left = (perf_counter() - started) / new * (left - new)
        echo(f"{_progress(batches, counts_of, number)}  ETA {duration(seconds_left)}")
    return [counts_of[number] for number in range(len(batches))]


def _progress(batches: Sequence[PromptBatch], counts_of: Mapping[int, BatchCounts], number: int) -> str:
    """Return a line with progress and pass@1 for a batch's dataset, and the batch's speed."""
    source = batches[number].source
    num_prompts = sum(len(batch.prompts) for batch in batches if batch.source == source)
    prompts = [prompt for i, counts in counts_of.items() if batches[i].source == source for prompt in counts.prompts]
    fractions = [prompt.num_correct / prompt.num_verified for prompt in prompts if prompt.num_verified]
    tokens = sum(prompt.sampled_tokens for prompt in counts_of[number].prompts)
    return (
        f"{source}  {len(prompts)}/{num_prompts} prompts  pass@1 so far {sum(fractions) / max(len(fractions), 1):.3f}"
        f"  {tokens / max(counts_of[number].seconds, 1e-9):,.0f} tokens/s"
    )


_ENVIRONMENT = ("processor", "cuda", "platform", "threads", "python", "packages")  # compared between sessions


@dataclass(frozen=True)
class EvaluationResult(Result):
    """An evaluation's result."""

    path: Path  # folder with `evaluation.json` and every response
    overall: Summary  # pass@k with 95% intervals, and totals, over all prompts
    by_source: dict[str, Summary]  # the same per dataset, in the order given
    by_domain: dict[str, Summary]  # the same per domain, in alphabetical order
    prompts: Sequence[PromptCounts]  # the counts of every prompt
    settings: Mapping[str, Any]  # everything that the responses depend on
    # ids of questions whose reference answer the verifier cannot read, by dataset
    unreadable: Mapping[str, Sequence[str]]
    sessions: Sequence[Mapping[str, Any]]  # versions, machine and command of each process that sampled
    # differences from the settings of the run's own evaluations; empty if nothing differs or there is no run
    differences: Sequence[str] = ()

    @classmethod
    def of(
        cls, prompts: Sequence[PromptCounts], ks: Sequence[int], seconds_of: Mapping[str, float], **fields: Any
    ) -> EvaluationResult:
        """Summarize over all prompts, by dataset and by domain. `seconds_of` maps datasets to seconds."""
        sets = dict.fromkeys(prompt.source for prompt in prompts)
        domains = sorted({prompt.domain for prompt in prompts})
        return cls(
            overall=summarize(prompts, ks, sum(seconds_of[name] for name in sets)),
            by_source={s: summarize([r for r in prompts if r.source == s], ks, seconds_of[s]) for s in sets},
            by_domain={d: summarize([r for r in prompts if r.domain == d], ks, None) for d in domains},
            prompts=prompts,
            **fields,
        )

    def parts(self) -> Iterator[Table | str]:
        """Yield the tables, remarks, files, and differences from the run's own evaluations."""
        for table in (pass_table(self), response_table(self)):
            yield from ("", table)
        yield from (f"- {remark}" for remark in remarks(self))
        yield f"\nwritten: {self.path / 'evaluation.json'}; every response: {self.path / 'responses'}"
        yield from self.differences

    def __repr__(self) -> str:
        pass_at = self.overall.pass_at
        scores = ", ".join(f"pass@{k} {interval(pass_at[k])}" for k in shown_ks([*pass_at]))
        return f"EvaluationResult({str(self.path)!r}: {scores})"

    def record(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = asdict(self)
        del values["path"], values["differences"]
        return {"unreadable_references": values.pop("unreadable"), **values}

    def rows(self) -> Iterator[tuple[str, Summary]]:
        """Yield table rows: datasets, then domains and all prompts if there are several domains or datasets."""
        yield from self.by_source.items()
        if len(self.by_domain) > 1:
            yield from ((f"domain {name}", summary) for name, summary in self.by_domain.items())
        if len(self.by_source) > 1:
            yield "all prompts", self.overall


def pass_table(result: EvaluationResult) -> Table:
    """Return the table of pass@k by dataset, by domain if there are several, and over all prompts."""
    overall = result.overall
    ks = shown_ks(list(overall.pass_at))
    return Table(
        f"pass@k from n = {overall.num_samples:,}: mean over prompts [95% interval]",
        ("dataset", *(f"pass@{k}" for k in ks)),
        tuple(
            (name, *(interval(summary.pass_at[k], end_digits=2) if k in summary.pass_at else "" for k in ks))
            for name, summary in result.rows()
        ),
    )


def response_table(result: EvaluationResult) -> Table:
    """Return the table of response counts, lengths and costs, plus turns and tool results if tools were called."""
    called = result.overall.calling_turns > 0
    more = ("given", "turns") if called else ()
    return Table(
        "Responses",
        ("dataset", "solved", "tokens\neach", "cut off", "tokens", "computed", *more, "seconds"),
        tuple(
            (
                name,
                f"{summary.solved:,}/{summary.num_prompts:,}",
                f"{summary.tokens_per_response:,.1f}",
                f"{summary.truncation_rate:.1%}",
                f"{summary.sampled_tokens:,}",
                f"{summary.unique_tokens / summary.sampled_tokens:.1%}",
                *([short(summary.given_tokens), f"{summary.turns:.2f}"] if called else []),
                "" if summary.seconds is None else f"{summary.seconds:,.1f}",
            )
            for name, summary in result.rows()
        ),
    )


def remarks(result: EvaluationResult) -> list[str]:
    """Return warnings about failed verifications, truncated responses, and different machines."""
    overall = result.overall
    sessions = result.sessions
    lines = []
    if overall.verifier_timeouts or overall.verifier_failures:
        lines.append(
            f"{overall.verifier_timeouts:,} of {overall.num_distinct:,} verifications timed out and "
            f"{overall.verifier_failures:,} failed; they count as incorrect"
        )
    if overall.num_unverified:
        lines.append(
            f"{overall.num_unverified:,} of {overall.num_prompts * overall.num_samples:,} responses could not be "
            "verified because of infrastructure failures; they are excluded, and their reasons are stored with them"
        )
    for k, num_prompts in overall.left_out.items():
        lines.append(f"pass@{k} excludes {counted(num_prompts, 'prompt')} with fewer than {k} verified responses")
    if overall.truncation_rate > 0.05:
        lines.append(
            f"{overall.truncation_rate:.0%} of responses were truncated at {result.settings['max_new_tokens']:,} tokens"
            f"{' per turn, or at the limits in tools' if 'tools' in result.settings else ''}; "
            f"with a higher {option('max-new-tokens')}, more of them may be correct"
        )
    if differing := [name for name in _ENVIRONMENT if any(s.get(name) != sessions[0].get(name) for s in sessions)]:
        lines.append(
            f"the {len(sessions)} sessions differ in {', '.join(differing)}: seconds are not comparable, and responses "
            "may differ from those of a single session; see sessions.json"
        )
    return lines


def shown_ks(ks: Sequence[int]) -> list[int]:
    """Choose at most three values of k for a table: 1, 4, 16, 64, 256 -> 1, 16, 256."""
    ordered = sorted(ks)
    return ordered if len(ordered) <= 3 else [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
