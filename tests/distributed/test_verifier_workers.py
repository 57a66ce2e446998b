"""Verifier workers on Ray give the verdicts of local verification, whatever happens to the workers."""

import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest

from brorl.errors import UserError
from brorl.prompts.prompt import Prompt
from brorl.verdict import Verdict
from brorl.verification.domains.countdown import CountdownVerifier
from brorl.verification.domains.math import MathVerifier
from brorl.verification.sandbox.pool import WorkerPool
from brorl.verification.verifier import TrialResponses, Verifier

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,  # starting Ray takes as long as a hundred other tests
    pytest.mark.linux,
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves the log files of its processes open
]


class FatalVerifier:
    """Accepts responses with an even number of characters; `fatal` ends its process, and so does `once`, once."""

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        return [self._verify(prompt, response) for prompt, response in items]

    def _verify(self, prompt: Prompt, response: str) -> Verdict:
        marker = Path(prompt.reference)
        if response == "malformed":
            raise ValueError("the reference is malformed")
        if response == "fatal" or (response == "once" and not marker.exists()):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        even = len(response) % 2 == 0
        return Verdict(even, float(even), response, "even" if even else "odd", 0.0)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(references, "is checked here")

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        return TrialResponses(reference, others)


def build_verifiers() -> Mapping[str, Verifier]:
    return {
        "math": MathVerifier(WorkerPool(1, timeout_s=60.0)),
        "countdown": CountdownVerifier(),
        "fatal": FatalVerifier(),
    }


def failing() -> Mapping[str, Verifier]:
    raise UserError("no sandbox holds on this machine")


def make_workers(build: Any = build_verifiers, number: int = 2, batch_size: int = 3) -> tuple[Any, list[str]]:
    from brorl.distributed.actors import VerifierActors
    from brorl.distributed.supervisor import PoolConfig

    lines: list[str] = []
    pool_config = PoolConfig("verifier worker", number, lambda _: {"num_cpus": 1}, timeout_s=600.0, max_restarts=50)
    return VerifierActors(build, pool_config, batch_size, lines.append), lines


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Any, list[str]]]:
    workers, lines = make_workers()
    yield workers, lines
    workers.close()


def prompt(reference: str, domain: str) -> Prompt:
    return Prompt(f"question {reference[-9:]}", "?", (1,), reference, domain)


def remote(workers: Any, domain: str) -> Verifier:
    from brorl.distributed.actors import RemoteVerifier

    return RemoteVerifier(build_verifiers()[domain], domain, workers)


def untimed(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [replace(verdict, seconds=0.0) for verdict in verdicts]


def math_items(rng: np.random.Generator) -> list[tuple[Prompt, str]]:
    items = []
    for _ in range(4):
        top, bottom = rng.integers(1, 30), rng.integers(2, 30)
        question = prompt(f"\\frac{{{top}}}{{{bottom}}}", "math")
        answers = [f"{2 * top}/{2 * bottom}", f"{top}/{bottom}", f"{top + 1}/{bottom}", f"{top}", "("]
        items += [(question, f"It is \\boxed{{{answer}}}.") for answer in answers] + [(question, "I do not know.")]
    return [items[i] for i in rng.permutation(len(items))]


def test_verdicts_are_those_of_local_verification(rng: np.random.Generator, shared: Any) -> None:
    workers, lines = shared
    items = math_items(rng)
    expected = build_verifiers()["math"].verify_all(items)
    assert {verdict.correct for verdict in expected} == {True, False}
    assert untimed(remote(workers, "math").verify_all(items)) == untimed(expected)
    puzzles = [
        (prompt("2 3 5 -> 10", "countdown"), response) for response in ("2+3+5", "5+3+2", "5*2", "2*5+3", "3+", "10")
    ]
    local = CountdownVerifier().verify_all(puzzles)
    assert untimed(remote(workers, "countdown").verify_all(puzzles)) == untimed(local)
    assert remote(workers, "math").verify_all([]) == []
    assert not lines


def test_batches_of_lost_workers_are_verified_again(rng: np.random.Generator, shared: Any, tmp_path: Path) -> None:
    workers, lines = shared
    lines.clear()
    texts = ["once", *("x" * n for n in range(1, 12))]
    question = prompt(str(tmp_path / "lost"), "fatal")
    items = [(question, texts[i]) for i in rng.permutation(len(texts))]
    verdicts = remote(workers, "fatal").verify_all(items)
    assert [verdict.correct for verdict in verdicts] == [len(text) % 2 == 0 for _, text in items]
    assert [verdict.extracted for verdict in verdicts] == [text for _, text in items]
    (line,) = lines
    assert re.search(r"verifier worker \d \(.+ at \d+\.\d+\.\d+\.\d+, process \d+\) was lost", line)
    assert f"while verifying 3 responses to prompt {question.id!r}" in line


def test_a_response_that_ends_every_worker_is_unverified(shared: Any, tmp_path: Path) -> None:
    workers, _ = shared
    question = prompt(str(tmp_path / "lost"), "fatal")
    texts = ["a", "aa", "aaa", "b", "fatal", "bb", "c", "cc"]  # the second batch of three is lost twice
    verdicts = remote(workers, "fatal").verify_all([(question, text) for text in texts])
    assert [verdict.unverified for verdict in verdicts] == [3 <= place < 6 for place in range(8)]
    assert {verdict.reason for verdict in verdicts[3:6]} == {"unverified: a verifier worker was lost"}


def test_errors_of_references_reach_the_caller(shared: Any, tmp_path: Path) -> None:
    workers, _ = shared
    question = prompt(str(tmp_path / "lost"), "fatal")
    verifier = remote(workers, "fatal")
    with pytest.raises(ValueError, match="the reference is malformed"):
        verifier.verify_all([(question, text) for text in ("malformed", "a", "b", "c", "dd")])
    assert [verdict.correct for verdict in verifier.verify_all([(question, "aa"), (question, "a")])] == [True, False]
    assert verifier.check_references(["1"]) == {"1": "is checked here"}
    assert verifier.trial_responses("1", ["2"]) == TrialResponses("1", ["2"])


def test_verifiers_that_cannot_be_built_are_an_error_at_once() -> None:
    with pytest.raises(UserError, match="no sandbox holds on this machine"):
        make_workers(failing, number=1)


def test_the_processes_of_a_worker_end_with_it(rng: np.random.Generator) -> None:
    workers, _ = make_workers(number=1)
    try:
        remote(workers, "math").verify_all(math_items(rng))
        ((_, pid),) = workers.supervisor.started
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert children
        children += [grand for child in children for grand in _children(child)]
    finally:
        workers.close()
    while any(_runs(child) for child in children):
        sleep(0.05)


def _children(pid: str) -> list[str]:
    return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def _runs(pid: str) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
