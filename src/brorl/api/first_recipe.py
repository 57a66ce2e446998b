"""A first recipe for a data file, with a comment on every setting and lines about what was guessed.

The values suit a first run on a laptop; the comments give the paper's values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from brorl.format import counted, listed, shell_command
from brorl.model.settings import shipped_folder
from brorl.prompts.answer_forms import AnswerForm, asked_form
from brorl.prompts.guess import Guess
from brorl.prompts.question import CODE_DOMAIN, COUNTDOWN_DOMAIN, Question
from brorl.prompts.rendering import TEMPLATES
from brorl.prompts.source_questions import SourceQuestions, split_held_out
from brorl.verification.domains.verifiers import DOMAINS

_FUNCTION_FILE = "my_checks.py"  # file for the user's verifier
_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_SIGNATURE = "def check(response: str, reference: str) -> bool"
_HELD_OUT, _EVALUATED = 64, 32  # questions to hold out and to evaluate on, if there are enough
_FRACTIONS = (0.2, 0.3, 0.4, 0.5)  # held-out fractions to try for small files
_COLUMN = 46  # column in which comments start
_SOURCE = "data.sources[]."

Line = tuple[str, Any, str]  # dotted name of a setting, its value, and a comment


@dataclass(frozen=True)
class FirstRecipe:
    """A first recipe for a data file."""

    lines: tuple[Line, ...]  # the settings, in the order of the file
    guess: Guess
    reading: SourceQuestions
    form: AnswerForm | None  # answer form requested by the questions, such as `\boxed{...}`; None if they request none

    @property
    def source(self) -> dict[str, Any]:
        """The source's settings."""
        return {name.removeprefix(_SOURCE): value for name, value, _ in self.lines if name.startswith(_SOURCE)}

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, by dotted name."""
        settings = {name: value for name, value, _ in self.lines if not name.startswith(_SOURCE)}
        return {**settings, "data.sources": [self.source]}

    def text(self, name: str) -> str:
        """Return the recipe as YAML; `name` is its file.

        Comments are aligned in one column. If a setting is too long, its comment goes above it.
        """
        lines = [
            f"# A first try on a laptop. Check it: brorl check {name}. Train it: brorl train {name}",
            "# Every key is also an option of the command line (--steps 50). All keys: brorl train --help, "
            "docs/reference/recipe.md",
        ]
        before: list[str] = []  # sections of the previous line; the list of sources has one item
        for dotted, value, comment in self.lines:
            *sections, key = dotted.split(".")
            for depth, section in enumerate(sections):
                if sections[: depth + 1] != before[: depth + 1]:
                    lines.append(f"{'  ' * depth}{section.removesuffix('[]')}:")
            indent = "  " * len(sections)
            if dotted.startswith(_SOURCE):
                indent += "  " if sections == before else "- "
            setting = f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}"
            before = sections
            if len(setting) > _COLUMN - 2:
                lines += [f"{indent.replace('-', ' ')}# {comment}", setting]
            else:
                lines.append(f"{setting:<{_COLUMN}}# {comment}")
        return "\n".join(lines) + "\n"

    def guesses(self) -> list[str]:
        """Return lines about what was guessed."""
        guess = self.guess
        source = self.source
        columns = {key: value for key, value in source.items() if key not in ("path", "domain")}
        lines = [
            f"  {key}: {', '.join(map(str, value if isinstance(value, list) else [value]))}"
            for key, value in columns.items()
        ]
        first = f"  first answer: {guess.example[:60]!r}"
        if "options_column" in source:
            choices = json.loads(self.reading.questions[0].reference)
            right = choices["options"][ascii_uppercase.index(choices["answer"])]
            first += "" if right == guess.example else f", which is {right[:60]!r}"
        lines += [] if "layout" in source else [first]
        lines.append(f"  domain: {guess.domain}, {guess.domain_reason}")
        if self.reading.commas:
            lines.append(f"  {self.reading.commas}")
        if self.form:
            lines.append(f"  the questions ask for the answer {self.form.name}, so prompt.template adds no other form")
        if guess.long_unused:
            lines.append(
                f"  warning: not in the prompt, although longer than the question: {listed(guess.long_unused)}; if a "
                "question is about it, name it in the recipe with context_column"
            )
        if guess.unused:
            lines.append(f"  not in the prompt: {counted(len(guess.unused), 'column')} of text, {listed(guess.unused)}")
        return lines

    def summary(self, output: Path) -> list[str]:
        """Return lines with the number of questions, the guesses, the file written, and the next commands."""
        settings = self.settings
        reading = self.reading
        repeated = reading.num_repeated
        verb = "repeats" if repeated == 1 else "repeat"
        left_out = [f"{counted(repeated, 'row')} {verb} a question"] if repeated else []
        left_out += [f"{counted(count, 'row')} dropped ({reason})" for reason, count in reading.dropped.items()]
        rows = f" in {counted(reading.num_rows, 'row')}: {listed(left_out)}" if left_out else ""
        lines = [f"{self.source['path']}: {counted(len(reading.questions), 'question')}{rows}", *self.guesses()]
        lines.append(
            f"wrote {output}: model {settings['model']}, {settings['rollouts_per_prompt']} rollouts x "
            f"{settings['prompts_per_step']} prompts per step, {settings['steps']} steps"
        )
        if "verification.functions" in settings:
            lines.append(f"write the verifier first: {_SIGNATURE}, in {_FUNCTION_FILE}")
        return [
            *lines,
            f"check the recipe: {shell_command('check', output)}",
            f"train with it: {shell_command('train', output)}",
        ]


def make_first_recipe(
    path: str, model: str | None, guess: Guess, reading: SourceQuestions, tools: Mapping[str, str]
) -> FirstRecipe:
    """Make a first recipe whose prompts and responses fit in the model's positions.

    `tools` maps tool names to the user's functions.
    """
    questions = reading.questions
    domain = guess.domain
    # the shipped model can neither read sentences nor call tools
    puzzles = domain == COUNTDOWN_DOMAIN and not guess.source.layout and not tools
    response = 16 if puzzles else 512 if domain == CODE_DOMAIN else 256
    prompt = None
    if (positions := _positions(model)) is not None:
        response = max(1, min(response, positions // (4 if tools else 2)))
        prompt = positions - (positions // 2 if tools else response)
    fraction, num_held_out = _held_out(questions)
    held_out = f"{num_held_out} of {len(questions):,} questions are held out for evaluation"
    form = asked_form([question.key for question in questions])
    lines: list[Line] = [
        ("model", model or ("quickstart" if puzzles else _MODEL), "a folder or a Hugging Face hub id"),
        ("rollouts_per_prompt", 16, "N: 16 for a quick try, 512 in BroRL; compare them: brorl plan"),
        ("prompts_per_step", 8, "small, for a laptop; BroRL uses 128"),
        ("steps", 20, "a first look; the paper's runs take 419 to 3,000"),
        ("checkpoint_every", 10, "a stopped run resumes from the last checkpoint: brorl resume RUN"),
        (f"{_SOURCE}path", path, "relative to the folder in which brorl is started"),
        *((f"{_SOURCE}{name}", value, comment) for name, value, comment in _columns(guess)),
        ("data.held_out_fraction", fraction, held_out),
        ("data.max_prompt_tokens", prompt, "longer prompts are dropped: they leave no room for a response"),
        ("prompt.template", _template(guess, form), "text around each question, {prompt}"),
        ("prompt.chat", "auto", "use the model's chat template if it has one"),
        ("sampling.temperature", 1.0, "sample from the model's own distribution"),
        ("sampling.max_new_tokens", response, "longer responses are truncated and graded incorrect"),
        ("optimizer.learning_rate", 2e-6, "brorl's default, from ProRL; raise it for a very small model"),
        ("optimizer.mini_batches", 2, "updates per step; each needs at least one prompt"),
        ("evaluation.num_prompts", min(num_held_out, _EVALUATED), "held-out questions for pass@k"),
        ("evaluation.rollouts_per_prompt", 16, "responses per question"),
        ("evaluation.ks", [1, 16], "pass@1 and pass@16; a k is at most rollouts_per_prompt"),
        ("evaluation.every", 10, "steps between evaluations; the start and the end are always evaluated"),
        ("engine.threads", 0, "CPU threads; 0: chosen by model size; brorl check measures them"),
        *_functions(domain, tools, positions),
    ]
    return FirstRecipe(tuple(line for line in lines if line[1] is not None), guess, reading, form)


def _held_out(questions: Sequence[Question]) -> tuple[float, int]:
    """Return the fraction and the number of questions to hold out; both are 0 if there are too few questions."""
    wanted = round(max(0.02, min(_HELD_OUT / len(questions), _FRACTIONS[0])), 2)
    sizes = ((fraction, len(split_held_out(questions, fraction, 0)[1])) for fraction in (wanted, *_FRACTIONS))
    return next(((fraction, size) for fraction, size in sizes if 0 < size < len(questions)), (0.0, 0))


def _template(guess: Guess, form: AnswerForm | None) -> str:
    """Return the text around each question, which requests the verifier's answer form unless the questions do."""
    template = "{prompt}" if form else TEMPLATES.get(guess.domain, "{prompt}")
    if guess.words:
        template = template.replace("your final answer", f"your final answer ({' or '.join(guess.words)})")
    return template


def _columns(guess: Guess) -> list[Line]:
    """Return the settings that assign roles to the file's columns; unset ones are None."""
    source = guess.source
    if source.layout:
        return [("layout", source.layout, f"decides the columns and the verifier, {guess.domain}")]
    options = list(source.options_column)
    return [
        ("prompt_column", source.prompt_column, "the question"),
        ("context_column", source.context_column, "a text before the question"),
        ("options_column", options if len(options) > 1 else next(iter(options), None),
         "the options, which are written below the question"),
        ("answer_column", source.answer_column, "the right option" if options else "the reference answer"),
        ("first_option", source.first_option, "the index of the first option"),
        ("answer_after", source.answer_after, "the answer follows the last occurrence of this text"),
        ("domain", source.domain, f"the verifier: {guess.domain_reason}"),
    ]  # fmt: skip


def _functions(domain: str, tools: Mapping[str, str], positions: int | None) -> list[Line]:
    """Return the settings that name the user's functions; unset ones are None."""
    own_verifier = None if domain in DOMAINS else {domain: f"{_FUNCTION_FILE}:check"}
    limit = None if positions is None or not tools else positions // 2
    return [
        ("verification.functions", own_verifier, f"write {_SIGNATURE}"),
        ("tools.functions", dict(tools) or None, "responses can call them; the model reads their docstrings"),
        ("tools.max_response_tokens", limit, "limit for all turns of a response, including results"),
    ]


def _positions(model: str | None) -> int | None:
    """Return the number of positions of a local model, without importing transformers; None if unknown."""
    folder = shipped_folder(model or "") or Path(model or "").expanduser()
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        positions = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):  # `brorl check` reports the error
        return None
    return positions if isinstance(positions, int) else None
