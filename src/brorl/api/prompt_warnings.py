"""Warnings of `check` about prompts that cannot lead to their references: options left out, and forms of the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice

from brorl.format import counted, listed
from brorl.prompts.answer_forms import answer_forms, asked_form, last_box
from brorl.prompts.guess import option_groups
from brorl.prompts.prompt import Prompt
from brorl.prompts.rows import Row, read_rows
from brorl.prompts.science import Choices, read_options, read_science_reference, shows_options
from brorl.prompts.settings import FileSource
from brorl.verification.domains.table import MATH_DOMAIN, SCIENCE_DOMAIN
from brorl.verification.verifier import Verifier

_ROWS = 50  # that are searched for options
_TRIED = 8  # prompts whose form of the answer is tried
_MOSTLY = 0.5
_LETTER = re.compile(r"\(?([A-J])\)?\.?")


def unused_options(source: FileSource) -> Iterator[str]:
    """Yield a warning if a source has columns of options that its questions leave out."""
    if source.layout or source.options_column:
        return
    first = next(read_rows(source.path, source.subset, source.split, ()), None)
    columns = first.columns if first else ()
    rows = list(islice(read_rows(source.path, source.subset, source.split, columns), _ROWS))
    for group in option_groups(rows) if rows else ():
        shown = sum(_shows(row, source.prompt_column, group.columns) for row in rows)
        if group.is_clear and shown < _MOSTLY * len(rows):
            named = group.columns[0] if len(group.columns) == 1 else f"[{', '.join(group.columns)}]"
            yield (
                f"warning: {source.label}: the prompts do not contain {group.name}, which can only be options of "
                f"multiple-choice questions; set data.sources[].options_column: {named} and domain: {SCIENCE_DOMAIN}, "
                "or let brorl init write a recipe"
            )
            return


def _shows(row: Row, prompt_column: str, group: Sequence[str]) -> bool:
    """Whether the question of a row contains each of its options."""
    options = read_options([row.cell(name) for name in group])
    text = " ".join(str(row.cell(prompt_column)).split())
    return options is None or all(" ".join(option.split()) in text for option in options.texts)


def unreachable_references(prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning if most references of a source name an option that the prompt does not contain."""
    named = [prompt for prompt in prompts if _names_option(prompt)]
    blind = [prompt for prompt in named if not _has_option(prompt)]
    if len(named) > _MOSTLY * len(prompts) and len(blind) > _MOSTLY * len(named):
        yield (
            f"warning: the reference answers of {counted(len(blind), 'prompt')} name an option that the prompt does "
            f"not contain, such as {blind[0].id} with {blind[0].reference[:60]!r}: the letters mean nothing to the "
            "model; write the options into the question, or set data.sources[].options_column"
        )


def _names_option(prompt: Prompt) -> bool:
    return _choices(prompt) is not None or _LETTER.fullmatch(prompt.reference.strip()) is not None


def _choices(prompt: Prompt) -> Choices | None:
    reference = read_science_reference(prompt.reference) if prompt.domain == SCIENCE_DOMAIN else None
    return reference if isinstance(reference, Choices) else None


def _has_option(prompt: Prompt) -> bool:
    choices, text = _choices(prompt), " ".join(prompt.text.split())
    if choices is not None:
        stated = all(" ".join(option.split()) in text for option in choices.options)
        return stated or shows_options(text, choices.options)
    match = _LETTER.fullmatch(prompt.reference.strip())
    return match is None or re.search(rf"(?<![A-Za-z]){match[1]}(?![A-Za-z])", text) is not None


def unread_forms(verifier: Verifier, prompts: Sequence[Prompt], is_own: bool) -> Iterator[str]:
    """Yield warnings about the form of the answer that the questions of one domain ask for.

    Args:
        verifier: The verifier of the domain.
        prompts: Its prompts, at least one.
        is_own: Whether the verifier is the user's function.
    """
    if not is_own and prompts[0].domain not in (MATH_DOMAIN, SCIENCE_DOMAIN):
        return
    form = asked_form([prompt.question for prompt in prompts])
    if form is None:
        return
    others = [other.name for other in answer_forms(prompts[0].text) if other not in answer_forms(prompts[0].question)]
    if others:
        yield (
            f"warning: the questions ask for the answer {form.name}, and the text around them for one "
            f"{listed(others)}; set prompt.template: '{{prompt}}', or remove one of the two"
        )
    tried = [prompts[index * len(prompts) // _TRIED] for index in range(min(_TRIED, len(prompts)))]
    made = [verifier.trial_responses(prompt.reference, ()).right for prompt in tried]
    items = [(prompt, form.write(last_box(right) or right)) for prompt, right in zip(tried, made, strict=True)]
    rejected = [item for item, verdict in zip(items, verifier.verify_all(items), strict=True) if not verdict.correct]
    if rejected:
        yield (
            f"warning: the questions ask for the answer {form.name}, which the verifier does not read: it rejects "
            f"{rejected[0][1]!r} ({len(rejected)} of {counted(len(items), 'reference answer')} in this form); ask for "
            "\\boxed{} in the questions, or write a verifier for this form (docs/how-to/verifiers.md)"
        )
