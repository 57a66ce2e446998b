"""A comparison for people: the verdict in words, tables for the console, the same as Markdown.

In: a comparison. Out: sentences, rich tables that fit 80 columns, GitHub Markdown. What answers the question comes
before the tables, and what the answer rests on comes after them. Nothing is estimated here; `brorl.evaluation` does
that.
"""

from __future__ import annotations

from brorl.comparison.arms import Comparison
from brorl.comparison.findings import findings
from brorl.comparison.frontier_text import sweep_verdict
from brorl.comparison.tables import tables_of
from brorl.comparison.text import VerdictWords, pair_verdict
from brorl.cost import amount
from brorl.table import Table


def verdict_words(comparison: Comparison) -> VerdictWords:
    """Say what a comparison shows, in plain sentences.

    Args:
        comparison: At least two arms. Of two, the second is measured against the first; more are a sweep.

    Returns:
        The answer in one sentence, then coverage; what is matched and what is not, early endings, seeds, limits.

    Raises:
        ValueError: If there are fewer than two arms, or runs that were not evaluated at a mark.
    """
    found = findings(comparison)
    return sweep_verdict(found) if found.pair is None else pair_verdict(found)


def verdict(comparison: Comparison) -> list[str]:
    """Return all sentences of `verdict_words`, the answer first."""
    found = verdict_words(comparison)
    return [*found.answer, *found.remarks]


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Make the tables of a comparison for a console of 80 columns or more.

    Raises:
        ValueError: If there are fewer than two arms, or runs that were not evaluated at a mark.
    """
    return tables_of(findings(comparison))


def markdown(comparison: Comparison) -> str:
    """Return the verdict and the tables of a comparison as GitHub Markdown.

    Raises:
        ValueError: If there are fewer than two arms, or runs that were not evaluated at a mark.
    """
    names = [arm.name for arm in comparison.arms]
    others = f"{', '.join(names[:-1])} and {names[-1]}"
    title = f"# {others} from {comparison.checkpoint}, {amount(comparison.marks[-1], comparison.unit)} each"
    found = verdict_words(comparison)
    answer, remarks = ("\n".join(f"- {line}" for line in lines) for lines in (found.answer, found.remarks))
    tables = [table.markdown() for table in tables_of(findings(comparison))]
    return "\n\n".join([title.replace("|", "\\|"), answer, *tables, "## What this rests on", remarks]) + "\n"
