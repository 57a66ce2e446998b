"""Rollouts that call a tool: a plain loop over rollouts against the tree, in turns in one process.

    python benchmarks/tool_turns.py RECIPE [--repeats N] [--rollouts N,N,...] [--prompts P]

RECIPE has the built-in calculator as its tool, as `calculator` does. The loop is what trainers without a tree do: every
rollout is a row with its own prompt, and makes its own call. Both use the native engine and one thread. The loop calls
the calculator in this process, which takes no time, and the tree in its workers.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from harness import table

from brorl.api.arguments import resolve_config
from brorl.model.forward import choose_forward
from brorl.model.load import end_tokens, load_model
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampleTask, prompt_seed
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.tools.calculator import calculator
from brorl.tools.calls import Call
from brorl.tools.setup import with_turns
from brorl.tools.toolbox import Toolbox
from brorl.training.inputs import prepare_run


class Outcome(NamedTuple):
    """What one way of sampling took."""

    seconds: float
    calls_made: int
    calls_run: int
    tokens: int  # computed: of prompts, results and turns


class Task(NamedTuple):
    """What is sampled."""

    engine: NativeEngine
    toolbox: Toolbox
    prompts: Sequence[Prompt]
    sampling: SamplingParams

    @classmethod
    def of_recipe(cls, recipe: str, num_prompts: int) -> "Task":
        """Load the model and the tools of a recipe."""
        config = resolve_config(recipe, {})
        inputs = prepare_run(config, config.model)
        assert inputs.toolbox is not None, "the recipe has no tools"
        model = load_model(config.model, torch.device("cpu"), torch.float32)
        stop_token_ids = end_tokens(model, inputs.tokenizer, config.sampling.stop)
        engine = NativeEngine(model, stop_token_ids, forward=choose_forward(model))
        return cls(engine, inputs.toolbox, inputs.prompts.train.take(num_prompts), config.sampling.params)


def result_of(call: Call) -> str:
    """Run one call of the calculator here."""
    try:
        return str(calculator(**json.loads(call.arguments)))
    except Exception as error:
        return f"error: {error}"


def by_tree(task: Task, num_rollouts: int, seed: int) -> Outcome:
    """Sample all rollouts of the prompts as trees."""
    ran, start = task.toolbox.tools.num_run, time.perf_counter()
    engine = with_turns(task.engine, task.toolbox)
    trees = engine.sample(SampleTask([prompt.token_ids for prompt in task.prompts], num_rollouts, task.sampling, seed))
    seconds = time.perf_counter() - start
    tokens = sum(len(prompt.token_ids) for prompt in task.prompts) + sum(tree.num_nodes for tree in trees)
    for tree in trees:  # the next turn of a distinct transcript computes what precedes its result again
        first = np.flatnonzero(tree.given & ~tree.given[tree.parent])
        tokens += int((len(tree.prompt_ids) + tree.depth[first]).sum())
    made = task.toolbox.metrics(trees)["calls"]
    return Outcome(seconds, made, task.toolbox.tools.num_run - ran, tokens)


def by_rollout(task: Task, num_rollouts: int, seed: int) -> Outcome:
    """Sample each rollout as a row with its own prompt, and make each of its calls."""
    start, tokens, made = time.perf_counter(), 0, 0
    rows = [list(prompt.token_ids) for prompt in task.prompts for _ in range(num_rollouts)]
    for turns_left in range(task.toolbox.settings.max_turns - 1, -1, -1):
        trees = task.engine.sample(
            SampleTask(
                rows, 1, task.sampling, [prompt_seed(100 * seed + turns_left, number) for number in range(len(rows))]
            )
        )
        tokens += sum(map(len, rows)) + sum(tree.num_nodes for tree in trees)
        longer = []
        for row, tree in zip(rows, trees, strict=True):
            ((turn, _),) = tree.responses()
            calls = task.toolbox.calls(turn) if tree.finished[0] else ()
            made += len(calls)
            if calls and turns_left:
                reply = task.toolbox.format.reply([(call.name or "tool", result_of(call)) for call in calls])
                longer.append([*row, *turn, *reply])
        if not (rows := longer):
            break
    return Outcome(time.perf_counter() - start, made, made, tokens)


def rows_of(task: Task, numbers: Sequence[int], repeats: int) -> Iterator[tuple[object, ...]]:
    """Yield the row of each number of rollouts and way of sampling."""
    ways: dict[str, Callable[[Task, int, int], Outcome]] = {"loop": by_rollout, "tree": by_tree}
    for num_rollouts in numbers:
        found: dict[str, list[Outcome]] = {way: [] for way in ways}
        for repeat in range(1 + repeats):  # the first warms up
            for way, sample in ways.items():
                found[way].append(sample(task, num_rollouts, repeat))
        medians = {way: np.median(np.array(outcomes[1:]), axis=0) for way, outcomes in found.items()}
        for way, (seconds, made, run, tokens) in medians.items():
            ratio = medians["loop"][0] / seconds
            yield num_rollouts, way, f"{seconds:.3g}", f"{made:,.0f}", f"{run:,.0f}", f"{tokens:,.0f}", f"{ratio:.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rollouts", default="16,512")
    parser.add_argument("--prompts", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task, numbers = Task.of_recipe(arguments.recipe, arguments.prompts), map(int, arguments.rollouts.split(","))
    heads = ("N", "way", "seconds", "calls made", "calls run", "tokens computed", "loop / way")
    print(table(heads, rows_of(task, [*numbers], arguments.repeats)))


if __name__ == "__main__":
    main()
