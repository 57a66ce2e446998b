"""A first recipe for a data file: every setting with a comment that says what it does and where its number is from.

In: what the file holds. Out: YAML text that `brorl check` and `brorl train` read. The numbers make a try that a laptop
finishes; the comments name those of the paper.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

FUNCTION_FILE = "my_checks.py:check"


@dataclass(frozen=True)
class Starter:
    """What a first recipe is made from.

    Attributes:
        model: Model to train.
        path: The data.
        prompt_column: Column of the question.
        answer_column: Column of the answer.
        answer_after: Text before the answer; None if the column holds the answer alone.
        domain: Which verifier judges the responses.
        domain_reason: Why.
        own_verifier: Whether the domain needs a function of the user's.
        template: Text around a question.
        max_new_tokens: Length limit of a response.
        num_questions: Questions in the data.
        num_held_out: How many of them are held out; 0 switches evaluation off.
        held_out_share: Share that holds out as many.
    """

    model: str
    path: str
    prompt_column: str
    answer_column: str
    answer_after: str | None
    domain: str
    domain_reason: str
    own_verifier: bool
    template: str
    max_new_tokens: int
    num_questions: int
    num_held_out: int
    held_out_share: float


def starter_recipe(starter: Starter, name: str) -> str:
    """Return the recipe as YAML with comments; `name` is the file that it goes to."""
    lines = [
        f"# A first try on a laptop. Look at what it will do: brorl check {name}. Start it: brorl train {name}",
        "# Every key can be given on the command line too (--steps 50). All keys: brorl train --help",
        *_line(f"model: {_quoted(starter.model)}", "a folder or a Hugging Face hub id"),
        *_line("rollouts_per_prompt: 16", "N: 16 for a quick try, 512 in BroRL; compare them: brorl plan"),
        *_line("prompts_per_step: 8", "small, for a laptop; BroRL has 128"),
        *_line("steps: 20", "a first look; the runs of the paper take 419 to 3,000"),
        *_line("checkpoint_every: 10", "a stopped run goes on from the last checkpoint: brorl resume"),
        *_data(starter),
        "prompt:",
        *_line(f"  template: {_quoted(starter.template)}", "text around each question, {prompt}"),
        *_line("  chat: auto", "use the model's chat template if it has one"),
        "sampling:",
        *_line("  temperature: 1.0", "sample from the model as it is"),
        *_line(f"  max_new_tokens: {starter.max_new_tokens}", "longer responses are cut and count as incorrect"),
        "optimizer:",
        *_line("  learning_rate: 2.0e-6", "brorl's default, that of ProRL; raise it for a very small model"),
        *_line("  mini_batches: 2", "updates a step; each needs at least one prompt"),
        "evaluation:",
        *_line(f"  num_prompts: {min(starter.num_held_out, 32)}", "held-out questions that pass@k is measured on"),
        *_line("  num_samples: 16", "responses to each of them"),
        *_line("  ks: [1, 16]", "pass@1 and pass@16; a k is at most num_samples"),
        *_line("  every: 10", "steps between evaluations; the start and the end are always evaluated"),
    ]
    if starter.own_verifier:
        lines += [
            "verification:",
            "  functions:",
            *_line(
                f"    {_quoted(starter.domain)}: {FUNCTION_FILE}",
                "yours to write: def check(response: str, reference: str) -> bool",
            ),
        ]
    return "\n".join(lines) + "\n"


def _data(starter: Starter) -> list[str]:
    after = [] if starter.answer_after is None else _line(
        f"      answer_after: {_quoted(starter.answer_after)}", "the answer is what follows the last of these"
    )  # fmt: skip
    split = f"about {starter.num_held_out} of the {starter.num_questions:,} questions are kept for evaluation"
    return [
        "data:",
        "  sources:",
        *_line(f"    - path: {_quoted(starter.path)}", "relative to the folder in which brorl is started"),
        *_line(f"      prompt_column: {_quoted(starter.prompt_column)}", "the question"),
        *_line(f"      answer_column: {_quoted(starter.answer_column)}", "the reference answer"),
        *after,
        *_line(f"      domain: {_quoted(starter.domain)}", f"the verifier: {starter.domain_reason}"),
        *_line(f"  held_out_share: {starter.held_out_share:g}", split),
    ]


def _line(setting: str, comment: str) -> list[str]:
    """Return a setting with its comment beside it, or above it where the line would be long."""
    if len(setting) <= 44:
        return [f"{setting:<46}# {comment}"]
    indent = " " * (len(setting) - len(setting.lstrip()))
    return [f"{indent}# {comment}", setting]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
