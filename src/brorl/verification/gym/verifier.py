r"""The verifier for Reasoning Gym tasks, which runs each dataset's guard and scorer in the sandbox.

The sandbox is needed because some scorers evaluate answers as code, and an answer can make others run arbitrarily long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf

from brorl.prompts.prompt import Prompt
from brorl.verdict import (
    BATCH_TIMEOUT,
    CORRECT,
    CRASHED,
    NO_ANSWER,
    OUT_OF_MEMORY,
    TIMEOUT,
    TOO_LONG,
    WRONG,
    Verdict,
    unverified_verdict,
    verdict_of,
)
from brorl.verification.domains.marked_answer import CLOSING, OPENING, find_answer
from brorl.verification.gym.answers import EVALUATED
from brorl.verification.gym.task import GymTask, require_reasoning_gym
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.request import REPLY_BYTES, JudgeTimeout, Limits, LostError, Reply, Undecided, fault_of
from brorl.verification.sandbox.worker import Worker
from brorl.verification.verifier import KEEP_TIMEOUT_S, Pair, TrialResponses, VerdictCache, malformed

_MAX_ANSWER = 100_000
_SCORING = "brorl.verification.gym.entries"
_PROGRAM = f"from {_SCORING} import score"
_MEMORY_BYTES = 1 << 29
_LOADING = Limits(120.0, _MEMORY_BYTES)  # limits for loading the scorers (already imported) before the first answer
_MAX_PROBLEM = 100  # maximum length of a scorer's problem in a reason, in characters
_ANSWERS_PER_PROCESS = 16


class GymVerifier:
    """Accepts answers that pass the dataset's guard and get a score of 0.99 or more from its scorer.

    With `partial_credit`, an incorrect answer receives the scorer's score, at most 0.98. Raises a UserError if
    Reasoning Gym is not installed.
    """

    def __init__(self, programs: ProgramPool, timeout_s: float = 4.0, partial_credit: bool = False) -> None:
        self._cache = VerdictCache(size=200_000)
        require_reasoning_gym()
        self._programs = programs.preloading(_SCORING)
        self._limits = Limits(timeout_s, _MEMORY_BYTES, REPLY_BYTES)
        self._partial_credit = partial_credit

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses. Verdicts from scorers are cached (timeouts for an hour), but crashes are not.

        The reasons are `correct`, `wrong answer`, `no answer`, `answer too long`, `timeout`, `batch timeout`, `out of
        memory`, `verifier crashed`, and `wrong answer: ` followed by a problem such as `the scorer raised ValueError`.
        """
        task_of = {text: GymTask.from_text(text) for text in {prompt.reference for prompt, _ in items}}

        def keep_s(reason: str) -> float:
            if reason == TIMEOUT:
                return KEEP_TIMEOUT_S
            return inf if reason == CORRECT or reason.startswith(WRONG) else 0.0

        def decide(pairs: Sequence[Pair]) -> list[tuple[Verdict, float]]:
            verdict_on = self._score(_groups(pairs, task_of))
            return [(verdict_on[pair], keep_s(verdict_on[pair].reason)) for pair in pairs]

        return self._cache.verify_all(items, lambda prompt, text: _find_answer(task_of[prompt.reference], text), decide)

    def _score(self, groups: Sequence[Sequence[Pair]]) -> dict[Pair, Verdict]:
        """Score groups of answers in the sandbox. If a group times out, its answers are scored again one by one."""
        results = self._programs.run([partial(_judge, group, self._limits) for group in groups])
        verdict_on: dict[Pair, Verdict] = {}
        apart: list[list[Pair]] = []
        for group, result in zip(groups, results, strict=True):
            if isinstance(result, JudgeTimeout) and len(group) > 1:
                apart += [[pair] for pair in group]
            elif isinstance(result, JudgeTimeout):
                verdict_on[group[0]] = verdict_of(BATCH_TIMEOUT, group[0][1])
            elif isinstance(result, Undecided):
                verdict_on |= dict.fromkeys(group, unverified_verdict(result.reason))
            else:
                replies = zip(group, result, strict=True)
                verdict_on |= {pair: _verdict(pair[1], reply, self._partial_credit) for pair, reply in replies}
        return verdict_on | self._score(apart) if apart else verdict_on

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find the references that are not tasks as JSON."""
        return malformed(references, GymTask.from_text)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return the tasks' right answers, wrapped in tags. Tasks from some datasets have none."""
        right, *wrong = (GymTask.from_text(text).answer for text in (reference, *others))
        tagged = [f"{OPENING}{answer}{CLOSING}" for answer in wrong if answer]
        return TrialResponses(f"{OPENING}{right or ''}{CLOSING}", tagged, certain=bool(right))


def _groups(pairs: Sequence[Pair], task_of: Mapping[str, GymTask]) -> list[list[Pair]]:
    """Group the answers by process. Each answer that is evaluated as code gets its own process."""
    alone = [[pair] for pair in pairs if task_of[pair[0]].data_set in EVALUATED]
    shared = [pair for pair in pairs if task_of[pair[0]].data_set not in EVALUATED]
    return alone + [shared[i : i + _ANSWERS_PER_PROCESS] for i in range(0, len(shared), _ANSWERS_PER_PROCESS)]


def _find_answer(task: GymTask, response: str) -> Verdict | str:
    """Return the answer in a response, or the verdict if the answer is missing, too long, or equal to the dataset's."""
    answer = (find_answer(response) or "").strip()
    if not answer or len(answer) > _MAX_ANSWER:
        return verdict_of(TOO_LONG if answer else NO_ANSWER)
    is_own = task.answer is not None and answer == task.answer.strip()
    return verdict_of(CORRECT, answer) if is_own else answer


def _judge(pairs: Sequence[Pair], limits: Limits, worker: Worker) -> list[Reply]:
    """Score pairs in one process. After a failure, the next pair gets a new process."""
    replies: list[Reply] = []
    loaded = False
    for pair in pairs:
        if not loaded:
            reply = worker.load(_PROGRAM, _LOADING)
            if reply.failure and fault_of(reply.failure):
                raise LostError(f"the Reasoning Gym scorers were not loaded: {reply.failure}")
            if reply.failure:
                raise RuntimeError(f"the Reasoning Gym scorers cannot be loaded in the sandbox: {reply.failure}")
        reply = worker.call("score", pair, limits)
        loaded = reply.failure is None
        replies.append(reply)
    return replies


def _verdict(answer: str, reply: Reply, partial_credit: bool) -> Verdict:
    """Return the verdict for a confined process's reply, which is untrusted."""
    match reply:
        case Reply(failure=None, value=(bool(correct), float(score), str() | None as problem)) if 0 <= score <= 1:
            if correct:
                return verdict_of(CORRECT, answer, reply.seconds)
            reason = f"{WRONG}: {problem[:_MAX_PROBLEM]}" if problem else WRONG
            return Verdict(False, score if partial_credit else 0.0, answer, reason, reply.seconds)
    reason = reply.failure if reply.failure in (TIMEOUT, OUT_OF_MEMORY) else CRASHED
    return verdict_of(reason, answer, reply.seconds)
