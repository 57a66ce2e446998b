"""Write docs/reference/gym.md: every dataset of Reasoning Gym, what its scorer gives junk, and its guard.

It generates entries of every dataset. It scores junk, and right answers denied or joined with wrong ones, with the
scorer alone and as the verifier does. It takes some minutes of CPU time. The extra `gym` must be installed.

    python scripts/make_gym_table.py
"""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from brorl.verification.gym.answers import EVALUATED, GUARDS
from brorl.verification.gym.task import SEVERAL, GymTask
from brorl.verification.sandbox.pool import VerifierCall, WorkerPool

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "gym.md"
ENTRIES = 10
JUNK = (
    " ", "None", "null", "0", "1", "-1", "42", "yes", "no", "True", "False", "[]", "{}", "[[]]", '{"a": "b"}', "N/A",
    "nan", "inf", "[NaN]", "I do not know.", "lorem ipsum " * 500, "__import__('os').getcwd()", "print()", "1/0",
    "9**9**5", "\u2603\U0001f642\u202e\0", " ".join(map(str, range(200))), str(list(range(100))), "A", "a b c d",
    "6*4", "0, 0", "on",
)  # fmt: skip
JOINED = (
    "{x} or {y}", "{y} or {x}", "{x}, {y}", "{y}, {x}", "{x}\n{y}", "{y}\n{x}", "{x} {y}", "{y} {x}", "{x}; {y}",
    "{y}; {x}", "{x} and {y}", "{y} and {x}", "{x} ({y})", "not {y} but {x}",
)  # fmt: skip
DENIED = (
    "not {x}", "{x} is wrong", "{x} or not", "maybe {x}", "anything but {x}", "!= {x}", "> {x}", "< {x}",
    "{x}?", "I think it is {x}, but I am not sure", "It is not {x}.", "{x} is not it",
)  # fmt: skip
NUMBERS_JOINED = 4  # numbers within a right answer that are joined with a wrong one
INTRODUCTION = """\
# Datasets of Reasoning Gym

`scripts/make_gym_table.py` writes this page: {number} datasets of reasoning-gym {version}, {entries} entries of each,
seed 0. Each entry is tried with {junk} junk answers, the text of the question, its right answer denied (`not 5`), and
joined with wrong ones (`5 or 6`, `6, 5`, two lines).
[Verify answers of Reasoning Gym](../how-to/verify_gym.md) explains the guards.

- {evaluated} scorers evaluate the answer as code: {evaluated_names}.
- {own} have one right answer, which is compared by value, without the scorer. The scorers of the others find right \
answers, behind guards.
- The scorers of {holes} datasets give junk 0.99 or more: {holes_names}. Here, no junk is correct. The guards close \
holes that were found by reading the scorers and by changing right answers.
- The scorers of {joined} datasets give a right answer denied, or joined with a wrong one, 0.99 or more: \
{joined_names}. Here, none of these is correct.
- {floor} scorers give every incorrect answer, or almost every one, a small score; with `rewards.partial_credit` that \
is a reward.
- {raising} raise an exception on junk, which counts as incorrect: {raising_names}.
- {without} have no answer of their own, only a scorer: {without_names}.
- Entries of {dropped} do not have an accepted answer of their own and are dropped: {dropped_names}.

The column *answer* is `own` if only the dataset's own answer is correct, and `several` if its scorer accepts others.
The column *junk* is the greatest score that the scorer alone gives junk.

| dataset | settings | answer | junk | guard: what the scorer alone accepts |
|---|---|---|---|---|
"""


def settings() -> dict[str, Any]:
    """Return the version of Reasoning Gym, and the settings of every dataset that a source can name; for workers."""
    import dataclasses
    from importlib.metadata import version

    from reasoning_gym.factory import DATASETS

    fields = {name: [field.name for field in dataclasses.fields(config)] for name, (_, config) in DATASETS.items()}
    known = {name: [key for key in keys if key not in ("seed", "size")] for name, keys in sorted(fields.items())}
    del known["composite"]
    return {"version": version("reasoning-gym"), "settings": known}


def measure(name: str, number: int, first: int = 0) -> dict[str, Any]:
    """Score junk, and right answers denied or joined with wrong ones, for entries of a dataset; for workers.

    Args:
        name: Name of the dataset.
        number: Number of entries.
        first: Index of the first entry.

    Returns:
        `junk`, the greatest score of junk without the guard; `joined`, that of a right answer denied or joined with a
        wrong one; `least`, the median score of junk; `raised`, whether the scorer raised; `accepted`, the wrong answers
        that are correct here; `without`, whether the dataset has no answers; and `dropped`, the entries of which the
        own answer is not accepted.
    """
    from brorl.verification.gym.entries import generate, score_task, scorer_of

    scorer = scorer_of(name, "{}")
    places = [(name, first + place) for place in range(number + 3)]
    made = generate(places[:number], {}, 0)
    tasks = [GymTask.from_text(one.task) for one in made if one.dropped is None]
    accepted: list[Any] = []
    raised = False

    def scored(task: GymTask, answer: str) -> float:
        nonlocal raised
        if score_task(task, answer).correct:
            accepted.append([task.answer, answer[:80]])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return float(scorer.score_answer(answer=answer, entry=task.entry))
        except Exception:
            raised = True
            return 0.0

    junk = [scored(task, one) for task in tasks for one in (*JUNK, str(task.entry["question"])) if differs(one, task)]
    others = made if len(made) > 1 else [*made, *generate(places[number:], {}, 0)]
    rights = [right_answer(GymTask.from_text(one.task)) for one in others if one.dropped is None]
    joins = [
        scored(task, answer)
        for task in tasks
        for answer in joined_answers(
            right_answer(task), [y for y in dict.fromkeys(rights) if y and not score_task(task, y).correct][:2]
        )
    ]
    return {
        "junk": max(junk, default=0.0),
        "joined": max(joins, default=0.0),
        "least": sorted(junk)[len(junk) // 2] if junk else 0.0,
        "raised": raised,
        "accepted": accepted,
        "without": any(task.answer is None for task in tasks),
        "dropped": sum(one.dropped is not None for one in made),
    }


def differs(junk: str, task: GymTask) -> bool:
    """Whether junk differs from the dataset's own answer, as text and as a number."""
    right = (task.answer or "").strip().lower()
    if junk.strip().lower() == right:
        return False
    with contextlib.suppress(ValueError):
        return float(junk) != float(right)
    return True


def right_answer(task: GymTask) -> str | None:
    """Return the dataset's own answer, or the example in its metadata; None if it has neither."""
    metadata = task.entry["metadata"]
    if task.answer or "possible_answer" not in metadata:
        return task.answer or metadata.get("example_correct_answer")
    return json.dumps(metadata["possible_answer"])


def joined_answers(right: str | None, wrong: Sequence[str]) -> Iterator[str]:
    """Yield a right answer denied, joined with wrong ones, and with numbers in it joined with wrong numbers."""
    if right is None:
        return
    yield from (form.format(x=right) for form in DENIED)
    for form in JOINED:
        yield from (form.format(x=right, y=one) for one in wrong)
    for number in list(re.finditer(r"\d+", right))[:NUMBERS_JOINED]:
        before, digits, after = right[: number.start()], number[0], right[number.end() :]
        for form in JOINED[:8]:
            yield before + form.format(x=digits, y=int(digits) + 1) + after


def page() -> str:
    """Return the page."""
    here = Path(__file__)
    with WorkerPool(timeout_s=600.0, memory_bytes=4 << 30) as pool:
        (found,) = pool.run([VerifierCall(f"{here}:settings", ())])
        names = list(found.value["settings"])
        results = pool.run([VerifierCall(f"{here}:measure", (name, ENTRIES)) for name in names])
    measured = {name: result.value for name, result in zip(names, results, strict=True)}
    return introduction(found.value["version"], measured) + "".join(
        row(name, found.value["settings"][name], measured[name]) for name in names
    )


def introduction(version: str, measured: dict[str, dict[str, Any]]) -> str:
    """Return the text before the table."""

    def listed(key: str, chosen: list[str]) -> dict[str, Any]:
        return {key: len(chosen), f"{key}_names": ", ".join(f"`{name}`" for name in chosen) or "none"}

    holes = [name for name, one in measured.items() if one["junk"] >= 0.99]
    text = INTRODUCTION.format(
        number=len(measured),
        version=version,
        entries=ENTRIES,
        junk=len(JUNK),
        own=sum(name not in SEVERAL for name in measured),
        floor=sum(one["least"] > 0 for one in measured.values()),
        **listed("evaluated", sorted(EVALUATED)),
        **listed("holes", holes),
        **listed("joined", [name for name, one in measured.items() if one["joined"] >= 0.99]),
        **listed("raising", [name for name, one in measured.items() if one["raised"]]),
        **listed("without", [name for name, one in measured.items() if one["without"]]),
        **listed("dropped", [name for name, one in measured.items() if one["dropped"]]),
    )
    return wrapped(text)


def wrapped(text: str) -> str:
    """Break the lines of lists at 120 characters."""
    return "\n".join(
        textwrap.fill(line, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        if line.startswith("- ") and len(line) > 118
        else line
        for line in text.split("\n")
    )


def row(name: str, keys: list[str], one: dict[str, Any]) -> str:
    """Return the row of a dataset."""
    answer = "several" if name in SEVERAL else "own"
    return f"| {first_cells(name, keys)} | {answer} | {one['junk']:.2f} | {guard(name)} |\n"


def first_cells(name: str, keys: list[str]) -> str:
    """Return the name and the settings of a dataset as cells."""
    return f"`{name}` | {', '.join(f'`{key}`' for key in keys)}"


def guard(name: str) -> str:
    """Return the last cell of a dataset."""
    return GUARDS[name].why if name in GUARDS else ""


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(json.dumps({"wrote": str(PAGE)}))
