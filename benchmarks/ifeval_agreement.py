"""Compare the checks of instructions with an independent implementation of IFEval, on random texts.

The other implementation is the one in the package lm-eval, a copy of the original. It needs NLTK with its model of
sentences, and langdetect:

    python -m venv /tmp/ifeval && /tmp/ifeval/bin/pip install nltk langdetect immutabledict packaging
    /tmp/ifeval/bin/pip install --no-deps lm-eval
    /tmp/ifeval/bin/python -c "import nltk; nltk.download('punkt_tab')"
    PYTHONPATH=src /tmp/ifeval/bin/python benchmarks/ifeval_agreement.py --pairs 3000

It prints one line per kind: the pairs of a text and an instruction, the fraction that follows, the fraction on which
both agree, and up to two texts on which they differ.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import random
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brorl.prompts.instructions import Instruction, Instructions
from brorl.verification.domains.ifeval import CHECKS

TEXT = (
    "the a quick brown fox NASA jumps over lazy dogs. However, it is true! Is it? Yes... no; I think (maybe) that U.S. "
    "trade in Jan. e.g. tea costs $5.50 (five) - or more: A/B, \"quoted text\" isn't DON'T WE'LL 3.14 x2 café naïve İ"
)
WORDS = TEXT.split(" ")
PIECES = (
    "\n", "\n\n", "\n\n\n", "***", "******", "* * *", "* ", "\n* ", "\n- ", "\n  * ", "- ", "*", "**", "*bold*",
    "**bold**", "* *", "** **", "[name]", "[", "]", "[a\nb]", "<<title>>", "<<", ">>", "<< >>", "<<<a>>>", "P.S.",
    "p. s.",
    "P.P.S", "p. p. s", "PS", "Section 1", "SECTION 2", "Section 3\n", "section4", "PARAGRAPH 1", '"', '{"a": 1}',
    "```json\n",
    "```", "[1, 2]", "null", "My answer is yes.", "My answer is no.", "My answer is maybe.", ",", "\t", "  ", "\r\n",
    "\x0b", "\u2028",
)  # fmt: skip
LANGUAGES = {
    "en": "this is a plain sentence about the weather in the north of the country",
    "de": "das ist ein ganz einfacher Satz über das Wetter im Norden des Landes",
    "fr": "ceci est une phrase simple sur le temps qu'il fait dans le nord du pays",
    "es": "esta es una frase sencilla sobre el tiempo en el norte del país",
    "hi": "यह देश के उत्तर में मौसम के बारे में एक सरल वाक्य है",
    "ru": "это простое предложение про погоду на севере страны",
}
RELATIONS = ("less than", "at least")
Arguments = Mapping[str, Any]
_SENTENCE = "this is a short answer to the question that was asked here"


def text_of(rng: random.Random, most: int = 40) -> str:
    """Return words and pieces of markup in random order."""
    parts = [rng.choice(PIECES if rng.random() < 0.3 else WORDS) for _ in range(rng.randint(0, most))]
    return "".join(part + rng.choice(("", " ", " ", " ")) for part in parts)


def arguments_of(kind: str, rng: random.Random) -> dict[str, Any]:
    """Return random arguments of a kind, near what random texts have."""
    few, relation = rng.randint(1, 5), rng.choice(RELATIONS)
    match kind.partition(":")[2]:
        case "existence":
            return {"keywords": rng.sample(["fox", "the", "NASA", "café", "jump", "zebra"], rng.randint(1, 2))}
        case "frequency":
            return {"keyword": rng.choice(["fox", "the", "is", "o"]), "frequency": few, "relation": relation}
        case "forbidden_words":
            return {"forbidden_words": rng.sample(["fox", "the", "NASA", "jump", "zebra"], rng.randint(1, 2))}
        case "letter_frequency":
            return {"letter": rng.choice("aeoxZ"), "let_frequency": rng.randint(1, 12), "let_relation": relation}
        case "response_language":
            return {"language": rng.choice(list(LANGUAGES))}
        case "number_sentences":
            return {"num_sentences": few, "relation": relation}
        case "number_paragraphs":
            return {"num_paragraphs": rng.randint(1, 3)}
        case "number_words":
            return {"num_words": rng.randint(1, 50), "relation": relation}
        case "nth_paragraph_first_word":
            total = rng.randint(1, 3)
            word = rng.choice(["the", "a", "However", "Is"])
            return {"num_paragraphs": total, "nth_paragraph": rng.randint(1, total), "first_word": word}
        case "postscript":
            return {"postscript_marker": rng.choice(["P.S.", "P.P.S", "PS"])}
        case "multiple_sections":
            return {
                "section_spliter": rng.choice(["Section", "SECTION", "PARAGRAPH"]),
                "num_sections": rng.randint(1, 3),
            }
        case "capital_word_frequency":
            return {"capital_frequency": few, "capital_relation": relation}
        case "repeat_prompt":
            return {"prompt_to_repeat": text_of(rng, 3).strip() or "the"}
        case "end_checker":
            return {"end_phrase": rng.choice(["dogs.", "true!", "Is it?", "maybe"])}
        case "number_placeholders" | "number_bullet_lists" | "number_highlighted_sections" as name:
            key = {"number_placeholders": "num_placeholders", "number_bullet_lists": "num_bullets"}
            return {key.get(name, "num_highlights"): rng.randint(1, 3)}
        case _:
            return {}


def response_to(instruction: Instruction, rng: random.Random) -> str:
    """Return a random text, or one that is near to following the instruction."""
    if instruction.kind in (
        "language:response_language",
        "change_case:english_capital",
        "change_case:english_lowercase",
    ):
        text = " ".join(LANGUAGES[rng.choice(list(LANGUAGES))] for _ in range(rng.randint(1, 3)))
        return rng.choice((str.upper, str.lower, str))(text)
    draw = rng.random()
    if draw < 0.4:
        return text_of(rng)
    near = compliant_response(Instructions((instruction,)))
    if draw < 0.7:
        return near
    place = rng.randint(0, len(near))
    return near[:place] + text_of(rng, 3) + near[place + rng.randint(0, 3) :]


def compliant_response(instructions: Instructions) -> str:
    """Return a text that is meant to follow all instructions."""
    of: dict[str, list[Arguments]] = {}
    for instruction in instructions.instructions:
        of.setdefault(instruction.kind.rpartition(":")[2], []).append(instruction.arguments)
    if "json_format" in of:
        return json.dumps({"answer": " ".join(_keywords(of))})
    text = _arranged(_sentences(of), _lines(of), of)
    if "english_lowercase" in of:
        text = text.lower()
    if "english_capital" in of:
        text = text.upper()
    return f'"{text}"' if "quotation" in of else text


def _at_least(of: Mapping[str, Sequence[Arguments]], kind: str, bound: str, relation: str = "relation") -> int:
    """Return the least number that all instructions of a kind allow."""
    bounded = (arguments for arguments in of.get(kind, ()) if arguments.get(relation) not in ("less than", "at most"))
    return max((arguments[bound] for arguments in bounded), default=0)


def _keywords(of: Mapping[str, Sequence[Arguments]]) -> list[str]:
    words = [keyword for arguments in of.get("existence", ()) for keyword in arguments["keywords"]]
    for arguments in of.get("frequency", ()):
        words += [arguments["keyword"]] * _at_least({"frequency": [arguments]}, "frequency", "frequency")
    for arguments in of.get("letter_frequency", ()):
        words += [arguments["letter"]] * _at_least(
            {"letter_frequency": [arguments]}, "letter_frequency", "let_frequency", "let_relation"
        )
    words += ["WORD"] * _at_least(of, "capital_word_frequency", "capital_frequency", "capital_relation")
    return words


def _sentences(of: Mapping[str, Sequence[Arguments]]) -> str:
    """Return the running text, with the wanted words and sentences."""
    words = [*_keywords(of), *("[name]" for _ in range(_at_least(of, "number_placeholders", "num_placeholders")))]
    wanted = max(_at_least(of, "number_sentences", "num_sentences"), 1)
    text = ". ".join([" ".join([_SENTENCE, *words]), *[_SENTENCE] * (wanted - 1)]) + "."
    for arguments in of.get("constrained_response", ()):
        text = arguments.get("options", ("My answer is yes.",))[0]
    missing = _at_least(of, "number_words", "num_words") - len(text.split())
    padding = f" {_SENTENCE}" * -(-missing // len(_SENTENCE.split()))
    return f"{text[:-1]}{padding}."


def _lines(of: Mapping[str, Sequence[Arguments]]) -> list[str]:
    """Return the lines around the running text."""
    lines = ["<<title>>"] if "title" in of else []
    for arguments in of.get("multiple_sections", ()):
        lines += [f"{arguments['section_spliter']} {number + 1}" for number in range(arguments["num_sections"])]
    lines += ["* a point"] * _at_least(of, "number_bullet_lists", "num_bullets")
    highlights = _at_least(of, "number_highlighted_sections", "num_highlights")
    return lines + ([" ".join(["so *a part*"] * highlights)] if highlights else [])


def _arranged(text: str, lines: Sequence[str], of: Mapping[str, Sequence[Arguments]]) -> str:
    """Join the running text and the lines, divided and ended as wanted."""
    text = "\n".join([*lines, text])
    for arguments in of.get("number_paragraphs", ()):
        text = f"\n{arguments.get('divider', '***')}\n".join([text, *["More."] * (arguments["num_paragraphs"] - 1)])
    for arguments in of.get("nth_paragraph_first_word", ()):
        paragraphs = [text, *["More."] * (arguments["num_paragraphs"] - 1)]
        paragraphs[arguments["nth_paragraph"] - 1] = (
            f"{arguments['first_word']} {paragraphs[arguments['nth_paragraph'] - 1]}"
        )
        text = "\n\n".join(paragraphs)
    if "two_responses" in of:
        text = f"{text}\n******\nAnother one."
    ends = [arguments["postscript_marker"] + " More." for arguments in of.get("postscript", ())]
    starts = [arguments["prompt_to_repeat"] for arguments in of.get("repeat_prompt", ())]
    return "\n".join([*starts, text, *ends, *(arguments["end_phrase"] for arguments in of.get("end_checker", ()))])


def other_checks() -> Mapping[str, Any]:
    """Return the classes of lm-eval by kind, without importing the package itself and its dependencies."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("lm-eval is not installed; see the first lines of this file")
    root = spec.submodule_search_locations[0]
    for name, path in (
        ("lm_eval", root),
        ("lm_eval.tasks", f"{root}/tasks"),
        ("lm_eval.tasks.ifeval", f"{root}/tasks/ifeval"),
    ):
        package = types.ModuleType(name)
        package.__path__ = [path]
        sys.modules[name] = package
    checks: Mapping[str, Any] = importlib.import_module("lm_eval.tasks.ifeval.instructions_registry").INSTRUCTION_DICT
    return checks


def other_verdict(make: Callable[[str], Any], instruction: Instruction, text: str) -> bool | str:
    """Return whether the other implementation accepts a text, or the exception that it raises."""
    checker = make(instruction.kind)
    checker.build_description(**{n: list(v) if isinstance(v, tuple) else v for n, v in instruction.arguments.items()})
    try:
        return bool(text.strip()) and bool(checker.check_following(text))
    except Exception as error:
        return type(error).__name__


def main() -> None:
    """Print the agreement for each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=3000, help="texts per kind (default 3000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts (default 0)")
    chosen = parser.parse_args()
    others = other_checks()
    print(f"{'kind':44} {'pairs':>6} {'follow':>7} {'agree':>8}")
    for kind in CHECKS:
        rng = random.Random(f"{chosen.seed} {kind}")
        follow, differ = 0, []
        for _ in range(chosen.pairs):
            instruction = Instruction(kind, arguments_of(kind, rng))
            text = response_to(instruction, rng)
            ours = bool(text.strip()) and CHECKS[kind](text, **instruction.arguments)
            theirs = other_verdict(others[kind], instruction, text)
            follow += ours
            if ours != theirs:
                differ.append((len(text), text, ours, theirs, instruction.arguments))
        agree = 1 - len(differ) / chosen.pairs
        print(f"{kind:44} {chosen.pairs:6} {follow / chosen.pairs:7.1%} {agree:8.2%}")
        for _, text, ours, theirs, arguments in sorted(differ, key=lambda one: one[0])[:2]:
            print(f"    ours {ours}, theirs {theirs}, {json.dumps(arguments, ensure_ascii=False)}: {text[:200]!r}")


if __name__ == "__main__":
    main()
