"""Nothing that a response controls takes superlinear time in this process: hostile strings in every domain."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from random import Random
from types import FrameType

import numpy as np
import pytest
from domains.test_instruction_kinds import LANGUAGE_TEXTS, TEXTS
from hostile_strings import hostile_string, literals, random_parts

from brorl.api.verify import VerifyResult
from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases, TestCode
from brorl.prompts.instructions import Instruction, Instructions
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import Question
from brorl.prompts.science import Choices, MeasuredAnswer
from brorl.verification.domains.code import CodeVerifier
from brorl.verification.domains.countdown import CountdownVerifier
from brorl.verification.domains.ifeval import InstructionsVerifier, detect
from brorl.verification.domains.math import MathVerifier
from brorl.verification.domains.science import ScienceVerifier
from brorl.verification.domains.verifiers import DOMAINS, DomainVerifier
from brorl.verification.grade import StoredResponse, rescore
from brorl.verification.gym.task import GymTask
from brorl.verification.gym.verifier import GymVerifier
from brorl.verification.sandbox.pool import WorkerPool
from brorl.verification.sandbox.request import Reply
from brorl.verification.thoughts import THINK
from brorl.verification.verifier import Verifier
from case_tables import table
from scripted_programs import Request, ScriptedPool

pytestmark = pytest.mark.linux

LENGTH = 100_000  # characters
LIMIT_S = 1.0  # of processor time; linear work mostly takes milliseconds for this length, quadratic work many seconds
SHORTER = 5  # linear work takes a fifth of its time for a fifth of the length, and quadratic work a 25th
TAIL = 1_900  # most extractors read the last 2,000 characters: there, a run must be that short to follow its start
# Strings per domain and length; instructions are read 25 times in up to eight ways.
NUMBERS = {"code": 100, "countdown": 100, "gym": 250, "ifeval": 5, "math": 250, "science": 250}
NEEDS = {"gym": "reasoning_gym", "ifeval": "langdetect"}


class Stopped(BaseException):
    """The limit of processor time is reached."""


class IdlePool(WorkerPool):
    """A pool that finds every answer wrong, without a worker."""

    def map(self, _function: str, items: Sequence[object], *_rest: object, at_once: int = 1) -> list[Reply]:  # noqa: ARG002
        return [Reply("wrong answer", None, 0.0) for _ in items]


def reply(request: Request) -> Reply:
    if request.kind == "call" and len(request.arguments or ()) == 4:  # the choice of a block
        return Reply(0, None, 0.0)
    return Reply("", None, 0.0) if request.kind == "run" else Reply((False, 0.0, None), None, 0.0)


def prompts(domain: str, *references: str) -> list[Prompt]:
    return [Prompt(f"{domain}{place}", "?", (1,), text, domain) for place, text in enumerate(references)]


def verifier_of(domain: str) -> tuple[Verifier, list[Prompt]]:
    """Return a verifier without processes, and prompts with the kinds of references of its domain."""
    match domain:
        case "code":
            tests = [
                CodeTests(CallCases("f", ((1,),), (1,)), prelude="import math"),
                CodeTests(StdinCases(("1\n",), ("1\n",)), prelude="import math"),
                CodeTests(TestCode("f", "assert f(1) == 1 + 0")),
            ]
            return CodeVerifier(ScriptedPool(reply)), prompts(domain, *(test.to_text() for test in tests))
        case "countdown":
            return CountdownVerifier(), prompts(domain, "3 5 7 -> 22")
        case "gym":
            task = GymTask("maze", {"question": "?", "answer": "7", "metadata": {}})
            return GymVerifier(ScriptedPool(reply)), prompts(domain, task.to_text())
        case "ifeval":
            detect("The profiles of the languages are loaded once, before any time is taken.")
            kinds = {kind: arguments for kind, arguments, *_ in [*TEXTS, *LANGUAGE_TEXTS]}
            instructions = Instructions(tuple(Instruction(*pair) for pair in kinds.items()), loose=True)
            return InstructionsVerifier(), prompts(domain, instructions.to_text())
        case "math":
            return MathVerifier(IdlePool()), prompts(domain, "42", "C", "x^2 + 1", "\\text{Tuesday}")
        case "science":
            references = [
                Choices(("one", "a long text", "H2O", "-1"), 1),
                MeasuredAnswer("9.8 m/s^2", 0.05),
                *map(MeasuredAnswer, ("x", "H_2O", "red giant", "10 to 20 Hz", "15 apples", "3:1", "5 m/s east")),
            ]
            return ScienceVerifier(IdlePool()), prompts(domain, *(reference.to_text() for reference in references))
        case _:
            raise ValueError(f"add a verifier of the domain {domain!r} here")


def seconds(verifier: Verifier, prompt: Prompt, response: str, limit_s: float = LIMIT_S) -> float:
    """Return the processor time of a verification in this process, which is stopped soon after a limit."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Stopped

    before = signal.signal(signal.SIGVTALRM, stop)
    begin = time.process_time()
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 2 * limit_s)
        DomainVerifier(verifier, THINK).verify_all([(prompt, response)])
    except Stopped:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return time.process_time() - begin


def slow_strings(domain: str, number: int, random: Random) -> list[tuple[str, tuple[str, str, str], str]]:
    """Return the prompt, the parts and the time of hostile strings that take superlinear time."""
    verifier, asked = verifier_of(domain)
    slow = []
    for _ in range(number):
        parts, prompt = random_parts(random), random.choice(asked)
        for short, length in ((TAIL, TAIL), (LENGTH // SHORTER, LENGTH)):
            if (first := seconds(verifier, prompt, hostile_string(parts, short))) > LIMIT_S / SHORTER**2:
                limit = LIMIT_S if short == length else max(LIMIT_S, 2 * SHORTER * first)
                spent = seconds(verifier, prompt, hostile_string(parts, length), limit)
                if spent > limit:
                    slow.append((prompt.id, parts, f"{spent:.1f} s"))
    return slow


KNOWN = [
    *((domain, " " * LENGTH) for domain in sorted(DOMAINS)),
    ("code", "```python\nfrom __future__ import" + " " * 99_900 + "(\n```"),
    *(
        ("ifeval", part * (LENGTH // len(part)))
        for part in ("</think>", "```a\n</think>\n", "````` `\n", "<think>`", "~")
    ),
    ("ifeval", "[" * 101 + '[\\"' * 30_000),  # a string that never closes, in JSON with many brackets
    ("math", "\\boxed{a" + "." * LENGTH + "}"),
    ("science", "\\boxed{a" + ", " * LENGTH + "}"),
]


@pytest.mark.parametrize(("domain", "response"), KNOWN)
def test_known_strings_take_linear_time(domain: str, response: str) -> None:
    require(domain)
    verifier, asked = verifier_of(domain)
    for prompt in asked:
        assert seconds(verifier, prompt, response) < LIMIT_S


@pytest.mark.parametrize("domain", sorted(DOMAINS))
def test_hostile_strings_take_linear_time(domain: str, rng: np.random.Generator) -> None:
    require(domain)
    assert slow_strings(domain, NUMBERS[domain], Random(int(rng.integers(2**32)))) == []


@pytest.mark.slow
@pytest.mark.parametrize("domain", sorted(DOMAINS))
def test_many_hostile_strings_take_linear_time(domain: str, rng: np.random.Generator) -> None:
    require(domain)
    assert slow_strings(domain, 20 * NUMBERS[domain], Random(int(rng.integers(2**32)))) == []


def test_the_words_of_hostile_strings_come_from_the_patterns() -> None:
    """`__future__` starts a pattern of programs, `answer` of sentences, `fbox` of boxes, `circ` of units."""
    assert {"__future__", "answer", "fbox", "\\circ"} <= set(literals())


@pytest.mark.slow
def test_quadratic_time_is_stopped() -> None:
    class Quadratic:
        def verify_all(self, _items: object) -> None:
            re.match(r"(?:a*a*)*b", "a" * 10_000)

    assert 0.1 < seconds(Quadratic(), prompts("math", "1")[0], "", limit_s=0.1) < 2.0  # type: ignore[arg-type]


SLEEP_S = 0.05


@pytest.mark.parametrize(*table(__file__, "the_slowest_verifications_count_the_time_of_this_process"))
def test_the_slowest_verifications_count_the_time_of_this_process(
    domain: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(domain)
    verifier, asked = verifier_of(domain)
    prompt = asked[-1 if part == "science.extract_answer" else 0]
    module, _, name = f"brorl.verification.{part if domain == 'gym' else f'domains.{part}'}".rpartition(".")
    function = getattr(import_module(module), name)
    monkeypatch.setattr(f"{module}.{name}", lambda *args, **options: time.sleep(SLEEP_S) or function(*args, **options))
    question = Question("q", "?", prompt.reference, domain)
    stored = StoredResponse("rows.jsonl:7", "q", None, "```python\ndef f(): pass\n```\n\\boxed{41}")
    rescored, spent = rescore([(stored, question)], {domain: verifier})
    assert SLEEP_S <= rescored[0].verdict.seconds <= spent
    result = VerifyResult("rows.jsonl", "data", tuple(rescored), (), (), spent)
    assert result.lines[-1] == f"slowest: {rescored[0].verdict.seconds:.2f} s (rows.jsonl:7)"


def require(domain: str) -> None:
    if domain in NEEDS and not find_spec(NEEDS[domain]):
        pytest.skip(f"needs {NEEDS[domain]}")
