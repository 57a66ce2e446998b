"""Rollouts for the page: some steps of a run, each with its prompts' trees, within a number of bytes.

In: a run directory. Out: compressed data, one piece a step, and what was left out. Steps of training are evenly spaced;
of evaluations there are the first, the best and the last. Within a step that is too large by itself the rarest
responses are left out first, then prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brorl.report.page.embedding import compressed
from brorl.report.page.token_texts import TokenTexts
from brorl.report.score_change import best_evaluation
from brorl.runs.run_record import RunRecord
from brorl.runs.stored_rollouts import Folder, StoredGroup, read_groups, stored_steps

_BYTES_PER_NODE = 5  # of compressed data, roughly; what it really takes is measured
_FEWEST_PROMPTS = 16  # a step's budget is spread over so many prompts at least
_UNKNOWN = 1  # log-probs are at most 0; this stands for one that is not known


@dataclass(frozen=True)
class StepRollouts:
    """A step's rollouts, ready to be embedded.

    Attributes:
        step: The step.
        data: Compressed JSON in base64.
        prompts: Prompts in it.
        all_prompts: Prompts that the step sampled.
        responses: Distinct responses in it.
        all_responses: Distinct responses of the step.
    """

    step: int
    data: str
    prompts: int
    all_prompts: int
    responses: int
    all_responses: int


@dataclass(frozen=True)
class RunRollouts:
    """What is on the page of a run's rollouts, or of the responses of its evaluations.

    Attributes:
        steps: The steps chosen, ascending.
        stored: All steps that the run stored.
        tokens_known: Whether tokens could be turned into text.
    """

    steps: tuple[StepRollouts, ...]
    stored: tuple[int, ...]
    tokens_known: bool


def choose_rollouts(run: Path, max_bytes: int, most_steps: int) -> RunRollouts:
    """Choose what of a run's rollouts goes on the page.

    Args:
        run: The run directory.
        max_bytes: How many bytes the data may take in all.
        most_steps: How many steps at most; a step takes time to encode.

    Returns:
        As many evenly spaced steps as there is room for, the first and the last among them.
    """
    stored = stored_steps(run)
    texts = TokenTexts(run)
    made: dict[int, StepRollouts] = {}
    number = min(most_steps, len(stored))
    while number:
        total = 0
        for step in evenly_spaced(stored, number):
            if step not in made:
                # A quarter for each step keeps at least four of them: progress shows only between steps.
                made[step] = encode_step(run, step, texts, max_bytes // min(4, len(stored)))
            total += len(made[step].data)
            if total > max_bytes:
                break
        else:
            return RunRollouts(tuple(made[s] for s in evenly_spaced(stored, number)), tuple(stored), texts.known)
        largest = max(len(step.data) for step in made.values())
        number = min(number - 1, max(max_bytes // largest, 1))
    return RunRollouts((), tuple(stored), texts.known)


def choose_evaluations(run: RunRecord, max_bytes: int) -> RunRollouts:
    """Choose the stored responses of the first, the best and the last evaluation.

    Args:
        run: The run.
        max_bytes: How many bytes the data may take in all.

    Returns:
        As many of the three as there are and as fit, each with an equal share of the bytes.
    """
    stored = stored_steps(run.path, "evaluations")
    best = best_evaluation(run)
    chosen = sorted({*stored[:1], *stored[-1:], *([best["step"]] if best else [])} & set(stored))
    texts = TokenTexts(run.path)
    made = [encode_step(run.path, step, texts, max_bytes // len(chosen), "evaluations") for step in chosen]
    return RunRollouts(tuple(step for step in made if step.prompts), tuple(stored), texts.known)


def evenly_spaced(steps: Sequence[int], number: int) -> list[int]:
    """Return so many of the steps, evenly spaced by their place, with the last one and, from two on, the first."""
    if number >= len(steps):
        return list(steps)
    if number == 1:
        return [steps[-1]]
    return [steps[round(i * (len(steps) - 1) / (number - 1))] for i in range(number)]


def encode_step(run: Path, step: int, texts: TokenTexts, max_bytes: int, folder: Folder = "rollouts") -> StepRollouts:
    """Encode a step's rollouts; too large a step loses its rarest responses, then prompts.

    Args:
        run: The run directory.
        step: The step.
        texts: Texts of the tokens.
        max_bytes: How many bytes the data may take.
        folder: Where the run stored them.
    """
    nodes = max(max_bytes // _BYTES_PER_NODE, 1)
    groups, sizes, all_responses = [], [], 0
    for group in read_groups(run, step, folder):
        all_responses += group.tree.num_responses
        encoded, size = _encode_group(group, texts, nodes // _FEWEST_PROMPTS)
        groups.append(encoded)
        sizes.append(size)
    all_prompts = len(groups)
    kept = _within(groups, sizes, nodes)
    while True:
        data = compressed(_step_data(step, kept, texts))
        if len(data) <= max_bytes or not kept:
            break
        kept = _spread(kept, len(kept) * 2 // 3)
    return StepRollouts(step, data, len(kept), all_prompts, sum(len(g["leaf"]) for g in kept), all_responses)


def _within(groups: list[dict[str, Any]], sizes: Sequence[int], nodes: int) -> list[dict[str, Any]]:
    total = sum(sizes)
    return groups if total <= nodes else _spread(groups, max(len(groups) * nodes // total, 1))


def _spread(groups: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return so many groups, evenly spaced by success, in their old order."""
    if not number:
        return []
    order = sorted(range(len(groups)), key=lambda i: groups[i]["right"] / groups[i]["rollouts"])
    return [groups[i] for i in sorted(evenly_spaced(order, number))]


def _encode_group(group: StoredGroup, texts: TokenTexts, max_nodes: int) -> tuple[dict[str, Any], int]:
    """Return a group as plain values and its number of nodes: the most frequent responses that fit, at least one."""
    whole = group.tree
    leaves = _most_frequent(group, max_nodes)
    tree, node_index = whole.select(leaves)
    right_M = whole.sum_below(np.where(group.correct_L, whole.leaf_count, 0)).astype(np.int64)
    verdicts = [group.verdicts[i] for i in leaves]
    encoded = {
        "id": group.prompt_id,
        "domain": group.domain,
        "prompt": group.prompt,
        "rollouts": whole.num_rollouts,
        "right": group.num_correct,
        "cut": group.num_truncated,
        "responses": whole.num_responses,
        "token": tree.token.tolist(),
        "depth": tree.depth.tolist(),
        "count": whole.count[node_index].tolist(),
        "rightBelow": right_M[node_index].tolist(),
        "logprob": _thousandths(tree.logprob),
        "leaf": tree.leaf.tolist(),
        "leafCount": tree.leaf_count.tolist(),
        "finished": tree.finished.astype(int).tolist(),
        "correct": [int(v.correct) for v in verdicts],
        "reason": [v.reason for v in verdicts],
        "extracted": [v.extracted for v in verdicts],
        "score": [v.score for v in verdicts],
        "reward": group.reward_L[leaves].tolist(),
        "text": [_text_if_needed(group.texts[i], t, texts) for i, (t, _) in zip(leaves, tree.responses(), strict=True)],
    }
    return encoded, tree.num_unique_tokens


def _most_frequent(group: StoredGroup, max_nodes: int) -> NDArray[np.int64]:
    """Return the most frequent responses whose tokens together are few enough, ascending; at least one."""
    tree = group.tree
    if tree.num_unique_tokens <= max_nodes:
        return np.arange(tree.num_responses)
    order = np.argsort(-tree.leaf_count, kind="stable")
    fit = int(np.searchsorted(np.cumsum(tree.length[order]), max_nodes, side="right"))
    return np.sort(order[: max(fit, 1)])


def _text_if_needed(text: str, tokens: Sequence[int], texts: TokenTexts) -> str | None:
    """Return the stored text where the tokens' texts, one after the other, do not already give it."""
    pieces = (texts.piece(token) for token in tokens)
    joined = "".join(piece for piece, special in pieces if not special)
    return None if joined in (text, f" {text}") else text


def _thousandths(logprob_M: NDArray[np.float64]) -> list[int]:
    known_M = np.isfinite(logprob_M)
    rounded_M = np.round(np.where(known_M, logprob_M, 0.0) * 1000)
    return [int(v) if known else _UNKNOWN for v, known in zip(rounded_M.tolist(), known_M.tolist(), strict=True)]


def _step_data(step: int, groups: Sequence[dict[str, Any]], texts: TokenTexts) -> dict[str, Any]:
    """Return a step with one list of the tokens that occur; the groups hold places in it."""
    tokens = sorted({token for group in groups for token in group["token"]})
    place = {token: i for i, token in enumerate(tokens)}
    pieces = [texts.piece(token) for token in tokens]
    return {
        "step": step,
        "tokenIds": tokens,
        "tokenTexts": [text for text, _ in pieces],
        "special": [i for i, (_, special) in enumerate(pieces) if special],
        "groups": [{**group, "token": [place[token] for token in group["token"]]} for group in groups],
    }
