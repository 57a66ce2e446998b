"""`brorl.verify`: verify stored responses again, and compare the new verdicts with the stored ones.

Responses to unknown questions are counted and listed.
"""

from __future__ import annotations

import glob
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.text import Text

from brorl.activity import Stage
from brorl.api.arguments import refuse_in_worker
from brorl.config.reading import flat_settings
from brorl.console.screen import Screen
from brorl.errors import UserError, option
from brorl.evaluation.datasets import read_all_questions
from brorl.format import counted, shortened, visible_text
from brorl.prompts.question import Question
from brorl.runs.stored_rollouts import stored_steps
from brorl.storage import exists, is_file, is_folder, replace_file, storage_errors
from brorl.table import Result, Table
from brorl.tools.setup import load_tools_and_verifiers
from brorl.verdict import TRUNCATED
from brorl.verification.domains.verifiers import sandbox_lines
from brorl.verification.grade import (
    RescoredResponse,
    StoredResponse,
    match_questions,
    rescore,
)
from brorl.verification.response_files import ResponseColumns, read_responses
from brorl.verification.sandbox.pool import Workers
from brorl.verification.verifier import unreadable_references

SETTINGS = ("verification.",)
"""The recipe settings that apply to verification."""
_REASONS, _DISAGREEMENTS, _SLOWEST, _UNKNOWN = 12, 10, 3, 3  # show at most this many of each
_END = 100  # show this many characters of a response's end
_NUMBER = re.compile(r"-?[0-9]+(?:[./][0-9]+)*")


@dataclass(frozen=True, eq=False, repr=False)
class VerifyResult(Result):
    """Stored responses with new verdicts."""

    path: str  # file or folder with the responses
    data: str  # dataset, recipe or run with the questions
    rescored: tuple[RescoredResponse, ...]  # responses to known questions, with their verdicts
    unknown: tuple[StoredResponse, ...]  # responses to unknown questions
    # (question, problem) for each reference answer that the verifier cannot read
    unreadable: tuple[tuple[Question, str], ...]
    seconds: float  # wall time of verification
    is_required: bool = False  # whether the command fails unless the verdicts agree

    @cached_property
    def compared(self) -> tuple[RescoredResponse, ...]:
        """Responses with a stored verdict, except truncated and unverified ones."""
        return tuple(
            item
            for item in self.rescored
            if item.response.correct is not None and item.verdict.reason != TRUNCATED and not item.verdict.unverified
        )

    @cached_property
    def disagreements(self) -> tuple[RescoredResponse, ...]:
        """Compared responses whose new verdict differs from the stored one."""
        return tuple(item for item in self.compared if item.response.correct != item.verdict.correct)

    @property
    def agreement(self) -> float:
        """Fraction of compared responses whose verdicts agree, 0 to 1; NaN if there are none."""
        return 1 - len(self.disagreements) / len(self.compared) if self.compared else float("nan")

    @cached_property
    def num_unverified(self) -> int:
        """Number of responses without a verdict because both attempts hit infrastructure failures."""
        return sum(item.verdict.unverified for item in self.rescored)

    @property
    def agrees(self) -> bool:
        """Whether every stored verdict was reproduced; False without stored verdicts."""
        return bool(self.compared) and not self.disagreements and not self.num_unverified

    @property
    def tables(self) -> list[Table]:
        """Counts by domain and reason, and the agreement if there are stored verdicts."""
        reasons: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for item in self.rescored:
            reasons[item.question.domain][_NUMBER.sub("#", item.verdict.reason)] += 1
        rows: list[tuple[str, str, str, str]] = []
        for domain, counts in sorted(reasons.items()):
            shown = counts.most_common(_REASONS)
            total = counts.total()
            if len(counts) > _REASONS:
                rest = counted(len(counts) - _REASONS, "other reason")
                shown.append((rest, total - sum(count for _, count in shown)))
            rows += [
                (domain, visible_text(reason, one_line=True), f"{count:,}", f"{count / total:.1%}")
                for reason, count in shown
            ]
        notes = ("# stands for a number",) if any("#" in row[1] for row in rows) else ()
        columns = ("domain", "reason", "responses", "share")
        tables = [Table("verdicts", columns, tuple(rows), notes, words=frozenset({0, 1}))]
        if self.compared:
            pairs = Counter((item.response.correct, item.verdict.correct) for item in self.compared)
            stored = tuple(
                (f"stored {name}", f"{pairs[before, True]:,}", f"{pairs[before, False]:,}")
                for name, before in (("correct", True), ("incorrect", False))
            )
            tables.append(Table("stored verdicts", ("", "now correct", "now incorrect"), stored))
        return tables

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 1 if agreement is required and the verdicts disagree."""
        return int(self.is_required and not self.agrees)

    @property
    def lines(self) -> list[str]:
        """Lines about unknown questions, unverified responses, agreement and throughput."""
        lines = []
        if self.unknown:
            shown = ", ".join(_named(item) for item in self.unknown[:_UNKNOWN])
            count = counted(len(self.unknown), "response")
            lines.append(f"not verified, because no question of {self.data} has the same id or text: {count}, {shown}")
        if self.unreadable:
            question, problem = self.unreadable[0]
            lines.append(
                f"warning: no response can be correct for {counted(len(self.unreadable), 'question')}, such as "
                f"{question.name} with the reference answer {question.reference[:80]!r}, which {problem}; fix the row"
            )
        if self.num_unverified:
            count = counted(self.num_unverified, "response")
            lines.append(f"warning: {count} could not be verified because of infrastructure failures")
        if self.compared:
            count = counted(len(self.compared), "stored verdict")
            lines.append(f"agreement with {count}: {self.agreement:.2%}")
        distinct = {(item.question.id, item.response.text): item for item in self.rescored}
        rate = f", {len(distinct) / self.seconds:,.0f} per second" if self.seconds > 0 else ""
        lines.append(f"{counted(len(distinct), 'distinct response')} in {self.seconds:.2f} s{rate}")
        slowest = sorted(distinct.values(), key=lambda item: -item.verdict.seconds)[:_SLOWEST]
        listed = ", ".join(f"{item.verdict.seconds:.2f} s ({item.response.location})" for item in slowest)
        return [*lines, f"slowest: {listed}"]

    def parts(self) -> Iterator[str | Text | Table]:
        """Yield the tables, the lines and the first disagreements."""
        for table in self.tables:
            yield from (table, "")
        yield from self.lines
        if self.disagreements:
            yield Text(f"\nfirst disagreements ({len(self.disagreements):,} in total)", style="bold")
            for item in self.disagreements[:_DISAGREEMENTS]:
                yield from _disagreement(item)

    def __repr__(self) -> str:
        agreement = f", {self.agreement:.2%} as stored" if self.compared else ""
        correct = sum(item.verdict.correct for item in self.rescored)
        responses = counted(len(self.rescored), "response")
        return f"VerifyResult({self.path!r}: {correct:,} of {responses} correct{agreement})"

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield one JSON object per response to a known question."""
        for item in self.rescored:
            yield {
                "id": item.question.id, "domain": item.question.domain, "location": item.response.location,
                "correct": None if item.verdict.unverified else item.verdict.correct, "score": item.verdict.score,
                "extracted": item.verdict.extracted, "reason": item.verdict.reason, "seconds": item.verdict.seconds,
                "stored_correct": item.response.correct, "response": item.response.text,
            }  # fmt: skip


def verify(
    file: str | Path,
    *,
    data: str | None = None,
    response_column: str = "response",
    id_column: str | None = None,
    correct_column: str | None = None,
    output: str | Path | None = None,
    require_agreement: bool = False,
    progress: bool = True,
    **overrides: Any,
) -> VerifyResult:
    """Verify stored responses, and compare the verdicts with stored ones.

    Examples:
        >>> result = brorl.verify("responses.jsonl", data="math500.yaml", id_column="question_id")
        >>> result.agreement

    Args:
        file: A file, folder or pattern of JSONL, JSON or Parquet rows, each with a response and the id or the text of
            its question; a run directory (the rollouts of its last stored step); or the folder of an evaluation.
        data: The questions: a recipe, a run directory, or a dataset as in brorl eval (default: the
            run of FILE).
        response_column: Column of the response.
        id_column: Column of the question's id (default: one of the usual names).
        correct_column: Column of the stored verdict, true or false (default: one of the usual names).
        output: New file for the verdicts, one JSON object per line.
        require_agreement: Exit with code 1 unless every stored verdict is reproduced.
        progress: Show the current work, and the sandbox level if code of responses runs.
        overrides: Settings in `verification`, nested or by dotted name.

    Returns:
        The verdicts, their counts by domain and reason, and the agreement with the stored verdicts.

    Raises:
        UserError: If a file cannot be read, no response matches a question, or a domain has no verifier.
    """
    refuse_in_worker()
    settings = flat_settings(overrides)
    if wrong := next((name for name in settings if not name.startswith(SETTINGS)), None):
        raise UserError(
            f"{wrong} is not a setting of brorl verify; it takes those that start with verification. (see brorl verify "
            "--help)"
        )
    asked = _data_of(file) if data is None else data
    target = _new_file(output)
    if not asked.strip():
        raise UserError(f"{option('data')} is empty; name a recipe, a benchmark or a file")
    columns = ResponseColumns(response_column, id_column, correct_column)
    with Screen(silent=not progress) as screen:
        result = replace(_verify(str(file), asked, columns, settings, screen), is_required=require_agreement)
    if target is not None:
        with storage_errors(target, "rerun the command"):
            text = "".join(json.dumps(record) + "\n" for record in result.records())
            replace_file(target, text.encode())
    if require_agreement and not result.compared:
        raise UserError(
            f"{option('require-agreement')}: the file contains no stored verdicts; add them, or give "
            f"{option('correct-column')}"
        )
    return result


def _data_of(file: str | Path) -> str:
    """Return the run to which a file of responses belongs."""
    run = _run_of(str(file))
    if run is None:
        raise UserError(
            f"{file} does not belong to a run; name its questions with {option('data')}: a recipe, a benchmark or a "
            "file"
        )
    return str(run)


def _new_file(output: str | Path | None) -> Path | None:
    """Return the path of the output, which must not exist yet."""
    if output is None:
        return None
    target = Path(output).expanduser()
    if not is_folder(target.parent):
        raise UserError(
            f"{option('output', output)}: there is no folder {target.parent}; create it, or choose a different file"
        )
    if exists(target):
        raise UserError(f"{option('output', output)} exists; choose a different file")
    return target


def _verify(
    file: str, data: str, columns: ResponseColumns, settings: Mapping[str, Any], screen: Screen
) -> VerifyResult:
    screen.observe(Stage("reading", "responses"))
    path = _find_responses(file)
    responses = list(read_responses(path, columns))
    screen.observe(Stage("reading", "questions"))
    config, questions = read_all_questions(data, settings)
    known, unknown = match_questions(responses, questions)
    if not known:
        raise UserError(_no_match(path, data, responses, [question.id for question in questions]))
    asked = list({question.id: question for _, question in known}.values())
    domains = {question.domain for question in asked}
    with Workers.from_settings(config.verification) as workers:
        _, verifiers = load_tools_and_verifiers(config, domains, workers)
        for line in sandbox_lines(config.verification, domains):
            screen.echo(line)
        screen.observe(Stage("checking", "reference answers"))
        unreadable = unreadable_references(verifiers, asked)
        screen.observe(Stage("verifying", "responses"))
        rescored, seconds = rescore(
            known,
            verifiers,
            lambda done: screen.observe(Stage("verifying", f"{done:,} of up to {len(known):,} responses")),
            {question.id for question, _ in unreadable},
        )
    return VerifyResult(path, data, tuple(rescored), tuple(unknown), tuple(unreadable), seconds)


def _run_of(path: str) -> Path | None:
    """Return the run directory at a path or up to two levels above it; None if there is none."""
    local = Path(path).expanduser()
    candidates = (local, local.parent, local.parent.parent)
    return next((folder for folder in candidates if is_file(folder / "config.yaml")), None)


def _find_responses(path: str) -> str:
    """Return the file or folder of the responses; for a run directory, the rollouts of its last stored step."""
    local = Path(path).expanduser()
    if not path.strip():
        raise UserError("FILE is empty; name the file or folder of the responses")
    if not exists(local):
        if glob.has_magic(path):
            return path
        raise UserError(f"there is no file or folder {path} (working directory {Path.cwd()}); fix FILE")
    if (local / "config.yaml").is_file():
        steps = stored_steps(local)
        if not steps:
            raise UserError(
                f"the run {path} stored no rollouts; train with {option('store_rollouts_every', 1)}, or give the file "
                f"of an evaluation such as {local / 'evaluations'}"
            )
        return str(local / "rollouts" / f"step-{steps[-1]:06d}.parquet")
    return str(local / "responses") if (local / "responses").is_dir() else str(local)


def _no_match(path: str, data: str, responses: Sequence[StoredResponse], ids: Sequence[str]) -> str:
    if not responses:
        return f"{path} contains no responses; give a file with at least one"
    return (
        f"no response in {path} belongs to a question of {data} (its ids: {', '.join(ids[:_UNKNOWN])}, ...; first "
        f"response: {_named(responses[0])}); name the data of the responses with {option('data')}, or their id with "
        f"{option('id-column')}"
    )


def _named(response: StoredResponse) -> str:
    """Return the location of a response, with the id or the text of its question."""
    question = response.question_id if response.question_id is not None else response.question or ""
    return f"{response.location} ({shortened(question)})"


def _disagreement(item: RescoredResponse) -> list[str]:
    response = item.response
    verdict = item.verdict
    stored, now = ("correct" if correct else "incorrect" for correct in (response.correct, verdict.correct))
    before = f" ({shortened(response.reason)})" if response.reason and response.reason != stored else ""
    extracted = "none" if verdict.extracted is None else shortened(verdict.extracted)
    return [
        f"{item.question.id}, {response.location}: stored {stored}{before}, now {now} ({shortened(verdict.reason)})",
        f"  extracted: {extracted}; reference: {shortened(item.question.reference)}",
        f"  the response ends with: {visible_text(response.text.strip()[-_END:], one_line=True)}",
    ]
