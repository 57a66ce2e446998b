"""`brorl init`: a first recipe for the user's own data file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from brorl.cli.settings import Commands
from brorl.errors import StorageError, UserError

if TYPE_CHECKING:
    from brorl.config.starter_recipe import Starter
    from brorl.prompts.guess import Guess
    from brorl.prompts.question import Question

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_HELD_OUT = 64  # questions, if there are enough
_OPTIONS = {"path": "DATA_FILE", "prompt_column": "--prompt-column", "answer_column": "--answer-column"}
_SPLITS = (0.2, 0.3, 0.4, 0.5)  # shares that are tried where there are few


def add_parser(commands: Commands, chosen: bool) -> None:  # noqa: ARG001 (no settings to add)
    """Add the command."""
    parser = commands.add_parser(
        "init",
        usage="brorl init DATA_FILE [--output FILE] [--model MODEL] [--prompt-column NAME] [--answer-column NAME] "
        "[--domain NAME]",
        help="write a first recipe for a data file, with a comment on every setting",
        allow_abbrev=False,
    )
    parser.add_argument(
        "data", metavar="DATA_FILE", help="JSONL, JSON or Parquet file, or a folder or pattern of such files"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("mine.yaml"), metavar="FILE", help="recipe to write (default: %(default)s)"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help=f"model folder or hub id (default: {_MODEL}; for countdown puzzles quickstart)"
    )
    for name, what in (("prompt", "question"), ("answer", "reference answer")):
        parser.add_argument(
            f"--{name}-column", f"--{name}_column", metavar="NAME", help=f"column of the {what} (default: guessed)"
        )
    parser.add_argument(
        "--domain", metavar="NAME", help="verifier: math, countdown, or a name for your own (default: guessed)"
    )
    parser.set_defaults(execute=init)


def init(parsed: argparse.Namespace) -> int:
    """Look at the data, write the recipe, print what was guessed, and return the exit code."""
    from brorl.config.reading import make_config, parse_yaml
    from brorl.config.starter_recipe import starter_recipe

    if parsed.output.exists():
        raise UserError(f"{parsed.output} exists already and is left as it is; choose another name with --output")
    try:
        guess, questions = _read(parsed)
    except UserError as error:  # which names settings of a recipe
        said = str(error)
        for setting, option in _OPTIONS.items():
            said = said.replace(f"data.sources[].{setting}:", option).replace(f"data.sources[].{setting}", option)
        raise UserError(said) from error
    starter = make_starter(parsed.data, parsed.model, guess, questions)
    text = starter_recipe(starter, str(parsed.output))
    make_config(parse_yaml(text, str(parsed.output)), {}, str(parsed.output))
    try:
        parsed.output.parent.mkdir(parents=True, exist_ok=True)
        with parsed.output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"could not write {parsed.output}: {error.strerror}; choose another --output") from error
    for line in _said(starter, guess, parsed.output):
        print(line)  # noqa: T201
    return 0


def _read(parsed: argparse.Namespace) -> tuple[Guess, list[Question]]:
    """Guess what the file means, and read all of it."""
    from brorl.prompts.files import FileSource, read_questions
    from brorl.prompts.guess import guess_meaning

    guess = guess_meaning(parsed.data, parsed.prompt_column, parsed.answer_column, parsed.domain)
    source = FileSource(
        parsed.data,
        Path(parsed.data).stem.replace(":", "-") or "data",
        guess.prompt_column,
        guess.answer_column,
        domain=guess.domain,
        answer_after=guess.answer_after,
    )
    return guess, read_questions(source)


def make_starter(path: str, model: str | None, guess: Guess, questions: list[Question]) -> Starter:
    """Choose the settings of the first recipe."""
    from brorl.config.starter_recipe import Starter
    from brorl.prompts.benchmarks import BOXED_TEMPLATE
    from brorl.prompts.countdown import COUNTDOWN_DOMAIN
    from brorl.prompts.question import split_held_out
    from brorl.verify.domains.table import DOMAINS

    puzzles, is_math = guess.domain == COUNTDOWN_DOMAIN, guess.domain == "math"
    asks_for_box = all("boxed" in question.asked for question in questions)
    wanted = round(max(0.02, min(_HELD_OUT / len(questions), _SPLITS[0])), 2)
    split = ((share, len(split_held_out(questions, share, 0).held_out)) for share in (wanted, *_SPLITS))
    share, held_out = next(((s, n) for s, n in split if 0 < n < len(questions)), (0.0, 0))
    return Starter(
        model=model or ("quickstart" if puzzles else _MODEL),
        path=path,
        prompt_column=guess.prompt_column,
        answer_column=guess.answer_column,
        answer_after=guess.answer_after,
        domain=guess.domain,
        domain_reason=guess.domain_reason,
        own_verifier=guess.domain not in DOMAINS,
        template=BOXED_TEMPLATE if is_math and not asks_for_box else "{prompt}",
        max_new_tokens=16 if puzzles else 256,
        num_questions=len(questions),
        num_held_out=held_out,
        held_out_share=share,
    )


def _said(starter: Starter, guess: Guess, output: Path) -> list[str]:
    """Return what was guessed and written, and what to do next."""
    from brorl.config.starter_recipe import FUNCTION_FILE

    after = f", what follows the last {guess.answer_after}" if guess.answer_after else ""
    lines = [
        f"{starter.path}: {starter.num_questions:,} questions",
        f"  question: column {guess.prompt_column}",
        f"  answer: column {guess.answer_column}{after}; the first is {guess.example[:60]!r}",
        f"  verifier: {guess.domain}, {guess.domain_reason}",
        f"wrote {output}: model {starter.model}, 16 rollouts x 8 prompts a step, 20 steps",
    ]
    if starter.own_verifier:
        file = FUNCTION_FILE.partition(":")[0]
        lines.append(f"write the verifier first: def check(response: str, reference: str) -> bool, in {file}")
    return [*lines, f"look at what it will do: brorl check {output}", f"then: brorl train {output}"]
