r"""Verdicts on the cases of verdict_cases/: each wrong answer that is accepted is listed, and each right one rejected.

`pytest tests/verification/test_verdicts.py -n 0 -s` prints both rates of every kind. In a file of cases, a line with
`#` starts a kind and one with `=` a reference; `+` is a right answer and `-` a wrong one, `~` a right one that is known
to be rejected, and `!` a wrong one that is known to be accepted. `⏎` is a line end. The domain is the start of the
file's name, or of the kind in `thoughts.cases`; answers in `*_boxed.cases` get a box.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from brorl.algorithms.settings import RewardShaping
from brorl.prompts.prompt import Prompt
from brorl.verification.domains.verifiers import make_verifiers
from brorl.verification.sandbox.pool import Workers
from brorl.verification.settings import VerificationSettings
from brorl.verification.verifier import verify_distinct

FILES = sorted(Path(__file__).with_name("verdict_cases").glob("*.cases"))
SLOW = ("code_programs", "gym", "math_boxed", "math_changes_boxed", "science_boxed", "thoughts")
WRONG_ACCEPTED, RIGHT_REJECTED = 0.03, 0.05  # the most of a file


class Case(NamedTuple):
    kind: str
    reference: str
    mark: str  # + right, - wrong, ~ right and known to be rejected, ! wrong and known to be accepted
    response: str

    @property
    def is_right(self) -> bool:
        return self.mark in "+~"

    @property
    def is_accepted(self) -> bool:
        return self.mark in "+!"


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as made:
        yield made


def cases_of(file: Path) -> list[Case]:
    cases, kind, reference = [], "", ""
    for line in file.read_text("utf-8").splitlines():
        mark, text = line[:1], line[2:].replace("⏎", "\n")
        if mark == "#":
            kind = text
        elif mark == "=":
            reference = text
        elif mark:
            assert mark in "+-~!", f"{file.name}: {line}"
            response = f"\\boxed{{{text}}}" if file.stem.endswith("_boxed") else text
            cases.append(Case(kind, reference, mark, response))
    return cases


def print_rates(file: Path, cases: list[Case], accepted: list[bool]) -> None:
    """Print wrong accepted and right rejected of every kind."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for case, is_accepted in zip(cases, accepted, strict=True):
        for kind in (case.kind, "in all"):
            at = 2 if case.is_right else 0
            counts[kind][at] += is_accepted != case.is_right
            counts[kind][at + 1] += 1
    print(f"\n{file.stem:28} wrong accepted  right rejected")
    for kind, (accepted_wrong, wrong, rejected, right) in sorted(counts.items(), key=lambda item: item[0] == "in all"):
        print(f"{kind[:28]:28} {accepted_wrong:6} /{wrong:4}    {rejected:6} /{right:4}")


@pytest.mark.linux
@pytest.mark.parametrize(
    "file", [pytest.param(file, id=file.stem, marks=[pytest.mark.slow] if file.stem in SLOW else []) for file in FILES]
)
def test_verdicts(file: Path, workers: Workers) -> None:
    cases = cases_of(file)
    of_file = file.stem.partition("_")[0]
    domains = [case.kind.partition(":")[0] if of_file == "thoughts" else of_file for case in cases]
    if "gym" in domains:
        pytest.importorskip("reasoning_gym", reason="needs the extra gym")
    items = {
        at: (Prompt(str(at), "?", (1,), case.reference, domain), case.response)
        for at, (case, domain) in enumerate(zip(cases, domains, strict=True))
    }
    verdict_of = verify_distinct(items, make_verifiers(domains, VerificationSettings(), RewardShaping(), workers))
    verdicts = [verdict_of[at] for at in items]
    print_rates(file, cases, [verdict.correct for verdict in verdicts])
    assert all(verdict.score == float(verdict.correct) for verdict in verdicts)
    differing = [
        f"{case.reference!r} {case.response!r}: {verdict.reason}"
        for case, verdict in zip(cases, verdicts, strict=True)
        if verdict.correct != case.is_accepted
    ]
    assert not differing, "\n".join(differing)


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in FILES])
def test_few_cases_are_known_to_be_judged_wrongly(file: Path) -> None:
    cases = cases_of(file)
    right, wrong = sum(case.is_right for case in cases), sum(not case.is_right for case in cases)
    assert sum(case.mark == "!" for case in cases) <= WRONG_ACCEPTED * wrong
    assert sum(case.mark == "~" for case in cases) <= RIGHT_REJECTED * right
