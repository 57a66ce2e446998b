"""A domain in the table of verifiers is used everywhere: grading, check of references, trial, `init`."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from brorl.algorithms.settings import RewardShaping
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import Question
from brorl.verdict import Verdict
from brorl.verification.domains import verifiers as verifiers_module
from brorl.verification.sandbox.pool import Workers
from brorl.verification.settings import VerificationSettings
from brorl.verification.verifier import TrialResponses, unreadable_references
from run_support import command, save_tiny_model

EVERY_CHARACTER = "".join(map(chr, range(32, 127)))


class ParityVerifier:
    """A new domain: the reference is `even` or `odd`, and a response is right if its length has that parity."""

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        parities = [("even", "odd")[len(response) % 2] for _, response in items]
        right = [parity == prompt.reference for (prompt, _), parity in zip(items, parities, strict=True)]
        return [
            Verdict(ok, float(ok), parity, "correct" if ok else f"length is {parity}", 0.0)
            for ok, parity in zip(right, parities, strict=True)
        ]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        return {reference: "is no parity" for reference in references if reference not in ("even", "odd")}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:  # noqa: ARG002
        right, wrong = ("xx", "xxx") if reference == "even" else ("xxx", "xx")
        return TrialResponses(right, [wrong])


@pytest.fixture(autouse=True)
def with_a_new_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verifiers_module.DOMAINS, "parity", lambda _workers: ParityVerifier())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def write_rows(*answers: str) -> None:
    rows = [{"prompt": f"{i} letters?", "answer": answer} for i, answer in enumerate(answers)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_its_references_are_checked_with_those_of_other_domains() -> None:
    references = {"parity": ["odd", "seven", "even", "seven"], "countdown": ["3 5 -> 8", "5 3 -> 8", "4"]}
    questions = [Question(f"{d}:{i}", "?", r, d) for d, own in references.items() for i, r in enumerate(own)]
    verifiers = verifiers_module.make_verifiers(references, VerificationSettings(), RewardShaping(), Workers())
    problems = [(question.id, problem) for question, problem in unreadable_references(verifiers, questions)]
    assert [name for name, _ in problems] == ["countdown:1", "countdown:2", "parity:1", "parity:3"]
    assert {problem for name, problem in problems if name.startswith("parity")} == {"is no parity"}
    assert all(problem.startswith("is not a countdown puzzle") for name, problem in problems if "count" in name)


@pytest.mark.slow
def test_check_and_init_use_it(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", characters=EVERY_CHARACTER, max_positions=64)
    arguments = ("--data.sources={path: rows.jsonl, domain: parity}", "--data.held_out_fraction=0.3", "--no-timing")
    arguments = (*arguments, "--sampling.max_new_tokens=8", f"--model={model}")
    write_rows(*["even", "odd"] * 6)
    outcome = command("check", *arguments)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert "verified as parity" in outcome.out
    right, wrong = (line for line in outcome.out.splitlines() if "as the response" in line)
    assert ": correct (extracted" in right
    assert ": incorrect, length is" in wrong

    assert command("init", "rows.jsonl", "--domain=parity").code == 0
    assert "own verifier" not in Path("mine.yaml").read_text()
    assert "verification" not in Path("mine.yaml").read_text()

    write_rows(*["even"] * 8, "seven")
    outcome = command("check", *arguments)
    assert outcome.code == 2
    assert "rows.jsonl line 9) has the reference answer 'seven', which is no parity (1 such answer); fix" in outcome.err


def test_a_function_of_the_user_replaces_a_verifier_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def same(response, reference): return response == reference\n")
    with Workers() as workers:
        settings = VerificationSettings(functions=dict.fromkeys(("parity", "own"), "own.py:same"))
        verifiers = verifiers_module.make_verifiers(["parity", "own"], settings, RewardShaping(), workers)
        for domain, verifier in verifiers.items():
            prompt = Prompt("p", "?", (1,), "seven", domain)
            assert verifier.check_references(["seven"]) == {}
            assert [v.correct for v in verifier.verify_all([(prompt, "seven"), (prompt, "even")])] == [True, False]
