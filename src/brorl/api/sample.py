"""`brorl.sample` and `brorl tree` show N responses to one prompt as a tree, before and after training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brorl.api.arguments import WITHOUT_TRAINING, refuse_in_worker, resolve_checkpoint
from brorl.config.reading import flat_settings, make_config, read_recipe
from brorl.config.settings import TrainConfig
from brorl.errors import UserError, option
from brorl.evaluation.questions import build_questions
from brorl.format import visible_text
from brorl.model.settings import LoraSettings
from brorl.prompts.countdown import CountdownPuzzle
from brorl.prompts.question import COUNTDOWN_DOMAIN, Question
from brorl.prompts.settings import FileSource
from brorl.reporting.outline import Branch, lines_of, outline_of
from brorl.reporting.tool_use import tool_use_line
from brorl.runs.step_record import ToolUse
from brorl.table import Result, Table
from brorl.tools.setup import load_tools_and_verifiers, make_toolbox, rendered, with_turns
from brorl.verification.grade import grade, seen_text
from brorl.verification.sandbox.pool import Workers
from brorl.verification.thoughts import make_decode

if TYPE_CHECKING:
    from brorl.tree import RolloutTree
    from brorl.verdict import Verdict

SETTINGS = ("device", "dtype", "sampling.", "tools.", "prompt.", "verification.")
"""The recipe settings and sections that apply to a sampled tree."""
_MAX_ROLLOUTS = 2**20
_PUZZLE = re.compile(r"make (\d+) from ((?:\d+[ ,]*)+)")


@dataclass(frozen=True, eq=False, repr=False)
class SampledTree(Result):
    """N responses to one prompt from each of one or two models."""

    prompt: str  # the text that the model reads
    names: tuple[str, ...]  # one per model; the requested model is last
    trees: tuple[RolloutTree, ...]  # one tree per model
    verdicts: tuple[tuple[Verdict, ...], ...] | None  # [model][distinct response]; None without a reference answer
    decode: Callable[[Sequence[int]], str]  # turns token ids into text
    num_lines: int  # number of branches to draw
    decode_reply: Callable[[Sequence[int]], str] | None = None  # turns token ids of tool results into text
    called: tuple[ToolUse, ...] = ()  # the tool calls of each model's rollouts; empty without tools

    @property
    def tree(self) -> RolloutTree:
        """The rollouts of the requested model."""
        return self.trees[-1]

    @property
    def outline(self) -> Branch:
        """All trees as one outline."""
        if self.verdicts is None:
            correct = [np.zeros(tree.num_responses, np.bool_) for tree in self.trees]
        else:
            correct = [np.array([verdict.correct for verdict in tree_verdicts]) for tree_verdicts in self.verdicts]
        return outline_of(self.trees, correct)

    def table(self) -> Table:
        """Return a table with one branch per row: count, probability, fraction correct, and the text as an outline."""
        used = 3 if self.verdicts else 2
        root = self.outline
        lines = lines_of(root, self.decode, self.num_lines, self.decode_reply)
        rows = []
        results = frozenset(i for i, line in enumerate(lines) if line.branch is not None and line.branch.given)
        for line in lines:
            text = line.stem + line.text if line.branch is not root else visible_text(self.prompt, one_line=True)
            numbers: list[str] = []
            for k, tree in enumerate(self.trees):
                model_numbers = ("", "", "") if line.branch is None else line.branch.numbers(k, tree.num_rollouts)
                numbers += model_numbers[:used]
            rows.append((text, *numbers))
        names = self.names if len(self.names) > 1 else ("",)
        headings = [f"{name}\n{what}".strip() for name in names for what in ("rollouts", "prob.", "correct")[:used]]
        return Table("", ("the tree", *headings), tuple(rows), words=frozenset({0}), colored=results)

    def parts(self) -> Iterator[Any]:
        """Yield the tree and the number of tokens it saved."""
        yield self.table()
        for name, tree in zip(self.names, self.trees, strict=True):
            sampled, unique = tree.num_sampled_tokens, tree.num_unique_tokens
            yield (
                f"{name}: {tree.num_rollouts:,} rollouts, {tree.num_responses:,} distinct; {sampled:,} tokens, "
                f"{unique:,} computed: {sampled / unique:.1f}x fewer"
            )
        for name, use in zip(self.names, self.called, strict=False):
            yield f"{name}: {tool_use_line(use)}"
        if self.verdicts is None:
            yield f"no verdicts: the prompt is not in the data; give its reference answer with {option('reference')}"

    def __repr__(self) -> str:
        return f"SampledTree({self.tree.num_rollouts} rollouts of {self.prompt!r})"


def sample(
    checkpoint: str | Path,
    prompt: str,
    *,
    rollouts: int = 512,
    against: str | Path | None = None,
    reference: str | None = None,
    domain: str | None = None,
    lines: int = 40,
    seed: int = 0,
    **overrides: Any,
) -> SampledTree:
    """Sample N responses to one prompt as a tree.

    Examples:
        >>> brorl.sample("runs/first", "make 22 from 3 5 7", rollouts=256, against="start")

    Args:
        checkpoint: A model (`quickstart`, a folder, a hub id), a run (its last checkpoint), or a checkpoint in one.
        prompt: The question, as in the data of the run, or a puzzle such as `make 22 from 3 5 7`.
        rollouts: N, 1 to 2^20.
        against: A second model, whose tree is drawn next to it; `start` is the model that the run started from.
        reference: The reference answer of the prompt (default: that of the same question in the run's data).
        domain: The domain of its verifier (default: the domain of the run's data).
        lines: Branches to draw, at least 1: those with the most rollouts.
        seed: Seed of the sampling.
        overrides: Settings of a recipe, nested or by dotted name: `device`, `dtype`, and those in `sampling`, `prompt`
            and `verification`.

    Raises:
        UserError: If an argument is wrong, or the model or the prompt does not fit.
    """
    refuse_in_worker()
    if not 1 <= rollouts <= _MAX_ROLLOUTS:
        raise UserError(f"{option('rollouts')}: expected a number from 1 to {_MAX_ROLLOUTS:,}, got {rollouts}")
    if lines < 1:
        raise UserError(f"{option('lines')}: expected at least 1, got {lines}")
    if not prompt.strip():
        raise UserError("the prompt is empty; give a question, such as 'make 22 from 3 5 7'")
    replaced = flat_settings(overrides)
    if wrong := next((name for name in replaced if not name.startswith(SETTINGS)), None):
        raise UserError(f"{wrong} is not a setting of a sampled tree; those are: {', '.join(SETTINGS)}")
    trained = resolve_checkpoint(str(checkpoint))
    settings = {} if trained.recipe is None else read_recipe(trained.recipe)
    for section in ("cluster", "engine"):  # the run's training choices do not apply here
        settings.pop(section, None)
    overrides = {**replaced, **WITHOUT_TRAINING, "model": trained.model}
    config = make_config(settings, overrides, trained.recipe or "the options")
    question = _question(None if trained.recipe is None else config, prompt, reference, domain)
    models = [(Path(checkpoint).name, trained.model)]
    if against is not None and str(against) == "start":
        if trained.run_config is None:
            raise UserError(f"{option('against', 'start')}: only a run has a start; name the other model")
        start = make_config(read_recipe(str(trained.run_config)), {}, str(trained.run_config)).model
        models = [("before", start), ("after", trained.model)]
    elif against is not None:
        models.insert(0, (Path(against).name, resolve_checkpoint(str(against)).model))
    return _sampled(config, question, models, rollouts, lines, seed)


def _question(config: TrainConfig | None, text: str, reference: str | None, domain: str | None) -> Question:
    """Return the prompt as a question. If no reference answer is given, it comes from the data of `config`."""
    if puzzle := _PUZZLE.fullmatch(text.strip()):
        numbers = tuple(sorted(map(int, re.findall(r"\d+", puzzle[2]))))
        asked = CountdownPuzzle(numbers, int(puzzle[1]))
        return Question("prompt", asked.text, asked.reference, COUNTDOWN_DOMAIN)
    if reference is not None:
        sources = () if config is None else config.data.sources
        domains = {source.domain for source in sources if isinstance(source, FileSource)}
        chosen = domain or (domains.pop() if len(domains) == 1 else None)
        if chosen is None:
            raise UserError(
                f"{option('reference')} needs the domain of its verifier; add, for example, {option('domain', 'math')}"
            )
        return Question("prompt", text, reference, chosen)
    for source in () if config is None else build_questions(config):
        for question in (*source.held_out, *source.train):
            if question.text.strip() == text.strip():
                return question
    return Question("prompt", text, "", "")


def _sampled(
    config: TrainConfig, question: Question, models: Sequence[tuple[str, str]], rollouts: int, lines: int, seed: int
) -> SampledTree:
    from brorl.model.load import check_vocabulary, load_tokenizer
    from brorl.model.source import find_model, read_config
    from brorl.rollout.chosen_engine import load_engine
    from brorl.rollout.engine import SampleTask

    merged = config.model_copy(update={"lora": LoraSettings()})  # adapters are merged
    trees = []
    sampling = config.sampling.params
    tokenizer = load_tokenizer(models[-1][1], config.sampling.stop)
    for _, name in models:
        check_vocabulary(name, read_config(find_model(name)), tokenizer)
    workers = Workers.from_settings(config.verification)
    tools, verifiers = load_tools_and_verifiers(config, [question.domain] if question.domain else [], workers)
    toolbox = make_toolbox(merged, models[-1][1], tokenizer, tools)
    (prompt,) = rendered([question], config.prompt, tokenizer, toolbox)
    decode = make_decode(tokenizer, config.verification.thoughts, config.sampling.stop)
    context = len(prompt.token_ids) + config.tools.total_tokens(sampling.max_new_tokens)
    verdicts = None
    with workers:
        for _, name in models:
            engine = with_turns(load_engine(merged, name, tokenizer, context)[1], toolbox)
            (tree,) = engine.sample(SampleTask([prompt.token_ids], rollouts, sampling, seed))
            trees.append(tree)
        if verifiers:
            seen = partial(
                seen_text, decode=decode, sees=config.verification.sees,
                calls_text=toolbox.calls_text if toolbox else None,
            )  # fmt: skip
            verdicts_of_trees = grade([prompt] * len(trees), trees, verifiers, seen, config.rewards.stop_properly > 0)
            verdicts = tuple(map(tuple, verdicts_of_trees))
    names = tuple(name for name, _ in models)
    if toolbox is None:
        return SampledTree(prompt.text, names, tuple(trees), verdicts, decode, lines)
    called = tuple(ToolUse(**toolbox.metrics([tree])) for tree in trees)
    return SampledTree(prompt.text, names, tuple(trees), verdicts, decode, lines, toolbox.reply_text, called)
