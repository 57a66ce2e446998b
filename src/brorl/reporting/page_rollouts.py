"""The rollouts on the page: a selection of steps with their prompts' trees, within a byte limit.

Training steps are evenly spaced; evaluations are the first, the best and the last. If a step is too large, its rarest
responses are omitted first, then prompts. The page states how many are omitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from brorl.algorithms.groups import Group
from brorl.reporting.frame import compressed
from brorl.reporting.summary import best_evaluation
from brorl.reporting.tokens import TokenText
from brorl.runs.run_directory import StoredRun
from brorl.runs.stored_rollouts import Folder, read_groups, stored_steps

_BYTES_PER_NODE = 5  # of compressed data; a first guess, since the actual size is measured
_MIN_PROMPTS = 16  # divide a step's bytes among at least this many prompts
_UNKNOWN = 1  # stands for an unknown log-prob; log-probs are at most 0


@dataclass(frozen=True)
class StepRollouts:
    """The encoded rollouts of a step, with counts of what is in the data and in the whole step."""

    step: int
    data: str  # compressed JSON in base64
    prompts: int
    all_prompts: int
    responses: int  # distinct ones
    all_responses: int


def choose_rollouts(run: Path, text_of: TokenText, max_bytes: int, max_steps: int) -> tuple[StepRollouts, ...]:
    """Choose as many evenly spaced training steps as fit, including the first and the last."""
    stored = stored_steps(run)
    # A step gets at most a quarter of the bytes, so at least four steps fit and show how the run progressed.
    encode = cache(lambda step: encode_step(run, step, text_of, max_bytes // min(4, len(stored))))
    num_steps = min(max_steps, len(stored))
    largest = total = 0
    while num_steps:
        total = 0
        steps = []
        for step in evenly_spaced(stored, num_steps):
            steps.append(encode(step))
            size = len(steps[-1].data)
            largest, total = max(largest, size), total + size
            if total > max_bytes:
                break
        else:
            return tuple(steps)
        num_steps = min(num_steps - 1, max(max_bytes // largest, 1))
    return ()


def choose_evaluations(run: StoredRun, text_of: TokenText, max_bytes: int) -> tuple[StepRollouts, ...]:
    """Choose the stored responses of the first, best and last evaluations, sharing the bytes equally."""
    stored = stored_steps(run.path, "evaluations")
    best = best_evaluation(run)
    chosen = sorted({*stored[:1], *stored[-1:], *([best.step] if best else [])} & set(stored))
    made = [encode_step(run.path, step, text_of, max_bytes // len(chosen), "evaluations") for step in chosen]
    return tuple(step for step in made if step.prompts)


def evenly_spaced(steps: Sequence[int], number: int) -> list[int]:
    """Return `number` of the steps, evenly spaced by index, with the last and, if `number` is at least 2, the first."""
    if number >= len(steps):
        return list(steps)
    if number == 1:
        return [steps[-1]]
    return [steps[round(i * (len(steps) - 1) / (number - 1))] for i in range(number)]


def encode_step(run: Path, step: int, text_of: TokenText, max_bytes: int, folder: Folder = "rollouts") -> StepRollouts:
    """Encode a step's rollouts. If they are too large, drop the rarest responses, then prompts."""
    max_nodes = max(max_bytes // _BYTES_PER_NODE, 1)
    groups = []
    all_responses = 0
    for group in read_groups(run, step, folder):
        all_responses += group.tree.num_responses
        groups.append(_encode_group(group, text_of, max_nodes // _MIN_PROMPTS))
    nodes = sum(len(group["token"]) for group in groups)
    kept = groups if nodes <= max_nodes else _spread(groups, max(len(groups) * max_nodes // nodes, 1))
    while len(data := compressed(_step_data(step, kept, text_of))) > max_bytes and kept:
        kept = _spread(kept, len(kept) * 2 // 3)
    return StepRollouts(step, data, len(kept), len(groups), sum(len(g["leaf"]) for g in kept), all_responses)


def _spread(groups: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return `number` groups, evenly spaced by pass rate, in their original order."""
    if not number:
        return []
    order = sorted(range(len(groups)), key=lambda i: groups[i]["right"] / max(groups[i]["verified"], 1))
    return [groups[i] for i in sorted(evenly_spaced(order, number))]


def _encode_group(group: Group, text_of: TokenText, max_nodes: int) -> dict[str, Any]:
    """Return a group as plain values, with as many of its most frequent responses as fit (at least one)."""
    full_tree = group.tree
    leaves = np.arange(full_tree.num_responses)
    if full_tree.num_nodes > max_nodes:
        order = np.argsort(-full_tree.leaf_count, kind="stable")
        fit = int(np.searchsorted(np.cumsum(full_tree.total_length[order]), max_nodes, side="right"))
        leaves = np.sort(order[: max(fit, 1)])
    tree, node_index = full_tree.select(leaves)
    right_M = full_tree.sum_below(np.where(group.correct_L, full_tree.leaf_count, 0)).astype(np.int64)
    verified_M = full_tree.sum_below(np.where(group.unverified_L, 0, full_tree.leaf_count)).astype(np.int64)
    verdicts = [group.verdicts[i] for i in leaves.tolist()]
    return {
        "id": group.prompt.id,
        "domain": group.prompt.domain,
        "prompt": group.prompt.text,
        "rollouts": full_tree.num_rollouts,
        "verified": group.num_verified,
        "right": group.num_correct,
        "cut": full_tree.num_truncated,
        "responses": full_tree.num_responses,
        "called": [full_tree.num_turns - full_tree.num_rollouts, full_tree.first_given.size],
        "token": tree.token.tolist(),
        "depth": tree.depth.tolist(),
        "count": full_tree.count[node_index].tolist(),
        "given": tree.given.astype(int).tolist() if full_tree.given.any() else [],
        "rightBelow": right_M[node_index].tolist(),
        "verifiedBelow": verified_M[node_index].tolist() if group.unverified_L.any() else None,
        "logprob": [
            round(logprob * 1000) if known else _UNKNOWN
            for logprob, known in zip(tree.logprob.tolist(), np.isfinite(tree.logprob).tolist(), strict=True)
        ],
        "leaf": tree.leaf.tolist(),
        "leafCount": tree.leaf_count.tolist(),
        "finished": tree.finished.astype(int).tolist(),
        "correct": [int(v.correct) for v in verdicts],
        "unverified": [int(v.unverified) for v in verdicts],
        "reason": [v.reason for v in verdicts],
        "extracted": [v.extracted for v in verdicts],
        "score": [v.score for v in verdicts],
        "reward": [None if v.unverified else r for v, r in zip(verdicts, group.reward_L[leaves].tolist(), strict=True)],
        "text": [
            _text_if_needed(group.texts[i], turns[-1], text_of)
            for i, turns in zip(leaves.tolist(), tree.turns(), strict=True)
        ],
    }


def _text_if_needed(text: str, tokens: Sequence[int], text_of: TokenText) -> str | None:
    """Return the stored text if it differs from the decoded tokens of the last turn."""
    joined = "".join(piece for piece, special in map(text_of, tokens) if not special)
    return None if joined in (text, f" {text}") else text


def _step_data(step: int, groups: Sequence[dict[str, Any]], text_of: TokenText) -> dict[str, Any]:
    """Return a step's data with one list of distinct tokens, to which the groups contain indices."""
    tokens = sorted({token for group in groups for token in group["token"]})
    index = {token: i for i, token in enumerate(tokens)}
    pieces = [text_of(token) for token in tokens]
    return {
        "step": step,
        "tokenIds": tokens,
        "tokenTexts": [text for text, _ in pieces],
        "special": [i for i, (_, special) in enumerate(pieces) if special],
        "groups": [{**group, "token": [index[token] for token in group["token"]]} for group in groups],
    }
