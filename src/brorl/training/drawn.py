"""Sampled and verified prompts, and how many rounds of them may fail before a source gives up.

In: rounds of sampled prompts with their verdicts. Out: the error that ends the run after too many rounds in a row
without a mixed group, or in which the machine lost most verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from brorl.algorithms.groups import Group
from brorl.prompts.prompt import Prompt
from brorl.training.source import Collected, NoGroupsError, NoMixedGroupsError, UnverifiedError
from brorl.training.why_not_mixed import why_not_mixed
from brorl.tree import RolloutTree
from brorl.verification.grade import Grader, num_unverified
from brorl.verification.verifier import Verdict

_MAX_LOST_ROUNDS = 3


@dataclass(frozen=True)
class GradedPrompt:
    """A prompt of a round.

    Attributes:
        prompt: The prompt.
        tree: All of its rollouts.
        verdicts: The verdict of each distinct response of `tree`.
        group: Its verified rollouts; None if there are too few.
    """

    prompt: Prompt
    tree: RolloutTree
    verdicts: list[Verdict]
    group: Group | None

    def whole(self, grader: Grader, step: int) -> Group:
        """Return all rollouts as a group: `group` itself if all of them were verified."""
        if self.group is not None and self.group.tree is self.tree:
            return self.group
        return grader.stored_group(self.prompt, self.tree, self.verdicts, step)


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

    def add(self, drawn: Sequence[GradedPrompt]) -> None:
        """Count a round."""
        self._last = drawn
        found = any(one.group is not None and self.keeps(one.group) for one in drawn)
        self._failed = 0 if found else self._failed + 1
        self._lost = self._lost + 1 if _is_lost(drawn) else 0

    @property
    def are_over(self) -> bool:
        """Whether there were too many such rounds in a row."""
        return self._lost >= _MAX_LOST_ROUNDS or self._failed >= self._max_tries

    def error(self, collected: Collected) -> NoGroupsError:
        """Return the error that ends the run, from the last round, and begin again.

        Args:
            collected: Everything that was sampled for the step.
        """
        if self._lost >= _MAX_LOST_ROUNDS:
            self._lost = 0
            return UnverifiedError(_why_lost(self._last), collected)
        groups = [one.group for one in self._last if one.group is not None]
        verdicts = [one.verdicts for one in self._last]
        self._failed = 0
        return NoMixedGroupsError(why_not_mixed(groups, verdicts, self._max_tries, self._adaptive), collected)


def _is_lost(drawn: Sequence[GradedPrompt]) -> bool:
    """Whether more than half of the rollouts of a round were not verified because of the machine."""
    rollouts = sum(one.tree.num_rollouts for one in drawn)
    return 2 * sum(num_unverified(one.tree, one.verdicts) for one in drawn) > rollouts


def _why_lost(drawn: Sequence[GradedPrompt]) -> str:
    """Return the message of an `UnverifiedError`, from the last round."""
    rollouts = sum(one.tree.num_rollouts for one in drawn)
    lost = sum(num_unverified(one.tree, one.verdicts) for one in drawn)
    reasons = Counter(v.reason for one in drawn for v in one.verdicts if v.unverified)
    return (
        f"most rollouts could not be verified because of the machine in {_MAX_LOST_ROUNDS} rounds in a row (in the "
        f"last one {lost:,} of {rollouts:,}, most often: {reasons.most_common(1)[0][0]}); free memory and processes, "
        "or lower verification.workers, and resume the run"
    )
