"""The rollouts on the page: some steps of a run, each with its prompts' trees, within a number of bytes.

In: a run directory. Out: compressed data for each step, and the counts of omitted items. Steps of training are
evenly spaced; evaluations are the first, the best and the last. A step that is too large loses its rarest responses
first, then prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brorl.reporting.page.embedding import compressed
from brorl.reporting.score_change import best_evaluation
from brorl.runs.run_record import RunRecord
from brorl.runs.stored_rollouts import Folder, StoredGroup, read_groups, stored_steps

_BYTES_PER_NODE = 5  # of compressed data, roughly; the true size is measured
_FEWEST_PROMPTS = 16  # a step's bytes are divided among at least this many prompts
_UNKNOWN = 1  # stands for an unknown log-prob; log-probs are at most 0


class TokenTexts:
    """Texts of the tokens of a run, from the tokenizer beside its weights.

    Args:
        run: The run directory.
    """

    def __init__(self, run: Path) -> None:
        self._tokenizer = _load_tokenizer(run)
        self.piece = cache(self._piece)

    @property
    def known(self) -> bool:
        """Whether the run's tokenizer could be read."""
        return self._tokenizer is not None

    def _piece(self, token: int) -> tuple[str, bool]:
        """Return the text that a token adds, or its id, and whether it is a special token such as an end token."""
        if self._tokenizer is None or self._tokenizer.id_to_token(token) is None:
            return f"[{token}]", False
        # A single token may lose its leading space. The text that a second copy adds keeps it.
        once, twice = (self._tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        text = twice[len(once) :] if twice.startswith(once) else once
        added = self._tokenizer.get_added_tokens_decoder().get(token)
        return text, bool(added and added.special)


def _load_tokenizer(run: Path) -> Any:
    """Return the tokenizer of a run's last checkpoint; None if there is none that can be read."""
    files = sorted((run / "checkpoints").glob("*/tokenizer.json"))
    if not files:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(files[-1]))
    except Exception:  # the library raises a bare Exception for a file that it cannot read
        return None


@dataclass(frozen=True)
class StepRollouts:
    """A step's rollouts, ready to be embedded.

    Attributes:
        step: The step.
        data: Compressed JSON in base64.
        prompts: Prompts in the data.
        all_prompts: Prompts of the step.
        responses: Distinct responses in the data.
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
    """The rollouts of a run, or the responses of its evaluations, on the page.

    Attributes:
        steps: The chosen steps, ascending.
        stored: All steps that the run stored.
        tokens_known: Whether the run's tokenizer could be read.
    """

    steps: tuple[StepRollouts, ...]
    stored: tuple[int, ...]
    tokens_known: bool


def choose_rollouts(run: Path, max_bytes: int, most_steps: int) -> RunRollouts:
    """Choose the steps of training on the page.

    Args:
        run: The run directory.
        max_bytes: Most bytes of data, over all steps.
        most_steps: Most steps, at least 1; encoding a step takes time.

    Returns:
        As many evenly spaced steps as fit, the first and the last among them.
    """
    stored = stored_steps(run)
    texts = TokenTexts(run)
    made: dict[int, StepRollouts] = {}
    number = min(most_steps, len(stored))
    while number:
        total = 0
        for step in evenly_spaced(stored, number):
            if step not in made:
                # At most a quarter of the bytes per step keeps at least four steps: progress shows between steps.
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
        max_bytes: Most bytes of data, over all evaluations.

    Returns:
        The evaluations that fit, each within an equal fraction of the bytes.
    """
    stored = stored_steps(run.path, "evaluations")
    best = best_evaluation(run)
    chosen = sorted({*stored[:1], *stored[-1:], *([best["step"]] if best else [])} & set(stored))
    texts = TokenTexts(run.path)
    made = [encode_step(run.path, step, texts, max_bytes // len(chosen), "evaluations") for step in chosen]
    return RunRollouts(tuple(step for step in made if step.prompts), tuple(stored), texts.known)


def evenly_spaced(steps: Sequence[int], number: int) -> list[int]:
    """Return `number` of the steps, evenly spaced by their place: the last one, and from two on the first one."""
    if number >= len(steps):
        return list(steps)
    if number == 1:
        return [steps[-1]]
    return [steps[round(i * (len(steps) - 1) / (number - 1))] for i in range(number)]


def encode_step(run: Path, step: int, texts: TokenTexts, max_bytes: int, folder: Folder = "rollouts") -> StepRollouts:
    """Encode a step's rollouts. A step that is too large loses its rarest responses, then prompts.

    Args:
        run: The run directory.
        step: The step.
        texts: Texts of the tokens.
        max_bytes: Most bytes of data.
        folder: "rollouts" of training, or responses of "evaluations".
    """
    nodes = max(max_bytes // _BYTES_PER_NODE, 1)
    groups, sizes, all_responses = [], [], 0
    for group in read_groups(run, step, folder):
        all_responses += group.tree.num_responses
        encoded, size = _encode_group(group, texts, nodes // _FEWEST_PROMPTS)
        groups.append(encoded)
        sizes.append(size)
    all_prompts = len(groups)
    total = sum(sizes)
    kept = groups if total <= nodes else _spread(groups, max(len(groups) * nodes // total, 1))
    while True:
        data = compressed(_step_data(step, kept, texts))
        if len(data) <= max_bytes or not kept:
            break
        kept = _spread(kept, len(kept) * 2 // 3)
    return StepRollouts(step, data, len(kept), all_prompts, sum(len(g["leaf"]) for g in kept), all_responses)


def _spread(groups: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return `number` groups, evenly spaced by pass rate, in their old order."""
    if not number:
        return []
    order = sorted(range(len(groups)), key=lambda i: groups[i]["right"] / max(groups[i]["verified"], 1))
    return [groups[i] for i in sorted(evenly_spaced(order, number))]


def _encode_group(group: StoredGroup, texts: TokenTexts, max_nodes: int) -> tuple[dict[str, Any], int]:
    """Return a group as plain values, with its most frequent responses that fit, and its number of nodes."""
    whole = group.tree
    leaves = _most_frequent(group, max_nodes)
    tree, node_index = whole.select(leaves)
    right_M = whole.sum_below(np.where(group.correct_L, whole.leaf_count, 0)).astype(np.int64)
    verified_M = whole.sum_below(np.where(group.unverified_L, 0, whole.leaf_count)).astype(np.int64)
    verdicts = [group.verdicts[i] for i in leaves]
    encoded = {
        "id": group.prompt_id,
        "domain": group.domain,
        "prompt": group.prompt,
        "rollouts": whole.num_rollouts,
        "verified": group.num_verified,
        "right": group.num_correct,
        "cut": group.num_truncated,
        "responses": whole.num_responses,
        "token": tree.token.tolist(),
        "depth": tree.depth.tolist(),
        "count": whole.count[node_index].tolist(),
        "rightBelow": right_M[node_index].tolist(),
        "verifiedBelow": verified_M[node_index].tolist() if group.unverified_L.any() else None,
        "logprob": _thousandths(tree.logprob),
        "leaf": tree.leaf.tolist(),
        "leafCount": tree.leaf_count.tolist(),
        "finished": tree.finished.astype(int).tolist(),
        "correct": [int(v.correct) for v in verdicts],
        "unverified": [int(v.unverified) for v in verdicts],
        "reason": [v.reason for v in verdicts],
        "extracted": [v.extracted for v in verdicts],
        "score": [v.score for v in verdicts],
        "reward": [None if v.unverified else r for v, r in zip(verdicts, group.reward_L[leaves].tolist(), strict=True)],
        "text": [_text_if_needed(group.texts[i], t, texts) for i, (t, _) in zip(leaves, tree.responses(), strict=True)],
    }
    return encoded, tree.num_unique_tokens


def _most_frequent(group: StoredGroup, max_nodes: int) -> NDArray[np.int64]:
    """Return the indices of the most frequent responses that fit, ascending; at least one."""
    tree = group.tree
    if tree.num_unique_tokens <= max_nodes:
        return np.arange(tree.num_responses)
    order = np.argsort(-tree.leaf_count, kind="stable")
    fit = int(np.searchsorted(np.cumsum(tree.length[order]), max_nodes, side="right"))
    return np.sort(order[: max(fit, 1)])


def _text_if_needed(text: str, tokens: Sequence[int], texts: TokenTexts) -> str | None:
    """Return the stored text if the texts of the tokens, joined, differ from it."""
    pieces = (texts.piece(token) for token in tokens)
    joined = "".join(piece for piece, special in pieces if not special)
    return None if joined in (text, f" {text}") else text


def _thousandths(logprob_M: NDArray[np.float64]) -> list[int]:
    known_M = np.isfinite(logprob_M)
    rounded_M = np.round(np.where(known_M, logprob_M, 0.0) * 1000)
    return [int(v) if known else _UNKNOWN for v, known in zip(rounded_M.tolist(), known_M.tolist(), strict=True)]


def _step_data(step: int, groups: Sequence[dict[str, Any]], texts: TokenTexts) -> dict[str, Any]:
    """Return a step with one list of its distinct tokens; the groups hold indices into it."""
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
