"""Calls of a verifier from several threads."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from brorl.prompts.prompt import Prompt
from brorl.verification.one_at_a_time import OneAtATime
from brorl.verification.verifier import TrialResponses, Verdict


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
        return {r: "is odd" for r in references if int(r) % 2}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        return TrialResponses(reference, others)


def test_threads_take_turns_and_get_their_own_verdicts() -> None:
    prompt = Prompt("p", "2 + 2", (1,), "4", "sum")

    def most_together(verifier: Unsafe, called: Unsafe | OneAtATime) -> int:
        with ThreadPoolExecutor(4) as threads:
            texts = [str(i % 8) for i in range(16)]
            found = list(threads.map(lambda text: called.verify_all([(prompt, text)]), texts))
        assert [verdict.correct for (verdict,) in found] == [text == "4" for text in texts]
        return verifier.together

    alone = Unsafe()
    assert most_together(alone, OneAtATime(alone, threading.Lock())) == 1
    assert OneAtATime(alone, threading.Lock()).check_references(["1", "2"]) == {"1": "is odd"}
    assert OneAtATime(alone, threading.Lock()).trial_responses("4", ["5"]) == TrialResponses("4", ["5"])
