"""A first recipe for a data file, with a comment on every setting.

In: the guessed meaning of a file, and its questions. Out: YAML text for `brorl check` and `brorl train`. The numbers
suit a first run on a laptop; the comments name those of the paper.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from brorl.prompts.countdown import COUNTDOWN_DOMAIN
from brorl.prompts.guess import Guess
from brorl.prompts.question import Question, split_held_out
from brorl.prompts.rendering import TEMPLATES
from brorl.verification.domains.table import DOMAINS

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
FUNCTION_FILE = "my_checks.py"
_HELD_OUT = 64  # questions, if there are enough
_FRACTIONS = (0.2, 0.3, 0.4, 0.5)  # held-out fractions to try for small files
_COLUMN = 44  # of the comments


@dataclass(frozen=True)
class Starter:
    """The settings of a first recipe that depend on the data.

    Attributes:
        model: Model to train.
        path: The data.
        guess: Its columns and its verifier.
        template: Text around a question.
        max_new_tokens: Length limit of a response.
        max_prompt_tokens: Length limit of a prompt; None if the positions of the model are unknown.
        num_questions: Questions in the data.
        num_held_out: Number of held-out questions; 0 switches evaluation off.
        held_out_fraction: The share that holds out this number.
    """

    model: str
    path: str
    guess: Guess
    template: str
    max_new_tokens: int
    max_prompt_tokens: int | None
    num_questions: int
    num_held_out: int
    held_out_fraction: float

    @property
    def needs_verifier(self) -> bool:
        """Whether the user writes the verifier."""
        return self.guess.domain not in DOMAINS


def make_starter(
    path: str, model: str | None, guess: Guess, questions: Sequence[Question], positions: int | None
) -> Starter:
    """Choose the settings.

    Args:
        path: The data.
        model: Model to train; None for the default.
        guess: Columns and verifier of the data.
        questions: All questions in the data.
        positions: Positions of the model, which a prompt and its response share; None if they are unknown.
    """
    puzzles, names_box = guess.domain == COUNTDOWN_DOMAIN, all("boxed" in question.asked for question in questions)
    response = 16 if puzzles else 512 if guess.domain == "code" else 256
    response = response if positions is None else max(1, min(response, positions // 2))
    wanted = round(max(0.02, min(_HELD_OUT / len(questions), _FRACTIONS[0])), 2)
    sizes = ((fraction, len(split_held_out(questions, fraction, 0).held_out)) for fraction in (wanted, *_FRACTIONS))
    fraction, num_held_out = next(((s, n) for s, n in sizes if 0 < n < len(questions)), (0.0, 0))
    return Starter(
        model=model or ("quickstart" if puzzles else _MODEL),
        path=path,
        guess=guess,
        template="{prompt}" if names_box else TEMPLATES.get(guess.domain, "{prompt}"),
        max_new_tokens=response,
        max_prompt_tokens=None if positions is None else positions - response,
        num_questions=len(questions),
        num_held_out=num_held_out,
        held_out_fraction=fraction,
    )


def starter_recipe(starter: Starter, name: str) -> str:
    """Return the recipe as YAML with comments; `name` is its file."""
    guess, after, lengths, functions = starter.guess, "", "", ""
    split = f"{starter.num_held_out} of {starter.num_questions:,} questions are held out for evaluation"
    if guess.answer_after is not None:
        after = f"""
      answer_after: {_quoted(guess.answer_after)}  # the answer follows the last occurrence of this text"""
    columns = f"""
      prompt_column: {_quoted(guess.prompt_column)}  # the question
      answer_column: {_quoted(guess.answer_column)}  # the reference answer{after}
      domain: {_quoted(guess.domain)}  # the verifier: {guess.domain_reason}"""
    if guess.layout:
        columns = f"""
      layout: {_quoted(guess.layout)}  # decides the columns and the verifier, {guess.domain}"""
    if starter.max_prompt_tokens is not None:
        lengths = f"""
  max_prompt_tokens: {starter.max_prompt_tokens}  # longer prompts are dropped: the model has no room for a response"""
    if starter.needs_verifier:
        functions = f"""
verification:
  functions:
    {_quoted(guess.domain)}: {FUNCTION_FILE}:check  # write def check(response: str, reference: str) -> bool"""
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
  num_samples: 16  # responses per question
  ks: [1, 16]  # pass@1 and pass@16; a k is at most num_samples
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
