"""The likely cause when dynamic sampling found no mixed group, and a fix.

In: the groups of the last round, with their verdicts. Out: a sentence. Silent failures come first: the verifier, the
length limit, the format of the answers. Difficulty comes last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from brorl.algorithms.groups import Group
from brorl.verification.verifier import NO_ANSWER, NO_CODE, Verdict, is_failure, is_timeout


def why_not_mixed(
    groups: Sequence[Group], verdicts: Sequence[Sequence[Verdict]], max_tries: int, adaptive: bool
) -> str:
    """Explain why no group is mixed, and name a fix.

    Args:
        groups: The groups of the last round, none of them mixed, without unverified rollouts.
        verdicts: For each prompt of the round the verdict of each distinct response, unverified ones included.
        max_tries: Rounds in a row that found none.
        adaptive: Whether groups that were not mixed got more rollouts.
    """
    solved = sum(g.num_correct > 0 for g in groups)
    state = "all rollouts were correct" if groups and solved == len(groups) else "no rollout was correct"
    if 0 < solved < len(groups):
        state = f"in {solved} of the last {len(groups)} groups all rollouts were correct, in the others none"
    every = [verdict for verdicts_L in verdicts for verdict in verdicts_L]
    cause = _lost_cause(every) or _cut_cause(groups)
    if cause is None and not solved:
        cause = _format_cause(every)
    if cause is None:
        cause = _difficulty(solved, len(groups), adaptive)
    return f"no group was mixed (correct and incorrect rollouts) in {max_tries} rounds in a row ({state}): {cause}"


def _lost_cause(every: Sequence[Verdict]) -> str | None:
    lost = Counter(v.reason for v in every if is_timeout(v.reason) or is_failure(v.reason) or v.unverified)
    if 2 * lost.total() <= len(every):
        return None
    reason, _ = lost.most_common(1)[0]
    return f"{lost.total()} of {len(every)} verifications failed (most often: {reason}); fix the verifier"


def _cut_cause(groups: Sequence[Group]) -> str | None:
    rollouts = sum(g.tree.num_rollouts for g in groups)
    cut = sum(int(g.tree.leaf_count[~g.tree.finished].sum()) for g in groups)
    if 2 * cut <= rollouts:
        return None
    return f"{cut:,} of {rollouts:,} rollouts were cut off at sampling.max_new_tokens; raise it"


def _format_cause(every: Sequence[Verdict]) -> str | None:
    """Return a cause in the format of the answers, where no rollout was correct."""
    if any(0 < v.score < 1 for v in every):
        return (
            "the verifier gives partial scores, but dynamic sampling counts correct responses only; set "
            "rewards.partial_credit: true and dynamic_sampling.enabled: false"
        )
    unanswered = sum(v.reason in (NO_ANSWER, NO_CODE) for v in every)
    if 2 * unanswered > len(every):
        return (
            f"the verifier found no answer in {unanswered:,} of {len(every):,} distinct responses; set prompt.template "
            "to a text that requests the answer format of the verifier"
        )
    return None


def _difficulty(solved: int, num_groups: int, adaptive: bool) -> str:
    if solved == num_groups:
        return "there is nothing left to learn from these prompts; choose harder ones"
    more = "adaptive.max_rollouts and rollouts_per_prompt" if adaptive else "rollouts_per_prompt"
    help_ = (
        f"try more {more}, a higher sampling.temperature, or other prompts (or a lower optimizer.learning_rate, if "
        "they were solved before)"
    )
    if solved:
        return f"there is nothing left to learn from these prompts with this N; {help_}"
    return (
        "check the format and the verifier first: compare the extracted answers with the reference answers. If both "
        f"are right, the prompts are too hard for the model: {help_}"
    )
