"""`brorl init`: a first recipe for the user's own data file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from brorl.cli.settings import Commands
from brorl.errors import StorageError, UserError

if TYPE_CHECKING:
    from brorl.cli.starter_recipe import Starter
    from brorl.prompts.guess import Guess
    from brorl.prompts.question import Question

_OPTIONS = {"path": "DATA_FILE", "prompt_column": "--prompt-column", "answer_column": "--answer-column"}


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
        "--model", metavar="MODEL",
        help="model folder or hub id (default: a small Qwen model; quickstart for countdown puzzles)",
    )  # fmt: skip
    for name, what in (("prompt", "question"), ("answer", "reference answer")):
        parser.add_argument(
            f"--{name}-column", f"--{name}_column", metavar="NAME", help=f"column of the {what} (default: guessed)"
        )
    parser.add_argument(
        "--domain", metavar="NAME", help="verifier: math, countdown, or a name for your own (default: guessed)"
    )
    parser.set_defaults(execute=init)


def init(parsed: argparse.Namespace) -> int:
    """Read the data, write the recipe, print the guesses, and return the exit code."""
    from brorl.cli.starter_recipe import make_starter, starter_recipe
    from brorl.config.reading import make_config, parse_yaml

    output: Path = parsed.output
    if output.exists():
        raise UserError(f"{output} exists already and is left as it is; choose another name with --output")
    try:
        guess, questions = _read(parsed)
    except UserError as error:  # it names settings of a recipe
        message = str(error)
        for setting, option in _OPTIONS.items():
            message = message.replace(f"data.sources[].{setting}:", option).replace(f"data.sources[].{setting}", option)
        raise UserError(message) from error
    starter = make_starter(parsed.data, parsed.model, guess, questions, _positions(parsed.model))
    text = starter_recipe(starter, str(output))
    make_config(parse_yaml(text, str(output)), {}, str(output))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"could not write {output}: {error.strerror}; choose another --output") from error
    print("\n".join(_summary(starter, output)))  # noqa: T201
    return 0


def _read(parsed: argparse.Namespace) -> tuple[Guess, list[Question]]:
    """Guess the columns and the verifier, and read all questions."""
    from brorl.prompts.files import read_questions
    from brorl.prompts.guess import guess_meaning
    from brorl.prompts.settings import FileSource

    guess = guess_meaning(parsed.data, parsed.prompt_column, parsed.answer_column, parsed.domain)
    name = Path(parsed.data).stem.replace(":", "-") or "data"
    if guess.layout:
        return guess, read_questions(FileSource(path=parsed.data, name=name, layout=guess.layout))
    source = FileSource(
        path=parsed.data,
        name=name,
        prompt_column=guess.prompt_column,
        answer_column=guess.answer_column,
        domain=guess.domain,
        answer_after=guess.answer_after,
    )
    return guess, read_questions(source)


def _positions(model: str | None) -> int | None:
    """Return the positions of a model on this machine, without importing transformers; None if they are unknown."""
    from brorl.model.name import shipped_folder

    folder = shipped_folder(model or "") or Path(model or "").expanduser()
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        positions = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):  # `brorl check` has the error
        return None
    return positions if isinstance(positions, int) else None


def _summary(starter: Starter, output: Path) -> list[str]:
    """Return the guesses, the file written, and the next commands."""
    from brorl.cli.starter_recipe import FUNCTION_FILE

    guess = starter.guess
    after = f", after the last {guess.answer_after}" if guess.answer_after else ""
    columns = [
        f"  question: column {guess.prompt_column}",
        f"  answer: column {guess.answer_column}{after}; the first is {guess.example[:60]!r}",
    ]
    lines = [
        f"{starter.path}: {starter.num_questions:,} questions",
        *([f"  layout: {guess.layout}"] if guess.layout else columns),
        f"  verifier: {guess.domain}, {guess.domain_reason}",
        f"wrote {output}: model {starter.model}, 16 rollouts x 8 prompts per step, 20 steps",
    ]
    if starter.needs_verifier:
        lines.append(f"write the verifier first: def check(response: str, reference: str) -> bool, in {FUNCTION_FILE}")
    return [*lines, f"check the recipe: brorl check {output}", f"train with it: brorl train {output}"]
