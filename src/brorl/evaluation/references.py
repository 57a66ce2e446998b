"""The reference answers of a run: unreadable ones are errors in the user's own data, and lines in public datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.evaluation.questions import SourceQuestions, all_questions, check_split
from brorl.format import counted
from brorl.verification.references import check_references, unreadable_references
from brorl.verification.verifier import Verifier


def check_left(config: TrainConfig, sources: Sequence[SourceQuestions], verifiers: Mapping[str, Verifier]) -> None:
    """Check that questions are left to train on and to evaluate on.

    Raises:
        UserError: If none are left. An unreadable reference answer comes first: it is the more basic fault of a file.
    """
    try:
        check_split(config, sources)
    except UserError:
        check_source_references(verifiers, sources)
        raise


def check_source_references(verifiers: Mapping[str, Verifier], sources: Sequence[SourceQuestions]) -> list[str]:
    """Reject unreadable reference answers in the user's own data.

    Returns:
        A line for the unreadable reference answers of each public dataset.

    Raises:
        UserError: On the first one in the user's own data.
    """
    check_references(verifiers, all_questions([source for source in sources if not source.published]))
    notes = []
    for source in sources:
        unreadable = unreadable_references(verifiers, all_questions([source])) if source.published else []
        if unreadable:
            question, problem = unreadable[0]
            notes.append(
                f"warning: {source.name}: no response can match the reference answer of "
                f"{counted(len(unreadable), 'question')}, such as {question.name}: {question.reference[:60]!r}, which "
                f"{problem}"
            )
    return notes
