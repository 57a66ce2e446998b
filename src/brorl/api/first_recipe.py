"""Writes a first recipe for a data file: a comment on every setting, and lines on the guesses about the data.

The numbers suit a first run on a laptop; the comments give the paper's numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from brorl.config.reading import nested_settings
from brorl.format import counted, listed
from brorl.model.settings import shipped_folder
from brorl.prompts.answer_forms import AnswerForm, asked_form
from brorl.prompts.guess import Guess
from brorl.prompts.prompt import CODE_DOMAIN, COUNTDOWN_DOMAIN, SourceReading, split_held_out
from brorl.prompts.rendering import TEMPLATES
from brorl.prompts.settings import FileSource
from brorl.verification.domains.table import DOMAINS
from brorl.verification.gym.taskset import SCORE

FUNCTION_FILE = "my_checks.py"
"""File of the user's verifier."""
_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_SIGNATURE = "def check(response: str, reference: str) -> bool"
_HELD_OUT, _EVALUATED = 64, 32  # questions to hold out and to evaluate on, if there are enough
_FRACTIONS = (0.2, 0.3, 0.4, 0.5)  # held-out fractions to try for small files
_COLUMN = 46  # comments begin in this column
_OF_DATA = (
    "data.sources", "data.held_out_fraction", "prompt.template", "evaluation.num_prompts", "verification.functions",
)  # fmt: skip
_COMMENTS: Mapping[str, str] = {
    "model": "a folder or a Hugging Face hub id",
    "rollouts_per_prompt": "N: 16 for a quick try, 512 in BroRL; compare them: brorl plan",
    "prompts_per_step": "small, for a laptop; BroRL has 128",
    "steps": "a first look; the runs of the paper take 419 to 3,000",
    "checkpoint_every": "a stopped run resumes from the last checkpoint: brorl resume RUN",
    "data.sources.path": "relative to the folder in which brorl is started",
    "data.sources.prompt_column": "the question",
    "data.sources.options_column": "the options, which are written below the question",
    "data.sources.first_option": "the index of the first option",
    "data.sources.answer_after": "the answer follows the last occurrence of this text",
    "data.max_prompt_tokens": "longer prompts are dropped: the model has no room for a response",
    "prompt.template": "text around each question, {prompt}",
    "prompt.chat": "use the model's chat template if it has one",
    "sampling.temperature": "sample from the model as it is",
    "sampling.max_new_tokens": "longer responses are cut and count as incorrect",
    "optimizer.learning_rate": "brorl's default, from ProRL; raise it for a very small model",
    "optimizer.mini_batches": "updates per step; each needs at least one prompt",
    "evaluation.num_prompts": "held-out questions for pass@k",
    "evaluation.rollouts_per_prompt": "responses per question",
    "evaluation.ks": "pass@1 and pass@16; a k is at most rollouts_per_prompt",
    "evaluation.every": "steps between evaluations; the start and the end are always evaluated",
    "engine.threads": "CPU threads; 0: by the size of the model; brorl check measures them",
    "verification.timeout_s": "the first verification of a worker imports the library, which takes seconds",
}


@dataclass(frozen=True)
class FirstRecipe:
    """A first recipe for a data file."""

    settings: Mapping[str, Any]  # dotted name -> value, in the order of the file
    comments: Mapping[str, str]  # dotted name -> comment
    guess: Guess
    reading: SourceReading
    form: AnswerForm | None  # questions ask for answers in this form, such as `\boxed{...}`; None if in no form

    @property
    def source(self) -> dict[str, Any]:
        """The settings of the source."""
        (source,) = self.settings["data.sources"]
        return dict(source)

    @property
    def settings_of_data(self) -> dict[str, Any]:
        """The settings that the data decides."""
        return {name: self.settings[name] for name in _OF_DATA if name in self.settings}

    def text(self, name: str) -> str:
        """Return the recipe as YAML with comments; `name` is its file."""
        return "\n".join([
            f"# A first try on a laptop. Check it: brorl check {name}. Train it: brorl train {name}",
            "# Every key is also an option of the command line (--steps 50). All keys: brorl train --help, "
            "docs/reference/recipe.md",
            *_yaml_lines(nested_settings(self.settings, name), self.comments),
        ]) + "\n"  # fmt: skip

    def guesses(self) -> list[str]:
        """Return lines on the guesses about the data."""
        guess, source = self.guess, self.source
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
        if self.form:
            lines.append(f"  the questions ask for the answer {self.form.name}, so prompt.template adds no other form")
        if guess.unused:
            lines.append(f"  not in the prompt: {counted(len(guess.unused), 'column')} of text, {listed(guess.unused)}")
        return lines

    def summary(self, output: Path) -> list[str]:
        """Return lines with the number of questions, the guesses, the file written, and the next commands."""
        settings, reading, number = self.settings, self.reading, len(self.reading.questions)
        others = [f"{counted(reading.num_repeated, 'row')} repeat a question"] if reading.num_repeated else []
        others += [f"{counted(count, 'row')} dropped ({reason})" for reason, count in reading.dropped.items()]
        rows = f" in {counted(reading.num_rows, 'row')}: {listed(others)}" if others else ""
        lines = [f"{self.source['path']}: {counted(number, 'question')}{rows}", *self.guesses()]
        lines.append(
            f"wrote {output}: model {settings['model']}, {settings['rollouts_per_prompt']} rollouts x "
            f"{settings['prompts_per_step']} prompts per step, {settings['steps']} steps"
        )
        if {*settings.get("verification.functions", {}).values()} - {SCORE}:
            lines.append(f"write the verifier first: {_SIGNATURE}, in {FUNCTION_FILE}")
        return [*lines, f"check the recipe: brorl check {output}", f"train with it: brorl train {output}"]


def make_first_recipe(path: str, model: str | None, guess: Guess, reading: SourceReading, function: str) -> FirstRecipe:
    """Choose the settings, so that a prompt and its response fit into the model's positions."""
    questions, positions, source = reading.questions, _positions(model), guess.source
    domain = "" if function == SCORE else guess.domain  # a taskset has its own rewards, whatever its name
    puzzles, form = domain == COUNTDOWN_DOMAIN, asked_form([question.key for question in questions])
    response = 16 if puzzles else 512 if domain == CODE_DOMAIN else 256
    response = response if positions is None else max(1, min(response, positions // 2))
    wanted = round(max(0.02, min(_HELD_OUT / len(questions), _FRACTIONS[0])), 2)
    sizes = ((fraction, len(split_held_out(questions, fraction, 0).held_out)) for fraction in (wanted, *_FRACTIONS))
    fraction, num_held_out = next(((s, n) for s, n in sizes if 0 < n < len(questions)), (0.0, 0))
    template = "{prompt}" if form else TEMPLATES.get(domain, "{prompt}")
    if guess.words:
        template = template.replace("your final answer", f"your final answer ({' or '.join(guess.words)})")
    settings: dict[str, Any] = {
        "model": model or ("quickstart" if puzzles else _MODEL),
        "rollouts_per_prompt": 16,
        "prompts_per_step": 8,
        "steps": 20,
        "checkpoint_every": 10,
        "data.sources": [{"path": path} | _columns(source)],
        "data.held_out_fraction": fraction,
        **({} if positions is None else {"data.max_prompt_tokens": positions - response}),
        "prompt.template": template,
        "prompt.chat": "auto",
        "sampling.temperature": 1.0,
        "sampling.max_new_tokens": response,
        "optimizer.learning_rate": 2e-6,
        "optimizer.mini_batches": 2,
        "evaluation.num_prompts": min(num_held_out, _EVALUATED),
        "evaluation.rollouts_per_prompt": 16,
        "evaluation.ks": [1, 16],
        "evaluation.every": 10,
        "engine.threads": 0,
    }
    if domain not in DOMAINS:
        settings["verification.functions"] = {guess.domain: function}
    if function == SCORE:
        settings["verification.timeout_s"] = 60
    comments = {
        **_COMMENTS,
        "data.sources.answer_column": "the right option" if source.options_column else "the reference answer",
        "data.sources.domain": f"the verifier: {guess.domain_reason}",
        "data.sources.layout": f"decides the columns and the verifier, {guess.domain}",
        "data.held_out_fraction": f"{num_held_out} of {len(questions):,} questions are held out for evaluation",
        f"verification.functions.{guess.domain}": "" if function == SCORE else f"write {_SIGNATURE}",
    }
    return FirstRecipe(settings, comments, guess, reading, form)


def _columns(source: FileSource) -> dict[str, Any]:
    """Return how the rows of a source are read, in the order of a recipe."""
    if source.layout:
        return {"layout": source.layout}
    options = source.options_column
    columns = {
        "prompt_column": source.prompt_column,
        "options_column": [*options] if len(options) > 1 else next(iter(options), None),
        "answer_column": source.answer_column,
        "first_option": source.first_option,
        "answer_after": source.answer_after,
        "domain": source.domain,
    }
    return {name: value for name, value in columns.items() if value is not None}


def _yaml_lines(
    settings: Mapping[str, Any], comments: Mapping[str, str], prefix: str = "", indent: str = ""
) -> Iterator[str]:
    """Yield nested settings as YAML lines. Comments are aligned in one column; above a setting that is too long."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, comments, f"{name}.", f"{indent}  ")
        elif isinstance(value, list) and isinstance(value[0], Mapping):
            yield f"{indent}{key}:"
            lines = [*_yaml_lines(value[0], comments, f"{name}.", f"{indent}    ")]
            first = next(at for at, line in enumerate(lines) if not line.lstrip().startswith("#"))
            yield from (line[2:] for line in lines[:first])  # a comment above
            yield f"{indent}  - {lines[first].lstrip()}"
            yield from lines[first + 1 :]
        else:
            own = prefix == "verification.functions."  # the name of a domain can be any text
            setting = f"{indent}{json.dumps(key) if own else key}: {json.dumps(value, ensure_ascii=False)}"
            comment = f"# {comments[name]}" if comments[name] else ""
            if comment and len(setting) > _COLUMN - 2:
                yield f"{indent}{comment}"
                comment = ""
            yield f"{setting:<{_COLUMN}}{comment}" if comment else setting


def _positions(model: str | None) -> int | None:
    """Read how many positions a model on this machine has, without importing transformers; None if unknown."""
    folder = shipped_folder(model or "") or Path(model or "").expanduser()
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        positions = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):  # `brorl check` reports the error
        return None
    return positions if isinstance(positions, int) else None
