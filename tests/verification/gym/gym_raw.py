"""The scorers of Reasoning Gym without guard and sandbox, for a worker of the tests."""

from brorl.verification.gym.entries import scorer_of
from brorl.verification.gym.task import GymTask


def raw(reference: str, answer: str) -> float:
    task = GymTask.from_text(reference)
    return float(scorer_of(task.data_set, "{}").score_answer(answer=answer, entry=task.entry))
