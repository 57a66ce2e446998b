"""Make the data of the mixed example: tiny tasks of four domains, one JSONL file each.

    python examples/mixed/make_data.py

This writes four files next to this one: `math.jsonl` and `code.jsonl` with the columns `prompt` and `answer`,
`science.jsonl` as in GPQA, and `ifeval.jsonl` as in google/IFEval. Each has 300 rows that ask different things. The
same seed gives the same bytes.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from brorl.prompts.code_tests import CallCases, CodeTests

FOLDER = Path(__file__).parent
Row = dict[str, Any]

ELEMENTS = {
    "hydrogen": "H", "helium": "He", "carbon": "C", "oxygen": "O", "sodium": "Na", "iron": "Fe", "copper": "Cu",
    "silver": "Ag", "tin": "Sn", "gold": "Au", "mercury": "Hg", "lead": "Pb",
}  # fmt: skip
UNITS = {
    "force": "newton", "energy": "joule", "power": "watt", "pressure": "pascal", "charge": "coulomb",
    "frequency": "hertz", "mass": "gram", "time": "second",
}  # fmt: skip
KINDS = {
    "a mammal": ("dog", "horse", "whale", "bat"),
    "a bird": ("owl", "duck", "eagle", "hen"),
    "a fish": ("trout", "shark", "eel", "cod"),
    "an insect": ("bee", "ant", "moth", "fly"),
    "a planet": ("Mars", "Venus", "Saturn", "Earth"),
    "a tree": ("oak", "pine", "elm", "birch"),
}

TOPICS = ("cat", "dog", "fox", "bird", "ship", "king", "tree", "town", "river", "robot")
ADJECTIVES = ("big", "old", "red", "shy", "wild", "calm")
VERBS = ("sees", "likes", "finds", "hears", "draws")
ENDINGS = ("The end.", "That is all.", "Good night!", "So it was.")


def math_row(rng: Random) -> Row:
    """Draw a two-digit arithmetic task, in one of four wordings for each operation."""
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    wordings, answer = rng.choice(
        (
            ((f"What is {a} + {b}?", f"Add {a} and {b}.", f"Find the sum of {a} and {b}.", f"{a} plus {b} is?"), a + b),
            ((f"What is {a + b} - {b}?", f"Start at {a + b} and go down {b}.", f"{a + b} minus {b} is?",
              f"{a + b} less {b} is?"), a),
            ((f"What is {a} * {b}?", f"Multiply {a} by {b}.", f"{a} times {b} is?",
              f"Find the product of {a} and {b}."), a * b),
        )
    )  # fmt: skip
    return {"prompt": rng.choice(wordings), "answer": str(answer)}


def code_row(rng: Random) -> Row:
    """Draw a one-line function, with its values on five inputs."""
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    text, parameters, body = rng.choice(
        (
            (f"{a} times x plus {b}", "x", f"{a}*x+{b}"),
            (f"{a} times x minus {b}", "x", f"{a}*x-{b}"),
            (f"{b} minus {a} times x", "x", f"{b}-{a}*x"),
            (f"x squared plus {a}", "x", f"x*x+{a}"),
            (f"the sum of x and {a}, times {b}", "x", f"(x+{a})*{b}"),
            (f"the remainder of x plus {a} by {b}", "x", f"(x+{a})%{b}"),
            (f"the larger of x and {a}, plus {b}", "x", f"max(x,{a})+{b}"),
            (f"x times y plus {a}", "x, y", f"x*y+{a}"),
            (f"{a} times x plus {b} times y", "x, y", f"{a}*x+{b}*y"),
            (f"the length of s plus {a}", "s", f"len(s)+{a}"),
        )
    )
    inputs = [_arguments(parameters, start, rng) for start in range(-20, 30, 10)]
    outputs = [_value(body, parameters, values) for values in inputs]
    while len({*outputs}) == 1:  # else a constant would pass
        inputs[-1] = [value + 1 for value in inputs[-1]]
        outputs[-1] = _value(body, parameters, inputs[-1])
    cases = CallCases("f", tuple(map(tuple, inputs)), tuple(outputs))
    tests = CodeTests(cases, solution=f"def f({parameters}):\n    return {body}")
    return {"prompt": f"Write f({parameters}): {text}.", "answer": tests.to_text()}


def _value(body: str, parameters: str, values: list[Any]) -> Any:
    return eval(body, {}, dict(zip(parameters.split(", "), values, strict=True)))


def _arguments(parameters: str, start: int, rng: Random) -> list[Any]:
    """Return arguments near a number, so that the cases of a row are spread out."""
    near = [start + rng.randint(0, 9) for _ in parameters.split(", ")]
    return ["abcdefghij"[: near[0] % 11]] if parameters == "s" else near


def science_row(rng: Random) -> Row:
    """Draw a question about a table of facts, with one right and three wrong options."""
    kind = rng.choice(("symbol", "element", "unit", "quantity", "member"))
    if kind == "member":
        group = rng.choice(list(KINDS))
        right = rng.choice(KINDS[group])
        others = [name for other, names in KINDS.items() if other != group for name in names]
        text = f"Which is {group}?"
    else:
        table = ELEMENTS if kind in ("symbol", "element") else UNITS
        key = rng.choice(list(table))
        text = {
            "symbol": f"What is the symbol of {key}?",
            "element": f"Which element is {table[key]}?",
            "unit": f"What is the unit of {key}?",
            "quantity": f"What has the unit {table[key]}?",
        }[kind]
        is_key = kind in ("element", "quantity")
        right = key if is_key else table[key]
        others = [name for name in (table.keys() if is_key else table.values()) if name != right]
    wrong = rng.sample(others, 3)
    return {"Question": text, "Correct Answer": right, **{f"Incorrect Answer {i + 1}": wrong[i] for i in range(3)}}


def ifeval_row(rng: Random) -> Row:
    """Draw a request for a sentence or two, with one or two instructions on their form."""
    chosen = rng.sample(INSTRUCTIONS, rng.choice((1, 2)))
    while set(chosen) in CONFLICTS:
        chosen = rng.sample(INSTRUCTIONS, 2)
    texts, names, kwargs = zip(*(draw(rng) for draw in chosen), strict=True)
    prompt = " ".join((f"Write about a {rng.choice(TOPICS)}.", *texts))
    return {"prompt": prompt, "instruction_id_list": list(names), "kwargs": list(kwargs)}


Instruction = tuple[str, str, Row]


def no_comma(_rng: Random) -> Instruction:
    """Forbid commas."""
    return "Do not use commas.", "punctuation:no_comma", {}


def quotation(_rng: Random) -> Instruction:
    """Ask for double quotes around the text."""
    return "Put the text in double quotes.", "startend:quotation", {}


def title(_rng: Random) -> Instruction:
    """Ask for a title in double angular brackets."""
    return "Start with a title, as in <<title>>.", "detectable_format:title", {}


def sentences(rng: Random) -> Instruction:
    """Ask for a number of sentences or more."""
    number = rng.choice((2, 3))
    kwargs = {"relation": "at least", "num_sentences": number}
    return f"Use at least {number} sentences.", "length_constraints:number_sentences", kwargs


def ending(rng: Random) -> Instruction:
    """Ask for the last words."""
    words = rng.choice(ENDINGS)
    return f"End with: {words}", "startend:end_checker", {"end_phrase": words}


def keyword(rng: Random) -> Instruction:
    """Ask for a word."""
    word = rng.choice((*ADJECTIVES, *VERBS))
    return f"Use the word {word}.", "keywords:existence", {"keywords": [word]}


def forbidden(rng: Random) -> Instruction:
    """Forbid a word."""
    word = rng.choice(("and", "us", "my"))
    return f"Avoid the word {word}.", "keywords:forbidden_words", {"forbidden_words": [word]}


def at_least(rng: Random) -> Instruction:
    """Ask for a number of words or more."""
    number = rng.randint(6, 12)
    kwargs = {"relation": "at least", "num_words": number}
    return f"Use at least {number} words.", "length_constraints:number_words", kwargs


def fewer(rng: Random) -> Instruction:
    """Ask for fewer words."""
    number = rng.randint(6, 9)
    kwargs = {"relation": "less than", "num_words": number}
    return f"Use less than {number} words.", "length_constraints:number_words", kwargs


INSTRUCTIONS: tuple[Callable[[Random], Instruction], ...] = (
    no_comma, quotation, title, ending, keyword, forbidden, at_least, fewer, sentences,
)  # fmt: skip
CONFLICTS: tuple[set[Callable[[Random], Instruction]], ...] = (
    {quotation, title}, {quotation, ending}, {fewer, ending}, {fewer, title}, {fewer, sentences},
    {fewer, at_least},
)  # fmt: skip

ROWS: dict[str, tuple[str, Callable[[Random], Row]]] = {
    "math": ("prompt", math_row),
    "code": ("prompt", code_row),
    "science": ("Question", science_row),
    "ifeval": ("prompt", ifeval_row),
}
"""Column of the text and the function that draws a row, by domain."""


def draw_rows(domain: str, seed: int) -> Iterator[Row]:
    """Yield rows endlessly."""
    rng = Random(f"{domain} {seed}")
    while True:
        yield ROWS[domain][1](rng)


def same_words(domain: str, row: Row) -> str:
    """Return what two rows that ask the same thing share: the text, and the options in any order."""
    options = sorted(value for column, value in row.items() if "Answer" in column)
    return "\n".join((row[ROWS[domain][0]], *options))


def file_rows(domain: str, number: int, seed: int) -> list[Row]:
    """Return `number` rows that ask different things."""
    seen: dict[str, Row] = {}
    for row in draw_rows(domain, seed):
        seen.setdefault(same_words(domain, row), row)
        if len(seen) == number:
            break
    return list(seen.values())


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    for domain in ROWS:
        lines = [f"{json.dumps(row)}\n" for row in file_rows(domain, options.number, options.seed)]
        (options.out / f"{domain}.jsonl").write_text("".join(lines), "utf-8", newline="\n")
    print(f"wrote {options.number} rows for each of {', '.join(ROWS)} to {options.out}")


if __name__ == "__main__":
    main()
