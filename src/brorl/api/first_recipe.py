"""A first recipe for a data file: its settings, its text with a comment on every setting, and what is said of it.

The numbers suit a first run on a laptop; the comments name those of the paper.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from brorl.format import counted, listed
from brorl.model.settings import shipped_folder
from brorl.prompts.answer_forms import AnswerForm, asked_form
from brorl.prompts.countdown import COUNTDOWN_DOMAIN
from brorl.prompts.file_questions import SourceReading
from brorl.prompts.guess import Guess
from brorl.prompts.prompt import split_held_out
from brorl.prompts.rendering import TEMPLATES
from brorl.prompts.settings import FileSource
from brorl.verification.domains.table import DOMAINS
from brorl.verification.gym.taskset import SCORE

FUNCTION_FILE = "my_checks.py"
"""File of the user's verifier."""
_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_SIGNATURE = "def check(response: str, reference: str) -> bool"
_HELD_OUT = 64  # questions, if there are enough
_FRACTIONS = (0.2, 0.3, 0.4, 0.5)  # held-out fractions to try for small files
_COLUMN = 44  # of the comments
_WORDS = {  # in the summary
    "layout": "layout:", "prompt_column": "question: column", "options_column": "options: column",
    "answer_column": "answer: column", "first_option": "first option:", "answer_after": "answer after:",
}  # fmt: skip


@dataclass(frozen=True)
class Starter:
    """The settings of a first recipe that depend on the data."""

    model: str
    path: str
    guess: Guess
    reading: SourceReading
    function: str | None  # the user's verifier; None if the domain has a verifier
    template: str
    form: AnswerForm | None  # the form of the answer that the questions ask for; None if they ask for none
    max_new_tokens: int
    max_prompt_tokens: int | None  # None if the positions of the model are unknown
    num_held_out: int  # 0 switches evaluation off
    held_out_fraction: float

    @property
    def num_questions(self) -> int:
        """Number of distinct questions."""
        return len(self.reading.questions)


def make_starter(path: str, model: str | None, guess: Guess, reading: SourceReading, function: str) -> Starter:
    """Choose the settings; a prompt and its response share the positions of the model."""
    questions = reading.questions
    positions = _positions(model)
    domain = "" if function == SCORE else guess.domain  # a taskset has its own rewards, whatever its name
    puzzles, form = domain == COUNTDOWN_DOMAIN, asked_form([question.key for question in questions])
    response = 16 if puzzles else 512 if domain == "code" else 256
    response = response if positions is None else max(1, min(response, positions // 2))
    wanted = round(max(0.02, min(_HELD_OUT / len(questions), _FRACTIONS[0])), 2)
    sizes = ((fraction, len(split_held_out(questions, fraction, 0).held_out)) for fraction in (wanted, *_FRACTIONS))
    fraction, num_held_out = next(((s, n) for s, n in sizes if 0 < n < len(questions)), (0.0, 0))
    template = "{prompt}" if form else TEMPLATES.get(domain, "{prompt}")
    if guess.words:
        template = template.replace("your final answer", f"your final answer ({' or '.join(guess.words)})")
    return Starter(
        model=model or ("quickstart" if puzzles else _MODEL),
        path=path,
        guess=guess,
        reading=reading,
        function=None if domain in DOMAINS else function,
        template=template,
        form=form,
        max_new_tokens=response,
        max_prompt_tokens=None if positions is None else positions - response,
        num_held_out=num_held_out,
        held_out_fraction=fraction,
    )


def _columns(source: FileSource) -> dict[str, Any]:
    """Return how the rows of a source are read, in the order of a recipe."""
    if source.layout:
        return {"layout": source.layout}
    columns: dict[str, Any] = {"prompt_column": source.prompt_column}
    if source.options_column:
        columns["options_column"] = (
            [*source.options_column] if len(source.options_column) > 1 else source.options_column[0]
        )
    columns["answer_column"] = source.answer_column
    for name in ("first_option", "answer_after"):
        if (value := getattr(source, name)) is not None:
            columns[name] = value
    return columns | {"domain": source.domain}


def settings_of_data(starter: Starter) -> dict[str, Any]:
    """Return the settings of a first recipe that the data decides."""
    guess = starter.guess
    source = {"path": starter.path} | _columns(guess.source)
    functions = {} if starter.function is None else {guess.domain: starter.function}
    own = {"data.sources": [source], "data.held_out_fraction": starter.held_out_fraction}
    own |= {"prompt.template": starter.template, "evaluation.num_prompts": min(starter.num_held_out, _HELD_OUT)}
    return own | ({"verification.functions": functions} if functions else {})


def _columns_of_recipe(guess: Guess) -> str:
    """Return the lines of a recipe that say how its rows are read."""
    source = guess.source
    comments = {
        "prompt_column": "the question",
        "options_column": "the options, which are written below the question",
        "answer_column": "the right option" if source.options_column else "the reference answer",
        "first_option": "the index of the first option",
        "answer_after": "the answer follows the last occurrence of this text",
        "domain": f"the verifier: {guess.domain_reason}",
        "layout": f"decides the columns and the verifier, {guess.domain}",
    }
    return "".join(
        f"\n      {name}: {json.dumps(value, ensure_ascii=False)}  # {comments[name]}"
        for name, value in _columns(source).items()
    )


def recipe_text(starter: Starter, name: str) -> str:
    """Return the recipe as YAML with comments; `name` is its file."""
    guess, lengths, functions = starter.guess, "", ""
    split = f"{starter.num_held_out} of {starter.num_questions:,} questions are held out for evaluation"
    columns = _columns_of_recipe(guess)
    if starter.max_prompt_tokens is not None:
        lengths = f"""
  max_prompt_tokens: {starter.max_prompt_tokens}  # longer prompts are dropped: the model has no room for a response"""
    if starter.function is not None:
        write = "" if starter.function == SCORE else f"  # write {_SIGNATURE}"
        functions = f"""
verification:
  functions:
    {_quoted(guess.domain)}: {starter.function}{write}"""
        if starter.function == SCORE:
            functions += (
                "\n  timeout_s: 60  # the first verification of a worker imports the library, which takes seconds"
            )
    text = f"""\
# A first try on a laptop. Check it: brorl check {name}. Train it: brorl train {name}
# Every key is also an option of the command line (--steps 50). All keys: brorl train --help, docs/reference/recipe.md
model: {_quoted(starter.model)}  # a folder or a Hugging Face hub id
rollouts_per_prompt: 16  # N: 16 for a quick try, 512 in BroRL; compare them: brorl plan
prompts_per_step: 8  # small, for a laptop; BroRL has 128
steps: 20  # a first look; the runs of the paper take 419 to 3,000
checkpoint_every: 10  # a stopped run resumes from the last checkpoint: brorl resume
data:
  sources:
    - path: {_quoted(starter.path)}  # relative to the folder in which brorl is started{columns}
  held_out_fraction: {starter.held_out_fraction:g}  # {split}{lengths}
prompt:
  template: {_quoted(starter.template)}  # text around each question, {{prompt}}
  chat: auto  # use the model's chat template if it has one
sampling:
  temperature: 1.0  # sample from the model as it is
  max_new_tokens: {starter.max_new_tokens}  # longer responses are cut and count as incorrect
optimizer:
  learning_rate: 2.0e-6  # brorl's default, from ProRL; raise it for a very small model
  mini_batches: 2  # updates per step; each needs at least one prompt
evaluation:
  num_prompts: {min(starter.num_held_out, 32)}  # held-out questions for pass@k
  rollouts_per_prompt: 16  # responses per question
  ks: [1, 16]  # pass@1 and pass@16; a k is at most rollouts_per_prompt
  every: 10  # steps between evaluations; the start and the end are always evaluated
engine:
  threads: 0  # CPU threads; 0: by the size of the model; brorl check measures them{functions}
"""
    return "\n".join(map(_aligned, text.splitlines())) + "\n"


def _aligned(line: str) -> str:
    """Return a line with its comment in the column of all comments, or above the setting where that is long."""
    setting, _, comment = line.rpartition("  # ")
    if not setting:
        return line
    if len(setting) <= _COLUMN:
        return f"{setting:<{_COLUMN + 2}}# {comment}"
    indent = " " * (len(setting) - len(setting.lstrip()))
    return f"{indent}# {comment}\n{setting}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _positions(model: str | None) -> int | None:
    """Return the positions of a model on this machine, without importing transformers; None if they are unknown."""
    folder = shipped_folder(model or "") or Path(model or "").expanduser()
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        positions = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):  # `brorl check` has the error
        return None
    return positions if isinstance(positions, int) else None


def guesses(starter: Starter) -> list[str]:
    """Return lines that say what was guessed of the data."""
    guess, source = starter.guess, starter.guess.source
    columns = {_WORDS[name]: value for name, value in _columns(source).items() if name in _WORDS}
    lines = [
        f"  {word} {', '.join(map(str, value if isinstance(value, list) else [value]))}"
        for word, value in columns.items()
    ]
    first = f"  first answer: {guess.example[:60]!r}"
    if source.options_column:
        choices = json.loads(starter.reading.questions[0].reference)
        right = choices["options"][ascii_uppercase.index(choices["answer"])]
        first += "" if right == guess.example else f", which is {right[:60]!r}"
    lines += [] if source.layout else [first]
    lines.append(f"  verifier: {guess.domain}, {guess.domain_reason}")
    if starter.form:
        lines.append(f"  the questions ask for the answer {starter.form.name}, so prompt.template adds no other form")
    if guess.unused:
        lines.append(f"  not in the prompt: {counted(len(guess.unused), 'column')} of text, {listed(guess.unused)}")
    return lines


def summary(starter: Starter, output: Path) -> list[str]:
    """Return the guesses, the file written, and the next commands."""
    lines = [_counts(starter), *guesses(starter)]
    lines.append(f"wrote {output}: model {starter.model}, 16 rollouts x 8 prompts per step, 20 steps")
    if starter.function not in (None, SCORE):
        lines.append(f"write the verifier first: {_SIGNATURE}, in {FUNCTION_FILE}")
    return [*lines, f"check the recipe: brorl check {output}", f"train with it: brorl train {output}"]


def _counts(starter: Starter) -> str:
    """Return the number of rows and questions, and what became of the other rows."""
    reading, number = starter.reading, starter.num_questions
    if reading.num_rows == number:
        return f"{starter.path}: {counted(number, 'question')}"
    others = [f"{counted(reading.num_repeated, 'row')} repeat a question"] if reading.num_repeated else []
    others += [f"{counted(count, 'row')} dropped ({reason})" for reason, count in reading.dropped.items()]
    return f"{starter.path}: {counted(number, 'question')} in {counted(reading.num_rows, 'row')}: {listed(others)}"
