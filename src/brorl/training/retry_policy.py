"""How many rounds of sampling may fail before a source gives up, and why they failed.

In: rounds of sampled prompts with their verdicts. Out: the error that ends the run after too many rounds in a row
without a mixed group, or in which infrastructure failures lost most verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from brorl.algorithms.groups import Group
from brorl.training.source import Batch, GradedPrompt, NoGroupsError, NoMixedGroupsError, UnverifiedError
from brorl.verification.grade import num_unverified
from brorl.verification.verifier import NO_ANSWER, NO_CODE, Verdict, is_failure, is_timeout

_MAX_LOST_ROUNDS = 3


class RetryPolicy:
    """Counts the rounds in a row without a group to train on, and those in which most verdicts were lost.

    Args:
        max_tries: Give up after this many rounds in a row without a group to train on.
        dynamic_sampling: Whether only mixed groups are trained on.
        adaptive: Whether groups that were not mixed got more rollouts.
    """

    def __init__(self, max_tries: int, dynamic_sampling: bool, adaptive: bool) -> None:
        self._max_tries, self._dynamic_sampling, self._adaptive = max_tries, dynamic_sampling, adaptive
        self._failed = self._lost = 0
        self._last: Sequence[GradedPrompt] = ()

    def restart(self) -> None:
        """Begin a step: rounds without a group are counted from zero."""
        self._failed = 0

    def keeps(self, group: Group) -> bool:
        """Whether a group is trained on."""
        return group.is_mixed or not self._dynamic_sampling

    def add(self, prompts: Sequence[GradedPrompt]) -> None:
        """Count a round."""
        self._last = prompts
        self._failed = 0 if any(p.group and self.keeps(p.group) for p in prompts) else self._failed + 1
        self._lost = self._lost + 1 if 2 * _num_unverified(prompts) > _num_rollouts(prompts) else 0

    @property
    def is_over(self) -> bool:
        """Whether there were too many such rounds in a row."""
        return self._lost >= _MAX_LOST_ROUNDS or self._failed >= self._max_tries

    def error(self, batch: Batch) -> NoGroupsError:
        """Return the error that ends the run, from the last round, and begin again.

        Args:
            batch: Everything that was sampled for the step.
        """
        if self._lost >= _MAX_LOST_ROUNDS:
            self._lost = 0
            return UnverifiedError(_why_unverified(self._last), batch)
        self._failed = 0
        return NoMixedGroupsError(why_not_mixed(self._last, self._max_tries, self._adaptive), batch)


def _num_rollouts(prompts: Sequence[GradedPrompt]) -> int:
    return sum(p.whole.tree.num_rollouts for p in prompts)


def _num_unverified(prompts: Sequence[GradedPrompt]) -> int:
    return sum(num_unverified(p.whole.tree, p.verdicts) for p in prompts)


def _why_unverified(prompts: Sequence[GradedPrompt]) -> str:
    reasons = Counter(v.reason for p in prompts for v in p.verdicts if v.unverified)
    return (
        f"most rollouts could not be verified because of infrastructure failures in {_MAX_LOST_ROUNDS} rounds in a row "
        f"(in the last one {_num_unverified(prompts):,} of {_num_rollouts(prompts):,}, most often: "
        f"{reasons.most_common(1)[0][0]}); free memory and processes, or lower verification.workers, and resume the run"
    )


def why_not_mixed(prompts: Sequence[GradedPrompt], max_tries: int, adaptive: bool) -> str:
    """Explain why no group is mixed, and name a fix. Silent failures come first, difficulty comes last.

    Args:
        prompts: The prompts of the last round, none of whose groups is mixed.
        max_tries: Rounds in a row that found none.
        adaptive: Whether groups that were not mixed got more rollouts.
    """
    groups = [p.group for p in prompts if p.group is not None]
    solved = sum(g.num_correct > 0 for g in groups)
    state = "all rollouts were correct" if groups and solved == len(groups) else "no rollout was correct"
    if 0 < solved < len(groups):
        state = f"in {solved} of the last {len(groups)} groups all rollouts were correct, in the others none"
    every = [verdict for p in prompts for verdict in p.verdicts]
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
