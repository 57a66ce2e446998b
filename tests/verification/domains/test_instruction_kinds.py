"""Each kind of instruction: texts made by hand, slow independent counts, and hostile texts."""

import json
import random
import re
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from brorl.prompts.instructions import KINDS, Instruction, Instructions
from brorl.verification.domains.ifeval import CHECKS, LANGUAGE_KINDS, broken
from each_row import each_row

needs_langdetect = pytest.mark.skipif(find_spec("langdetect") is None, reason="needs langdetect (brorl[ifeval])")

PROMPT = "Write a poem. Make it short."
GERMAN = "Das Wetter ist heute sehr schön, und wir gehen alle zusammen in den Park."
ENGLISH = "the weather is very nice today and all of us will walk to the park together"

# kind, arguments, texts that follow, texts that do not
TEXTS: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["fox", "NASA"]},
     ["the fox of nasa", "FOX,NaSa", "outfoxed by NASA's men"], ["fox", "NASA", "f ox nasa", "fo\nx nasa"]),
    ("keywords:existence", {"keywords": ["C++", "a.b"]}, ["c++ and A.B", "xa.bC+++"], ["C+ a.b", "C++ axb"]),
    ("keywords:frequency", {"keyword": "fox", "frequency": 2, "relation": "at least"},
     ["fox Fox", "foxfox", "FOX fox fOx"], ["fox", "fo x fox", "ox ox"]),
    ("keywords:frequency", {"keyword": "fox", "frequency": 2, "relation": "less than"},
     ["fox", "none"], ["fox fox", "foxy FOX fox"]),
    ("keywords:frequency", {"keyword": "fox", "frequency": 2, "relation": "exactly"},
     ["fox fox"], ["fox", "fox fox fox"]),
    ("keywords:frequency", {"keyword": "aa", "frequency": 2, "relation": "exactly"}, ["aaaa", "aaaaa"], ["aaa"]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock", "roll"]},
     ["rocks and rollers", "ro ck", "rock_n"], ["ROCK", "a (roll)", "rock\n", "no-roll"]),
    ("keywords:forbidden_words", {"forbidden_words": ["C++", "#tag"]},
     ["C+ tag", "xC++"], ["I like C++.", "C++", "(c++)", "a #tag", "C+++"]),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 3, "let_relation": "at least"},
     ["banana", "A a A", "aaaa"], ["aa", "ä ä ä", ""]),
    ("keywords:letter_frequency", {"letter": "T", "let_frequency": 2, "let_relation": "less than"},
     ["one t", "none"], ["tT", "that"]),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"},
     ["#a #b", "###"], ["#", "a b"]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"},
     ["One. Two! Three?", "It is. So it is. Mr. Fox (a fox) came.", "Go. Go. Go", 'He said "yes." Then he left. Good.'],
     ["One. Two.", "Dr. Mr. Mrs. Fox came.", "? ! . ... ??? !!!", "1. 2. 3. 4.", "He lives in the U.S. and is well."]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"},
     ["One.", "one", "Costs 3.14 dollars, e.g. today."], ["One. Two.", "one! two"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["a\n***\nb", "a *** b", "*** a\n***\nb", "a***b***"],
     ["a", "a\n\nb", "a *** b *** c", "a\n***\n***\nb", "a ****** b", "a * * * b"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2, "divider": "* * *"}, ["a\n* * *\nb"], ["a *** b"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"},
     ["a b c", "a-b c", "it's it", "3.14 b"], ["a b", "a_b c", "- - - -", ""]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["a b", "..."], ["a b c", "a,b,c"]),
    ("length_constraints:number_words", {"num_words": 20, "relation": "around"}, ["w " * 18, "w " * 22], ["w " * 17]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at most"}, ["a b c", "a"], ["a b c d"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Fox"},
     ["a b\n\nfox c", "a\n\n  FOX, c", "a\n\n\"Fox\" c", "a\n\nfox", "a\n\n'fox? x\n\n"],
     ["fox\n\na", "a\n\nthe fox", "a\n\nfoxes", "a\n\nfox\n\nb", "fox", "a\nfox", "a\n\n\n\nfox"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["[a] [b]", "[a][b][c]", "[] []"], ["[a]", "[[a] b]]", "[a] b]", "[a\n] [b]", "(a) (b)"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."},
     ["x\nP.S. y", "p.s. y", "p. s. y", "x P.S."], ["x\nPS y", "p.s y", "P S.", "x"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"},
     ["x\nP.P.S y", "p. p. s", "p.p.s."], ["P.S. x", "P.P. x", "PPS x"]),
    ("detectable_content:postscript", {"postscript_marker": "Before I forget:"},
     ["x\nbefore i forget: y"], ["x\nBefore I forget y", "x"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* a\n* b", "- a\n* b", "a\n  - b\n\t* c", "\n\n* a\n\n* b", "-a\n-b"],
     ["* a", "* a\n* b\n* c", "** a\n** b", "a * b * c", "1. a\n2. b", "* a\n* b\n---"]),
    ("detectable_format:constrained_response", {},
     ["My answer is yes.", "Well, My answer is no. Thanks", "My answer is maybe."],
     ["My answer is yes", "my answer is no.", "yes", "My answer is yes. My answer is no.",
      "My answer is yes. My answer is no. My answer is maybe."]),
    ("detectable_format:constrained_response", {"options": ["yes", "yes, sure", "no"]},
     ["yes", "yes, sure", "a no"], ["yes or no", "No", ""]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*a* and *b*", "**a** *b*", "*a* **b c**"], ["*a*", "* a\n* b", "****", "** ** * *", "*a\nb* c"]),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["Section 1\na\nSection 2\nb", "Section1 Section2", "xSection 1. Section 7"],
     ["Section 1", "SECTION 1 SECTION 2", "Section A Section B", "Section  1 Section  2"]),
    ("detectable_format:json_format", {},
     ['{"a": 1}', ' ```json\n{"a": [1]}\n``` ', "```\n[1]\n```", "3", '"x"', "```JSON null```"],
     ["{'a': 1}", '{"a": 1', 'Here: {"a": 1}', '{"a": 1} done', "", "```json```", "[" * 101 + "]" * 101]),
    ("detectable_format:title", {},
     ["<<a>>", "x\n<<a b>> y", "<<<a>>>", "<<>> <<a>>"], ["<a>", "<<>>", "<<  >>", "<<a\nb>>", "<< a >", ">>a<<"]),
    ("combination:two_responses", {},
     ["a\n******\nb", "a ****** b ******", "******a******b"],
     ["a", "a ****** a", "a ****** b ****** c", "a ****** ****** b", "a ***** b", "******", "a ************ b"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": PROMPT},
     [PROMPT, f"  {PROMPT.upper()} Then.", f"{PROMPT}\n\nPoem"], [f"Sure. {PROMPT}", PROMPT[:-1], "poem"]),
    ("startend:end_checker", {"end_phrase": "Is it so?"},
     ["Well. Is it so?", "is it SO?  ", '"x Is it so?"', "Is it so?"], ["Is it so? Yes", "Is it so", "Is it so?."]),
    ("startend:quotation", {}, ['"a"', '  "a" b" ', '""'], ["a", '"a', '"', "'a'", "“a”", 'x "a"']),
    ("change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": "at least"},
     ["A B C", "NASA IS HERE", "(NASA), U.S., A1", "IT'S OK", "DON'T X"], ["NASA is HERE", "Nasa Is Here", "1 2 3",
     "A-B C"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"},
     ["I am", "none"], ["I AM", "A,B"]),
    ("punctuation:no_comma", {}, ["a b; c", "a، b"], ["a, b", ","]),
]  # fmt: skip
LANGUAGE_TEXTS: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("language:response_language", {"language": "de"},
     [GERMAN, GERMAN.upper()], [ENGLISH, "123", "!?", "https://example.org/die-der-das", "\x00"]),
    ("language:response_language", {"language": "hi"}, ["यह देश के उत्तर में मौसम के बारे में एक सरल वाक्य है"],
    [GERMAN, "1 2 3"]),
    ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, ENGLISH.upper() + " a", GERMAN.upper(), "123",
    ""]),
    ("change_case:english_lowercase", {}, [ENGLISH], [ENGLISH.upper(), ENGLISH + " A", GERMAN.lower(), "123"]),
]  # fmt: skip


def follows(kind: str, arguments: dict[str, Any], text: str) -> bool:
    return not broken(text, Instructions((Instruction(kind, arguments),)))


def check_texts(kind: str, arguments: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert follows(kind, arguments, text), text
    for text in bad:
        assert not follows(kind, arguments, text), text


@each_row(("kind", "arguments", "good", "bad"), TEXTS)
def test_texts_made_by_hand(kind: str, arguments: dict[str, Any], good: list[str], bad: list[str]) -> None:
    check_texts(kind, arguments, good, bad)


@needs_langdetect
@pytest.mark.parametrize(("kind", "arguments", "good", "bad"), LANGUAGE_TEXTS)
def test_languages(kind: str, arguments: dict[str, Any], good: list[str], bad: list[str]) -> None:
    check_texts(kind, arguments, good, bad)


def test_every_kind_has_a_check_and_texts() -> None:
    assert len(KINDS) == 25
    assert set(CHECKS) == set(KINDS) == {kind for kind, *_ in TEXTS + LANGUAGE_TEXTS}


def random_text(rng: random.Random) -> str:
    pieces = ["a", "Fox ", "NASA ", "*", "* ", "\n", "\n\n", "- ", "<<", ">>", "[", "]", " ", "\t", "\r", "\x0b",
    "***", "x. ",
              "p.", "s", ".", "P.S.", "\x85", '"', "Section 1", "1", "!", ",", "{", "}"]  # fmt: skip
    return "".join(rng.choice(pieces) for _ in range(rng.randint(0, 30)))


# The patterns of the original, quadratic but independent of ours: what the linear searches must agree with.
ORIGINALS = {
    "detectable_format:title": lambda text, _: any(
        quoted.lstrip("<").rstrip(">").strip() for quoted in re.findall(r"<<[^\n]+>>", text)
    ),
    "detectable_content:number_placeholders": lambda text, n: (
        len(re.findall(r"\[.*?\]", text)) >= n["num_placeholders"]
    ),
    "detectable_format:number_bullet_lists": lambda text, n: (
        len(re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE))
        == n["num_bullets"]
    ),
    "detectable_content:postscript": lambda text, _: (
        re.search(r"\s*p\.\s?s\..*$", text.lower(), re.MULTILINE) is not None
    ),
    "detectable_format:multiple_sections": lambda text, n: (
        len(re.split(r"\s?Section\s?\d+\s?", text)) - 1 >= n["num_sections"]
    ),
}


@pytest.mark.parametrize("kind", ORIGINALS)
def test_linear_searches_find_what_the_patterns_find(kind: str, rng: np.random.Generator) -> None:
    chance = random.Random(int(rng.integers(1 << 30)))
    arguments = next(dict(options) for name, options, *_ in TEXTS if name == kind)
    seen = set()
    for _ in range(3000):
        text = random_text(chance)
        for name in arguments.keys() & {"num_placeholders", "num_bullets", "num_sections"}:
            arguments[name] = chance.randint(1, 4)
        follows = CHECKS[kind](text, **arguments)
        assert follows == ORIGINALS[kind](text, arguments), (text, arguments)
        seen.add(follows)
    assert seen == {True, False}


@pytest.mark.parametrize("text", ["", " ", "\n\t\x0b", "\u2028", "\u3000"])
def test_an_empty_text_follows_nothing(text: str) -> None:
    rows = [(kind, arguments) for kind, arguments, *_ in TEXTS if kind not in LANGUAGE_KINDS]
    instructions = Instructions(tuple(Instruction(*row) for row in rows))
    assert len(broken(text, instructions)) == len(rows)
    assert len(broken(text, Instructions(instructions.instructions, loose=True))) == len(rows)


def loose_by_hand(text: str) -> list[str]:
    first, last = text.find("\n"), text.rfind("\n")
    without_first = text[first + 1 :].strip() if first >= 0 else ""
    without_last = text[:last].strip() if last >= 0 else ""
    without_both = text[first + 1 : last].strip() if 0 <= first < last else ""
    parts = [text, without_first, without_last, without_both]
    return [*parts, *(part.replace("*", "") for part in parts)]


def test_the_loose_reading_accepts_any_of_eight_texts(rng: np.random.Generator) -> None:
    chance = random.Random(int(rng.integers(1 << 30)))
    rows = [(kind, arguments) for kind, arguments, *_ in TEXTS]
    differ = 0
    for _ in range(1000):
        text = random_text(chance)
        instruction = Instruction(*chance.choice(rows))
        strict, loose = (not broken(text, Instructions((instruction,), loose)) for loose in (False, True))
        check = CHECKS[instruction.kind]
        assert loose == any(bool(part.strip()) and check(part, **instruction.arguments) for part in loose_by_hand(text))
        assert loose or not strict
        differ += loose != strict
    assert differ


def test_json_text_is_read_whole() -> None:
    nested: Any = "x"
    for _ in range(60):
        nested = {"a": [nested, "[" * 50]}
    assert not follows("detectable_format:json_format", {}, json.dumps(nested))
    assert follows("detectable_format:json_format", {}, json.dumps(["[" * 500, 'a quote " and {' * 500]))
    assert not follows("detectable_format:json_format", {}, '["]",' * 5000)  # too deep for the parser
    assert follows("detectable_format:json_format", {}, json.dumps([[[1]]] * 1000))
