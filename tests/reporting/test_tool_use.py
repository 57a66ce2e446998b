"""The calls of some steps, against a loop over the trees."""

from typing import Any

import numpy as np
import pytest

from brorl.reporting.tool_use import failed_calls, tool_use_line, total_tool_use
from made_up_runs import random_tree, tools_record, typed
from small_models import with_given


def test_the_sums_are_over_all_rollouts_of_the_steps_with_tools(rng: np.random.Generator) -> None:
    steps = [
        [with_given(random_tree(rng, n, unknown=False), rng) for n in sizes] for sizes in ((9, 9), (40,), (6,) * 3)
    ]
    records: list[dict[str, Any]] = [{"step": 0}]
    for number, trees in enumerate(steps, 1):
        samples = sum(tree.num_rollouts for tree in trees)
        records.append({"step": number, "sampling": {"samples": samples}, "tools": tools_record(rng, trees)})
    use = total_tool_use(typed(records))
    assert use is not None
    rollouts = [parts for trees in steps for tree in trees for parts, count in zip(
        tree.parts(), tree.leaf_count.tolist(), strict=True) for _ in range(count)]  # fmt: skip
    replies = [sum(given for _, given in parts) for parts in rollouts]
    assert use.turns == pytest.approx(1 + np.mean(replies))
    assert use.calls == sum(replies)
    assert use.given_tokens == sum(int(tree.given.sum()) for trees in steps for tree in trees)
    failures = [record["tools"]["failures"] for record in records[1:]]
    for kind in set().union(*failures):
        assert use.failures[kind] == sum(count.get(kind, 0) for count in failures)
    most = max(use.failures, key=lambda kind: use.failures[kind])
    assert failed_calls(use).startswith(f"{most} {use.failures[most]}")


def test_a_run_without_tools_and_a_step_that_sampled_nothing() -> None:
    assert total_tool_use(typed([{"step": 0}, {"step": 1, "sampling": {"samples": 9}}])) is None
    idle = {"turns": 1.0, "calls": 0, "distinct_calls": 0, "given_tokens": 0, "failures": {}}
    use = total_tool_use(typed([{"step": 1, "sampling": {"samples": 0}, "tools": idle}]))
    assert use is not None
    assert tool_use_line(use) == "1.00 turns per rollout; 0 calls"
