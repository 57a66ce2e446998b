"""`brorl.sample` and `brorl tree` show N responses to one prompt as a tree, before and after training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import exp, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from brorl.api.arguments import WITHOUT_TRAINING, resolve_checkpoint
from brorl.config.reading import flat_settings, make_config, read_recipe
from brorl.config.settings import TrainConfig
from brorl.errors import UserError, option
from brorl.format import counted, probability, visible_text
from brorl.prompts.countdown import CountdownPuzzle
from brorl.prompts.prompt import COUNTDOWN_DOMAIN, Question
from brorl.prompts.settings import FileSource
from brorl.table import Result, Table

if TYPE_CHECKING:
    from brorl.tree import RolloutTree
    from brorl.verdict import Verdict

SETTINGS = ("device", "dtype", "sampling.", "prompt.", "verification.")
"""The settings and sections of a recipe that apply to a sampled tree."""
_MAX_ROLLOUTS = 2**20
_PUZZLE = re.compile(r"make (\d+) from ((?:\d+[ ,]*)+)")


@dataclass(frozen=True, eq=False, repr=False)
class SampledTree(Result):
    """N responses to one prompt by one model, or by two."""

    prompt: str  # the text that the model reads
    names: tuple[str, ...]  # one name per model; the last model is the one asked for
    trees: tuple[RolloutTree, ...]  # one tree per model
    verdicts: tuple[tuple[Verdict, ...], ...] | None  # [model][distinct response]; None without a reference answer
    decode: Callable[[Sequence[int]], str]  # turns token ids into text
    num_lines: int  # number of branches to draw

    @property
    def tree(self) -> RolloutTree:
        """The rollouts of the model that was asked for."""
        return self.trees[-1]

    @property
    def outline(self) -> Branch:
        """All trees as one outline."""
        if self.verdicts is None:
            correct = [np.zeros(tree.num_responses, np.bool_) for tree in self.trees]
        else:
            correct = [np.array([verdict.correct for verdict in of_tree]) for of_tree in self.verdicts]
        return outline_of(self.trees, correct)

    def table(self) -> Table:
        """Return a table with one branch per row: count, probability, correct fraction, and the text as an outline."""
        used, root = 3 if self.verdicts else 2, self.outline
        rows = []
        for line in lines_of(root, self.decode, self.num_lines):
            text = line.stem + line.text if line.branch is not root else visible_text(self.prompt, one_line=True)
            numbers: list[str] = []
            for k, tree in enumerate(self.trees):
                of_model = ("", "", "") if line.branch is None else numbers_of(line.branch, k, tree.num_rollouts)
                numbers += of_model[:used]
            rows.append((text, *numbers))
        names = self.names if len(self.names) > 1 else ("",)
        headings = [f"{name}\n{what}".strip() for name in names for what in ("rollouts", "prob.", "correct")[:used]]
        return Table("", ("the tree", *headings), tuple(rows), words=frozenset({0}))

    def parts(self) -> Iterator[Any]:
        """Yield the tree, and the tokens that it saved."""
        yield self.table()
        for name, tree in zip(self.names, self.trees, strict=True):
            sampled, unique = tree.num_sampled_tokens, tree.num_unique_tokens
            yield (
                f"{name}: {tree.num_rollouts:,} rollouts, {tree.num_responses:,} distinct; {sampled:,} tokens, "
                f"{unique:,} computed: {sampled / unique:.1f}x fewer"
            )
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

    Args:
        checkpoint: A model (`quickstart`, a folder, a hub id), a run (its last checkpoint), or a checkpoint in one.
        prompt: The question, as in the data of the run, or a puzzle such as `make 22 from 3 5 7`.
        rollouts: N, 1 to 2^20.
        against: Another model, whose tree is drawn beside it; `start` is the model that the run started from.
        reference: The reference answer of the prompt (default: of the same question in the run's data).
        domain: The domain of its verifier (default: the domain of the run's data).
        lines: Branches to draw, at least 1: those with the most rollouts.
        seed: Seed of the sampling.
        overrides: Settings of a recipe, nested or by dotted name: `device`, `dtype`, and those in `sampling`, `prompt`
            and `verification`.

    Raises:
        UserError: If an argument is wrong, or the model or the prompt does not fit.
    """
    if not 1 <= rollouts <= _MAX_ROLLOUTS:
        raise UserError(f"{option('rollouts')}: a number from 1 to {_MAX_ROLLOUTS:,} is needed, got {rollouts}")
    if lines < 1:
        raise UserError(f"{option('lines')}: at least 1 is needed, got {lines}")
    if not prompt.strip():
        raise UserError("the prompt is empty; give a question, such as 'make 22 from 3 5 7'")
    given = flat_settings(overrides)
    if wrong := next((name for name in given if not name.startswith(SETTINGS)), None):
        raise UserError(f"{wrong} is not a setting of a sampled tree; those are: {', '.join(SETTINGS)}")
    found = resolve_checkpoint(str(checkpoint))
    settings = {} if found.recipe is None else read_recipe(found.recipe)
    for section in ("cluster", "engine"):  # the run's choices for training do not apply here
        settings.pop(section, None)
    overrides = {**given, **WITHOUT_TRAINING, "model": found.model}
    config = make_config(settings, overrides, found.recipe or "the options")
    question = _question(None if found.recipe is None else config, prompt, reference, domain)
    models = [(Path(checkpoint).name, found.model)]
    if against is not None and str(against) == "start":
        if found.run_config is None:
            raise UserError(f"{option('against', 'start')}: only a run has a start; name the other model")
        start = make_config(read_recipe(str(found.run_config)), {}, str(found.run_config)).model
        models = [("before", start), ("after", found.model)]
    elif against is not None:
        models.insert(0, (Path(against).name, resolve_checkpoint(str(against)).model))
    return _sampled(config, question, models, rollouts, lines, seed)


def _question(config: TrainConfig | None, text: str, reference: str | None, domain: str | None) -> Question:
    """Return the prompt as a question; the user or the data of `config` (None: no data) gives the reference answer."""
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
                f"{option('reference')} needs the domain of its verifier; add {option('domain', 'math')}, or another"
            )
        return Question("prompt", text, reference, chosen)
    from brorl.evaluation.questions import build_questions

    for source in () if config is None else build_questions(config):
        for question in (*source.held_out, *source.train):
            if question.text.strip() == text.strip():
                return question
    return Question("prompt", text, "", "")


def _sampled(
    config: TrainConfig, question: Question, models: Sequence[tuple[str, str]], rollouts: int, lines: int, seed: int
) -> SampledTree:
    from brorl.model.load import load_tokenizer
    from brorl.model.settings import LoraSettings
    from brorl.prompts.rendering import render
    from brorl.rollout.chosen_engine import load_engine
    from brorl.verification.domains.table import make_verifiers
    from brorl.verification.grade import Grader
    from brorl.verification.sandbox.pool import Workers
    from brorl.verification.thoughts import make_decode

    merged = config.model_copy(update={"lora": LoraSettings()})  # adapters are merged
    trees, sampling = [], config.sampling.params
    tokenizer = load_tokenizer(models[-1][1], config.sampling.stop)
    (prompt,) = render([question], config.prompt, tokenizer)
    decode = make_decode(tokenizer, config.verification.thoughts, config.sampling.stop)
    context = len(prompt.token_ids) + sampling.max_new_tokens
    for _, name in models:
        _, engine = load_engine(merged, name, tokenizer, context)
        (tree,) = engine.sample([prompt.token_ids], rollouts, sampling, seed)
        trees.append(tree)
    verdicts = None
    if question.domain:
        with Workers.from_settings(config.verification) as workers:
            verifiers = make_verifiers({question.domain}, config.verification, config.rewards, workers)
            groups = Grader(verifiers, decode, config.rewards).verify([prompt] * len(trees), trees)
        verdicts = tuple(tuple(group.verdicts) for group in groups)
    return SampledTree(prompt.text, tuple(name for name, _ in models), tuple(trees), verdicts, decode, lines)


# The outline of trees. A branch is a chain of tokens without a fork. Its probability is that of the text up to its end,
# under the policy that sampled it. A path can have thousands of forks, so nothing here recurses.


@dataclass(eq=False)
class Branch:
    """A chain of tokens and the branches that follow it; lists hold one number per tree, shape [K]."""

    tokens: list[int]
    count_K: list[int]  # rollouts that pass through the branch
    correct_K: list[int]  # correct rollouts that pass through the branch
    probability_K: list[float]  # P(text up to the branch's end); NaN if the tree has no rollout here
    ends: bool  # whether responses end with the branch
    branches: list[Branch] = field(default_factory=list, repr=False)  # most rollouts in the last tree first

    @property
    def size(self) -> int:
        """Number of branches below this one."""
        return sum(1 for _ in _walk(self)) - 1


def _walk(root: Branch) -> Iterator[Branch]:
    """Yield a branch and all branches below it, parents first."""
    waiting = [root]
    while waiting:
        branch = waiting.pop()
        yield branch
        waiting += branch.branches


@dataclass(frozen=True)
class Line:
    """A line of a drawn outline."""

    stem: str  # connecting characters at the left, such as `│ ├ `
    text: str
    branch: Branch | None  # None for a line about branches that are not shown


def outline_of(trees: Sequence[RolloutTree], correct: Sequence[NDArray[np.bool_]]) -> Branch:
    """Join K trees of one prompt; `correct` marks the correct distinct responses of each tree."""
    if not trees:
        raise ValueError("an outline needs at least one tree")
    number = len(trees)
    root = Branch([], [tree.num_rollouts for tree in trees], [0] * number, [1.0] * number, ends=False)
    below: dict[int, dict[int, Branch]] = {id(root): {}}
    for k, (tree, correct_L) in enumerate(zip(trees, correct, strict=True)):
        correct_M = tree.sum_below(tree.leaf_count * correct_L)
        root.correct_K[k] = int(tree.leaf_count @ correct_L)
        at: list[Branch] = []
        for node, (token, parent) in enumerate(zip(tree.token.tolist(), tree.parent.tolist(), strict=True)):
            above = root if parent < 0 else at[parent]
            found = below[id(above)].get(token)
            if found is None:
                found = Branch([token], [0] * number, [0] * number, [nan] * number, ends=False)
                below[id(above)][token] = found
                below[id(found)] = {}
                above.branches.append(found)
            found.count_K[k], found.correct_K[k] = int(tree.count[node]), round(float(correct_M[node]))
            found.probability_K[k] = exp(float(tree.prefix_logprob[node]))
            at.append(found)
        for node in tree.leaf.tolist():
            at[node].ends = True
    for branch in _walk(root):  # the root is the prompt; no token joins it
        for one in branch.branches:
            _join(one)
        branch.branches.sort(key=lambda b: (b.count_K[-1], b.count_K), reverse=True)
    return root


def _join(branch: Branch) -> None:
    """Join the tokens that follow without a fork."""
    while len(branch.branches) == 1 and not branch.ends and branch.branches[0].count_K == branch.count_K:
        (only,) = branch.branches
        branch.tokens += only.tokens
        branch.correct_K, branch.probability_K = only.correct_K, only.probability_K
        branch.ends, branch.branches = only.ends, only.branches


def lines_of(root: Branch, decode: Callable[[Sequence[int]], str], num_lines: int) -> list[Line]:
    """Draw the branches with the most rollouts in about `num_lines` lines or fewer."""
    shown = {id(branch) for branch in _largest(root, num_lines)}
    lines: list[Line] = []
    waiting: list[tuple[Branch | str, str, str]] = [(root, "", "")]  # (item to draw, its stem, stem of lines below)
    while waiting:
        branch, stem, below = waiting.pop()
        if isinstance(branch, str):
            lines.append(Line(stem, branch, None))
            continue
        lines.append(Line(stem, visible_text(decode(branch.tokens), one_line=True), branch))
        following: list[Branch | str] = [one for one in branch.branches if id(one) in shown]
        if hidden := [one for one in branch.branches if id(one) not in shown]:
            more, rollouts = sum(1 + one.size for one in hidden), sum(one.count_K[-1] for one in hidden)
            following.append(f"... {more} more, {counted(rollouts, 'rollout')}")
        for one in following[::-1]:
            last = one is following[-1]
            waiting.append((one, below + ("└ " if last else "├ "), below + ("  " if last else "│ ")))
    return lines


def _largest(root: Branch, number: int) -> list[Branch]:
    """Return the `number` branches with the most rollouts in any tree, parents first."""
    found: list[Branch] = []
    order = count()  # breaks ties: of equal branches, the first one found comes first
    candidates = [(0, next(order), root)]
    while candidates and len(found) < number:
        _, _, best = heappop(candidates)
        found.append(best)
        for branch in best.branches:
            heappush(candidates, (-max(branch.count_K), next(order), branch))
    return found


def numbers_of(branch: Branch, k: int, num_rollouts: int) -> tuple[str, str, str]:
    """Return the count, the probability and the correct fraction of a branch in one tree as text."""
    number, known = branch.count_K[k], branch.probability_K[k]
    if not number:
        return "", "", ""
    certain = known if not isnan(known) else number / num_rollouts
    return f"{number:,}", probability(certain), f"{branch.correct_K[k] / number:.0%}"
