"""A grader that several threads call, as an asynchronous run does."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from brorl.algorithms.settings import RewardShaping
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree
from brorl.verdict import Verdict
from brorl.verification.grade import Grader
from brorl.verification.verifier import TrialResponses


class Unsafe:
    """Notices a second thread, which it invites by waiting in every call."""

    def __init__(self) -> None:
        self.inside = self.together = 0
        self._pause = threading.Event()

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        self.inside += 1
        self.together = max(self.together, self.inside)
        self._pause.wait(0.005)
        self.inside -= 1
        return [Verdict(text == "4", float(text == "4"), text, "correct" if text == "4" else "wrong", 0.0)
                for _, text in items]  # fmt: skip

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        raise AssertionError(references)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        raise AssertionError(reference, others)


def test_threads_take_turns_and_get_their_own_verdicts() -> None:
    """Also through a copy of the grader, which has the same verifiers."""
    prompt, verifier = Prompt("p", "2 + 2", (1,), "4", "sum"), Unsafe()
    grader = Grader({"sum": verifier}, lambda tokens: str(tokens[0]), RewardShaping())
    graders = [grader, replace(grader, max_new_tokens=1)]

    def verdict(number: int) -> bool:
        tree = RolloutTree.from_responses((1,), [(number % 8,)] * 2)
        (found,) = graders[number % 2].verify([prompt], [tree])
        return bool(found.correct_L[0])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(verdict, range(16))) == [number % 8 == 4 for number in range(16)]
    assert verifier.together == 1
