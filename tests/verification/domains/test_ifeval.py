"""Instruction following: verdicts, references, trial responses, and the package for languages."""

import sys

import pytest

from brorl.errors import UserError
from brorl.prompts.instructions import Instruction, Instructions
from brorl.prompts.prompt import Prompt
from brorl.verdict import Verdict
from brorl.verification.domains import ifeval
from brorl.verification.domains.ifeval import InstructionsVerifier
from each_row import each_row

NO_COMMA = Instruction("punctuation:no_comma", {})
QUOTED = Instruction("startend:quotation", {})
THREE_WORDS = Instruction("length_constraints:number_words", {"num_words": 3, "relation": "at least"})


def prompt(*instructions: Instruction, loose: bool = False) -> Prompt:
    return Prompt("p", "?", (1,), Instructions(instructions, loose).to_text(), "ifeval")


def verdict(response: str, *instructions: Instruction, loose: bool = False) -> Verdict:
    items = [(prompt(*instructions, loose=loose), response)]
    [partial], [plain] = (InstructionsVerifier(partial_credit=on).verify_all(items) for on in (True, False))
    assert (plain.correct, plain.score, plain.reason) == (partial.correct, float(partial.correct), partial.reason)
    return partial


def test_a_response_must_follow_all_and_its_score_is_the_share() -> None:
    every = (NO_COMMA, QUOTED, THREE_WORDS)
    for response, fraction, reason in [
        ('"a b c"', 1.0, "correct"),
        ('"a, b c"', 2 / 3, "not followed: punctuation:no_comma"),
        ("a, b c", 1 / 3, "not followed: punctuation:no_comma"),
        ("a b", 1 / 3, "not followed: startend:quotation"),
        ("a, b", 0.0, "not followed: punctuation:no_comma"),
        (" \n", 0.0, "no answer"),
    ]:
        judged = verdict(response, *every)
        assert (judged.correct, judged.score, judged.reason) == (fraction == 1, fraction, reason), response


def test_the_loose_reading_drops_lines_and_asterisks() -> None:
    for response, strict, loose in [
        ('"a"', True, True),
        ('Sure:\n"a"', False, True),
        ('"a"\nDone', False, True),
        ('Sure\n"a"\nDone', False, True),
        ('*"a"*', False, True),
        ('Sure "a"', False, False),
        ('x\ny\n"a"', False, False),
    ]:
        assert verdict(response, QUOTED).correct is strict, response
        assert verdict(response, QUOTED, loose=True).correct is loose, response


def test_a_very_long_response_is_incorrect() -> None:
    assert verdict("a" * 200_000, NO_COMMA).correct
    assert verdict("a" * 200_001, NO_COMMA).reason == "response too long"


@each_row(
    ("reference", "problem"),
    [("no comma", "is not JSON text"), ("[]", "expected {"), ('{"instructions": []}', "has no instructions"),
     ('{"instructions": [{"kind": "punctuation:no_dash"}]}', "has an unknown instruction 'punctuation:no_dash'"),
     ('{"instructions": [{"kind": "length_constraints:number_words", "num_words": 3}]}', "has no relation for"),
     ('{"instructions": [{"kind": "length_constraints:number_words", "num_words": 0, "relation": "less than"}]}',
      "less than 0"),
     ("[" * 100_000, "is not JSON text")],
)  # fmt: skip
def test_bad_references_are_found_before_training(reference: str, problem: str) -> None:
    good = Instructions((NO_COMMA,)).to_text()
    problems = InstructionsVerifier().check_references([good, reference])
    assert list(problems) == [reference]
    assert problem in problems[reference]
    with pytest.raises(ValueError, match=r"is not|is a list|has"):
        InstructionsVerifier().verify_all([(Prompt("p", "?", (1,), reference, "ifeval"), "a")])


def test_a_missing_package_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    ifeval._instructions.cache_clear()
    german = Instructions((Instruction("language:response_language", {"language": "de"}),)).to_text()
    english = Instructions((Instruction("change_case:english_capital", {}), NO_COMMA)).to_text()
    assert InstructionsVerifier().check_references([Instructions((NO_COMMA,)).to_text()]) == {}
    for needing in (german, english):  # an error, because a row of a public dataset gets only a warning
        with pytest.raises(UserError, match=r"langdetect; run: pip install 'brorl\[ifeval\]'"):
            InstructionsVerifier().check_references([needing])
    with pytest.raises(UserError, match=r"pip install 'brorl\[ifeval\]'"):
        InstructionsVerifier().verify_all([(Prompt("p", "?", (1,), german, "ifeval"), "a")])
    assert verdict("a", NO_COMMA).correct


def test_a_trial_is_certain_where_a_plain_sentence_follows_the_instructions() -> None:
    capitals = {"capital_frequency": 1, "capital_relation": "at least"}
    for instruction, certain in (
        (NO_COMMA, True),
        (Instruction("change_case:capital_word_frequency", capitals), False),
    ):
        own, verifier = prompt(instruction), InstructionsVerifier()
        made = verifier.trial_responses(own.reference, [])
        right, *wrong = verifier.verify_all([(own, response) for response in (made.right, *made.wrong)])
        assert made.certain is right.correct is certain
        assert not wrong[-1].correct
