"""Data warnings for `brorl check`: information missing from prompts, and answers the verifier cannot read."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import islice

from brorl.format import counted, listed, shortened
from brorl.prompts.answer_forms import ALONE, AnswerForm, answer_forms, asked_form, last_box
from brorl.prompts.decimal_commas import has_decimal_comma, with_points
from brorl.prompts.option_columns import option_groups
from brorl.prompts.options import read_options, shows_options
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import MATH_DOMAIN, SCIENCE_DOMAIN
from brorl.prompts.row_readers import read_rows
from brorl.prompts.science import Choices, read_science_reference
from brorl.prompts.settings import FileSource
from brorl.verification.verifier import Verifier

_ROWS = 50  # rows to search for answer options
_TRIED = 8  # prompts on which to try each answer form
_MAJORITY = 0.5
_LETTER = re.compile(r"\(?([A-J])\)?\.?")


def unused_options(source: FileSource) -> Iterator[str]:
    """Yield a warning if a source has columns of answer options that do not appear in its questions."""
    if source.layout or source.options_column:
        return
    first = next(read_rows(source.path, source.subset, source.split, ()), None)
    columns = first.columns if first else ()
    rows = list(islice(read_rows(source.path, source.subset, source.split, columns), _ROWS))
    for group in option_groups(rows) if rows else ():
        options = [read_options([*map(row.cell, group.columns)]) for row in rows]
        shown = sum(
            row_options is None or _contains(str(row.cell(source.prompt_column)), row_options.texts)
            for row, row_options in zip(rows, options, strict=True)
        )
        if group.is_clear and shown < _MAJORITY * len(rows):
            named = group.columns[0] if len(group.columns) == 1 else f"[{', '.join(group.columns)}]"
            yield (
                f"warning: {source.label}: the prompts do not contain {group.name}, which can only be options of "
                f"multiple-choice questions; set data.sources[].options_column: {named} and domain: {SCIENCE_DOMAIN}, "
                "or let brorl init write a recipe"
            )
            return


def _contains(text: str, options: Sequence[str]) -> bool:
    """Return whether the text contains every option, treating any run of whitespace as one space."""
    plain = " ".join(text.split())
    return all(" ".join(option.split()) in plain for option in options)


def unreachable_references(prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning if most references, such as `C`, name an option that the prompt does not contain."""
    named = [(prompt, shown) for prompt in prompts if (shown := _shows_option(prompt)) is not None]
    blind = [prompt for prompt, shown in named if not shown]
    if len(named) > _MAJORITY * len(prompts) and len(blind) > _MAJORITY * len(named):
        yield (
            f"warning: the reference answers of {counted(len(blind), 'prompt')} name an option that the prompt does "
            f"not contain, such as {blind[0].id} with {blind[0].reference[:60]!r}: the letters mean nothing to the "
            "model; add the options to the question, or set data.sources[].options_column"
        )


def _shows_option(prompt: Prompt) -> bool | None:
    """Return whether a prompt contains the option that its reference names; None if the reference names none."""
    reference = read_science_reference(prompt.reference) if prompt.domain == SCIENCE_DOMAIN else None
    if isinstance(reference, Choices):
        text = " ".join(prompt.text.split())
        return _contains(text, reference.options) or shows_options(text, reference.options)
    match = _LETTER.fullmatch(prompt.reference.strip())
    return None if match is None else re.search(rf"(?<![A-Za-z]){match[1]}(?![A-Za-z])", prompt.text) is not None


def unread_forms(verifier: Verifier, prompts: Sequence[Prompt], is_own: bool) -> Iterator[str]:
    """Yield a warning if the verifier cannot read the answer form requested by a domain's questions."""
    if not is_own and prompts[0].domain not in (MATH_DOMAIN, SCIENCE_DOMAIN):
        return
    form = asked_form([prompt.question for prompt in prompts])
    around = _forms_around(prompts[0])
    if form is None and ALONE not in around:
        return
    if form is None:  # a system message asks for it
        form = ALONE
    other_names = [other.name for other in around if other != form]
    if other_names:
        yield (
            f"warning: the questions ask for the answer {form.name}, but the text around them for one "
            f"{listed(other_names)}; set prompt.template: '{{prompt}}', or remove one of the two"
        )
    tried = [prompts[index * len(prompts) // _TRIED] for index in range(min(_TRIED, len(prompts)))]
    made = [verifier.trial_responses(prompt.reference, ()).right for prompt in tried]
    items = [(prompt, form.write(last_box(right) or right)) for prompt, right in zip(tried, made, strict=True)]
    rejected = [item for item, verdict in zip(items, verifier.verify_all(items), strict=True) if not verdict.correct]
    if rejected:
        yield (
            f"warning: the questions ask for the answer {form.name}, which the verifier cannot read: it rejects "
            f"{rejected[0][1]!r} ({len(rejected)} of {counted(len(items), 'reference answer')} in this form); ask for "
            "\\boxed{} in the questions, or write a verifier for this form (docs/how-to/verifiers.md)"
        )


def _forms_around(prompt: Prompt) -> list[AnswerForm]:
    """Return the answer forms requested in the text around a question; each sentence or line may request one."""
    before, _, after = prompt.text.partition(prompt.question)
    forms = (form for sentence in re.split(r"\n|(?<=[.!?]) ", f"{before}\n{after}") for form in answer_forms(sentence))
    own = answer_forms(prompt.question)
    return [form for form in dict.fromkeys(forms) if form not in own]


def other_spellings(verifier: Verifier, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning if the verifier rejects the reference when rewritten with ASCII digits and a decimal point."""
    spelled = [(prompt, plain) for prompt in prompts if (plain := _in_ascii(prompt.reference)) != prompt.reference]
    tried = [spelled[index * len(spelled) // _TRIED] for index in range(min(_TRIED, len(spelled)))]
    items = [(prompt, f"\\boxed{{{plain}}}") for prompt, plain in tried]
    rejected = [item for item, verdict in zip(items, verifier.verify_all(items), strict=True) if not verdict.correct]
    if rejected:
        prompt, response = rejected[0]
        yield (
            f"warning: the reference answer {quoted(prompt.reference)} of question {prompt.id} rejects "
            f"{quoted(response)}, which a model may write ({counted(len(spelled), 'such answer')}); write these "
            "answers with the digits 0 to 9 and a decimal point"
        )


def _in_ascii(text: str) -> str:
    """Replace digits from other scripts with 0 to 9, and a decimal comma with a point."""
    plain = "".join(str(unicodedata.digit(c)) if c.isdecimal() else c for c in text)
    plain = plain.replace("\N{ARABIC DECIMAL SEPARATOR}", ".")
    return (with_points(plain) if has_decimal_comma(plain) else None) or plain


def quoted(text: str) -> str:
    """Shorten text to one line and put it in backticks."""
    return f"`{shortened(text)}`"
