"""Stored rollouts: write groups with their text as a table, and read them back.

A file omits prompt tokens and verdict times, and keeps only the beginning of a long reference answer.

Groups are read one at a time, so only one has to fit in memory. Missing steps and damaged files are rejected. Responses
to held-out prompts (`evaluations/step-*.parquet`) have the same format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from brorl.algorithms.groups import Group
from brorl.errors import UserError
from brorl.prompts.prompt import Prompt, stored_reference
from brorl.tree import RolloutTree
from brorl.verdict import Verdict

if TYPE_CHECKING:
    import pyarrow as pa

_COLUMNS = (
    "prompt_id", "domain", "prompt", "response", "token_ids", "logprobs", "count", "num_rollouts", "finished",
    "correct", "score", "extracted", "reason", "reward", "question", "reference",
)  # fmt: skip
_GIVEN = "given"  # runs of earlier versions lack this column; all their tokens were sampled
_LISTS = ("token_ids", "logprobs", _GIVEN)
_ROWS_PER_BATCH = 1024

StoredRow = dict[str, Any]
Folder = Literal["rollouts", "evaluations"]


def responses_table(step: int, groups: Sequence[Group]) -> pa.Table:
    """Return a step's groups, which must have text, as a table with one row per distinct response."""
    import pyarrow as pa

    trees = [group.tree for group in groups]
    sizes = [tree.num_responses for tree in trees]
    nodes_G = [tree.response_nodes() for tree in trees]
    verdict_R = [verdict for group in groups for verdict in group.verdicts]
    ends_R = np.cumsum([0, *(length for tree in trees for length in tree.total_length.tolist())])

    def per_group(values: Iterable[Any]) -> list[Any]:
        return [value for value, size in zip(values, sizes, strict=True) for _ in range(size)]

    def per_response(arrays: Iterable[Any]) -> list[Any]:
        return [value for array in arrays for value in array.tolist()]

    def along_responses(name: str, kind: type[np.generic]) -> pa.Array:
        arrays = [getattr(tree, name)[nodes].astype(kind) for tree, nodes in zip(trees, nodes_G, strict=True)]
        flat = np.concatenate([*arrays, np.zeros(0, kind)])
        return pa.ListArray.from_arrays(pa.array(ends_R, pa.int32()), pa.array(flat))

    reward_R = per_response(group.reward_L for group in groups)
    columns = [
        ("step", pa.int32(), [step] * len(verdict_R)),
        ("prompt_id", pa.string(), per_group(group.prompt.id for group in groups)),
        ("domain", pa.string(), per_group(group.prompt.domain for group in groups)),
        ("prompt", pa.string(), per_group(group.prompt.text for group in groups)),
        ("question", pa.string(), per_group(group.prompt.question for group in groups)),
        ("reference", pa.string(), per_group(stored_reference(group.prompt.reference) for group in groups)),
        ("response", pa.string(), [text for group in groups for text in group.texts]),
        ("token_ids", None, along_responses("token", np.int32)),
        ("logprobs", None, along_responses("logprob", np.float32)),
        (_GIVEN, None, along_responses("given", np.bool_)),
        ("count", pa.int32(), per_response(tree.leaf_count for tree in trees)),
        ("num_rollouts", pa.int32(), per_group(tree.num_rollouts for tree in trees)),
        ("finished", pa.bool_(), per_response(tree.finished for tree in trees)),
        ("correct", pa.bool_(), [verdict.correct for verdict in verdict_R]),
        ("score", pa.float64(), [verdict.score for verdict in verdict_R]),
        ("extracted", pa.string(), [verdict.extracted for verdict in verdict_R]),
        ("reason", pa.string(), [verdict.reason for verdict in verdict_R]),
        ("reward", pa.float64(), [None if v.unverified else r for v, r in zip(verdict_R, reward_R, strict=True)]),
    ]
    arrays = [values if kind is None else pa.array(values, kind) for _, kind, values in columns]
    return pa.table(arrays, names=[name for name, _, _ in columns])


def stored_steps(run: Path, folder: Folder = "rollouts") -> list[int]:
    """Return the steps whose responses are stored in a folder of a run directory, ascending."""
    names = (re.fullmatch(r"step-(\d+)\.parquet", file.name) for file in (run / folder).glob("step-*.parquet"))
    return sorted(int(name[1]) for name in names if name)


def read_groups(run: Path, step: int, folder: Folder = "rollouts") -> Iterator[Group]:
    """Yield the groups of a stored step in sampling order."""
    file = run / folder / f"step-{step:06d}.parquet"
    if not file.is_file():
        stored = step_list(stored_steps(run, folder))
        raise UserError(f"{run} contains no {folder} of step {step}; it has {stored}")
    rows: list[StoredRow] = []
    left = 0  # remaining rollouts of the current group
    for row in _rows(file):
        if not rows:
            left = row["num_rollouts"]
        rows.append(row)
        left -= row["count"]
        if left < 0 or row["prompt_id"] != rows[0]["prompt_id"]:
            raise _damaged(file, f"the counts of prompt {rows[0]['prompt_id']!r} do not add up to its rollouts")
        if left == 0:
            yield _group(file, rows)
            rows = []
    if rows:
        raise _damaged(file, f"the counts of prompt {rows[0]['prompt_id']!r} do not add up to its rollouts")


def step_list(steps: Sequence[int]) -> str:
    """Format steps: `none`, `step 3`, `steps 1 to 40`, `5 steps from 10 to 50, each 10 after ...`."""
    if len(steps) < 2:
        return f"step {steps[0]}" if steps else "none"
    gaps = {later - earlier for earlier, later in pairwise(steps)}
    if gaps == {1}:
        return f"steps {steps[0]} to {steps[-1]}"
    if len(gaps) == 1 and len(steps) > 3:
        return f"{len(steps)} steps from {steps[0]} to {steps[-1]}, each {gaps.pop()} after the one before"
    shown = [str(s) for s in steps] if len(steps) <= 12 else [*map(str, steps[:6]), "...", *map(str, steps[-3:])]
    return f"steps {', '.join(shown)}"


def _group(file: Path, rows: Sequence[StoredRow]) -> Group:
    """Return the group of L rows, one per distinct response. Reject rows that are not in tree order."""
    first = rows[0]
    try:
        token_ids, logprobs, finished, counts = (
            [r[name] for r in rows] for name in ("token_ids", "logprobs", "finished", "count")
        )
        is_given = [r[_GIVEN] for r in rows] if _GIVEN in first else None
        tree = RolloutTree.from_responses((), token_ids, logprobs, finished, is_given, counts)
        if tree.num_responses != len(rows):
            raise ValueError(f"a response of prompt {first['prompt_id']!r} occurs twice")
        verdicts = tuple(Verdict(r["correct"], r["score"], r["extracted"], r["reason"], 0.0) for r in rows)
    except (ValueError, TypeError) as error:
        raise _damaged(file, str(error)) from error
    written = [(tuple(r["token_ids"].tolist()), r["finished"]) for r in rows]
    if written != [(t, done) for (t, _), done in zip(tree.responses(), tree.finished.tolist(), strict=True)]:
        raise _damaged(file, f"the responses of prompt {first['prompt_id']!r} are not in tree order")
    prompt = Prompt(first["prompt_id"], first["prompt"], (), first["reference"], first["domain"], "", first["question"])
    rewards = [np.nan if row["reward"] is None else row["reward"] for row in rows]
    group = Group.from_verdicts(prompt, tree, verdicts)
    return replace(group, reward_L=np.array(rewards), texts=tuple(row["response"] for row in rows))


def _rows(file: Path) -> Iterator[StoredRow]:
    """Yield the rows of a file, with tokens and log-probs as arrays."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            missing = [name for name in _COLUMNS if name not in parquet.schema_arrow.names]
            if missing:
                raise _damaged(file, f"it has no column {missing[0]}")
            names = [name for name in (*_COLUMNS, _GIVEN) if name in parquet.schema_arrow.names]
            for batch in parquet.iter_batches(_ROWS_PER_BATCH, columns=names):
                columns = {n: batch.column(n).to_pylist() for n in names if n not in _LISTS}
                columns |= {n: _slices(batch.column(n)) for n in names if n in _LISTS}
                for i in range(batch.num_rows):
                    yield {name: values[i] for name, values in columns.items()}
    except (OSError, pa.ArrowException) as error:
        raise _damaged(file, str(error).partition("\n")[0]) from error


def _slices(column: Any) -> list[NDArray[Any]]:
    """Return the rows of a list column as arrays. Lists of Python numbers would take eight times the memory."""
    stop = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False)).tolist()
    values = column.flatten().to_numpy(zero_copy_only=False)
    return [values[a:b] for a, b in zip([0, *stop[:-1]], stop, strict=True)]


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"{file} does not contain a run's rollouts: {why}; remove the file and rerun the command")
