"""Answers to tasks of Reasoning Gym: right ones are accepted, junk and exploits are not, and nothing escapes."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from brorl.errors import UserError
from brorl.prompts.prompt import Prompt
from brorl.verdict import Verdict
from brorl.verification.domains.marked_answer import find_answer
from brorl.verification.gym.answers import EVALUATED, GUARDS
from brorl.verification.gym.task import GymTask
from brorl.verification.gym.verifier import GymVerifier
from brorl.verification.sandbox.pool import ProgramPool, VerifierCall, WorkerPool
from brorl.verification.sandbox.request import Fault, JudgeTimeout, Limits, LostError, Reply, Undecided
from brorl.verification.sandbox.worker import Judge, T, Worker
from case_tables import table
from each_row import each_row
from scripted_programs import Request, ScriptedPool

TABLE = Path(__file__).parents[3] / "scripts" / "make_gym_table.py"
MAZE = GymTask("maze", {"question": "?", "answer": "7", "metadata": {}})

needs_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the extra: pip install 'brorl[gym]'")
linux = pytest.mark.linux


def prompt(task: GymTask) -> Prompt:
    return Prompt(f"{task.data_set}:{task.index}", "?", (1,), task.to_text(), "gym")


@each_row(*table(__file__, "the_answer_of_a_response"))
def test_the_answer_of_a_response(response: str, answer: str | None) -> None:
    assert ((find_answer(response) or "").strip() or None) == answer


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brorl.verification.gym.verifier.require_reasoning_gym", lambda: None)


def replying(reply: Reply | LostError) -> ScriptedPool:
    """A sandbox in which every call has the same reply."""

    def script(request: Request) -> Reply:
        if isinstance(reply, LostError):
            raise reply
        return Reply(None, None, 0.0) if request.kind == "load" else reply

    return ScriptedPool(script)


def verified(
    reply: Reply | LostError, *answers: str, partial_credit: bool = True
) -> tuple[list[Verdict], ScriptedPool]:
    programs = replying(reply)
    verifier = GymVerifier(programs, partial_credit=partial_credit)
    return verifier.verify_all([(prompt(MAZE), answer) for answer in answers]), programs


@pytest.mark.parametrize(
    ("value", "failure", "correct", "score", "reason"),
    [
        ((True, 1.0, None), None, True, 1.0, "correct"),
        ((False, 0.25, None), None, False, 0.25, "wrong answer"),
        ((False, 0.0, "rejected by a guard"), None, False, 0.0, "wrong answer: rejected by a guard"),
        ((True, 5.0, None), None, False, 0.0, "verifier crashed"),
        ((False, float("nan"), None), None, False, 0.0, "verifier crashed"),
        ((1, 1.0, None), None, False, 0.0, "verifier crashed"),
        ([True, 1.0], None, False, 0.0, "verifier crashed"),
        (None, "timeout", False, 0.0, "timeout"),
        (None, "out of memory", False, 0.0, "out of memory"),
        (None, "exited with code 0", False, 0.0, "verifier crashed"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_a_confined_process_returns_is_checked(
    value: object, failure: str | None, correct: bool, score: float, reason: str
) -> None:
    (verdict,), _ = verified(Reply(value, failure, 0.5), "8")
    assert (verdict.correct, verdict.score, verdict.reason, verdict.extracted) == (correct, score, reason, "8")


@pytest.mark.parametrize(("correct", "score", "expected"), [(False, 0.25, 0.0), (True, 1.0, 1.0)])
@pytest.mark.usefixtures("installed")
def test_without_partial_credit_a_score_is_0_or_1(correct: bool, score: float, expected: float) -> None:
    reply = Reply((correct, score, None), None, 0.5)
    verdicts, _ = verified(reply, "8", "<answer>8</answer>", partial_credit=False)
    assert [verdict.score for verdict in verdicts] == [expected, expected]


@pytest.mark.usefixtures("installed")
def test_a_forged_problem_is_short() -> None:
    (verdict,), _ = verified(Reply((False, 0.0, "x" * 100_000), None, 0.5), "8")
    assert verdict.reason.startswith("wrong answer: xxx")
    assert len(verdict.reason) < 200


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.usefixtures("installed")
def test_scorers_that_are_not_loaded_leave_answers_unverified(fault: Fault) -> None:
    """No answer has a part in it: the process is new. The limit of an answer is not that of the load."""
    loads: list[Request] = []

    def script(request: Request) -> Reply:
        if request.kind == "load":
            loads.append(request)
            return Reply(None, str(fault) if len(loads) == 2 else None, 0.1)
        return Reply(None, "timeout", 0.1)

    verifier = GymVerifier(ScriptedPool(script), timeout_s=0.01)
    verdicts = verifier.verify_all([(prompt(MAZE), answer) for answer in ("8", "9", "10")])
    assert [verdict.reason for verdict in verdicts] == [
        f"unverified: the Reasoning Gym scorers were not loaded: {fault}"
    ] * 3
    assert min(load.limits.seconds for load in loads) >= 60
    again = verifier.verify_all([(prompt(MAZE), "8")])
    assert again[0].reason == "timeout"


@pytest.mark.usefixtures("installed")
def test_an_answer_that_uses_the_time_of_all_harms_no_answer_beside_it() -> None:
    """A group of answers without time is scored again apart."""

    class ShortPool(ScriptedPool):
        """Cuts off the judges whose answer is slow."""

        def _decision(self, judge: Judge[T]) -> T | Undecided:
            begin = len(self.requests)
            decision = super()._decision(judge)
            is_slow = any("slow" in (request.arguments or ()) for request in self.requests[begin:])
            return JudgeTimeout("over") if is_slow else decision

    pool = ShortPool(lambda _request: Reply((False, 0.0, None), None, 0.1))
    verdicts = GymVerifier(pool).verify_all([(prompt(MAZE), answer) for answer in ("6", "slow", "9")])
    assert [verdict.reason for verdict in verdicts] == ["wrong answer", "batch timeout", "wrong answer"]
    assert pool.num_judges == 4


@pytest.mark.usefixtures("installed")
def test_a_lost_worker_leaves_answers_unverified() -> None:
    verdicts, _ = verified(LostError("a worker was lost"), "8", "7", "9")
    assert [verdict.unverified for verdict in verdicts] == [True, False, True]
    assert verdicts[0].reason == "unverified: a worker was lost"


@pytest.mark.usefixtures("installed", "no_own_time")
def test_an_answer_is_scored_once_and_the_own_answer_never() -> None:
    texts = ["8", "<answer>8</answer>", "7", " 7 ", "x" * 100_001, ""]
    verdicts, programs = verified(Reply((False, 0.0, None), None, 0.5), *texts)
    called = [request for request in programs.requests if request.kind == "call"]
    assert [request.arguments and request.arguments[1] for request in called] == ["8"]
    assert [v.reason for v in verdicts] == [
        "wrong answer", "wrong answer", "correct", "correct", "answer too long", "no answer",
    ]  # fmt: skip
    assert [v.seconds for v in verdicts] == [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.usefixtures("installed")
def test_answers_that_are_evaluated_share_no_process() -> None:
    puzzle = GymTask("puzzle24", {"answer": "4*6", "metadata": {"numbers": [4, 6]}})
    for task, processes in ((puzzle, 5), (MAZE, 1)):
        programs = replying(Reply((False, 0.0, None), None, 0.0))
        verifier = GymVerifier(programs)
        verifier.verify_all([(prompt(task), f"{number} + 1") for number in range(5)])
        assert sum(request.kind == "load" for request in programs.requests) == processes


def test_a_missing_extra_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brorl.verification.gym.task.find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"pip install 'brorl\[gym\]'"):
        GymVerifier(ProgramPool())


# From here on with Reasoning Gym, in one pool of workers and one sandbox for all tests.


def generate(pool: WorkerPool, name: str, first: int, number: int) -> list[GymTask]:
    path = Path(__file__).parents[3] / "src" / "brorl" / "verification" / "gym" / "entries.py"
    entries = [(name, first + place) for place in range(number)]
    (result,) = pool.run([VerifierCall(f"{path}:generate", (entries, {}, 0))])
    assert result.failure is None
    return [GymTask.from_text(task) for _, task, dropped in result.value if dropped is None]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1, timeout_s=300.0, memory_bytes=4 << 30) as made:
        yield made


@pytest.fixture(scope="module")
def verifier() -> Iterator[GymVerifier]:
    with ProgramPool(1) as programs:
        made = GymVerifier(programs, timeout_s=20.0)
        yield made
        made._programs.close()


FAST = ["binary_matrix", "leg_counting", "n_queens", "polynomial_multiplication", "propositional_logic"]
FAST += ["puzzle24", "simple_integration", "sokoban", "spiral_matrix", "string_insertion", "word_ladder"]


@needs_gym
@linux
@pytest.mark.slow
@pytest.mark.usefixtures("no_own_time")
def test_verdicts_in_the_sandbox(pool: WorkerPool, verifier: GymVerifier, rng: np.random.Generator) -> None:
    """Answers that are right in another form reach the scorers, which load nothing more in the sandbox."""
    index = int(rng.integers(1000))
    task_of = {name: generate(pool, name, index, 1)[0] for name in FAST}
    logic, steps = task_of["propositional_logic"], task_of["sokoban"].answer
    assert steps is not None
    cases = [(name, f"{task.answer} ", True) for name, task in task_of.items() if task.answer]
    cases += [(name, "junk", False) for name in FAST]
    cases += [
        ("sokoban", f"{steps[:1]}z{steps[1:]}", False),
        ("sokoban", f"{steps} or {steps[::-1]}", False),
        ("word_ladder", str(task_of["word_ladder"].answer).lower(), True),
        ("puzzle24", f"({task_of['puzzle24'].answer})", True),
        ("simple_integration", f"{task_of['simple_integration'].answer} - 7", True),
        ("polynomial_multiplication", f"({task_of['polynomial_multiplication'].answer}) + 0", True),
        ("propositional_logic", logic.entry["metadata"]["premises"][0], False),
        ("propositional_logic", "¬" * 398 + logic.entry["metadata"]["premises"][0], False),
    ]
    verdicts = verifier.verify_all([(prompt(task_of[name]), f"<answer>{answer}</answer>") for name, answer, _ in cases])
    wrong = [(case, verdict) for case, verdict in zip(cases, verdicts, strict=True) if verdict.correct != case[2]]
    assert wrong == []
    assert {verdict.reason.partition(":")[0] for verdict in verdicts} == {"correct", "wrong answer"}
    again = verifier.verify_all([(prompt(task_of[name]), answer) for name, answer, _ in cases])
    assert sum(verdict.seconds for verdict in again) == 0.0


@needs_gym
@linux
@pytest.mark.slow
def test_junk_is_never_correct(pool: WorkerPool) -> None:
    """One entry of every dataset, at a great index; the page of the docs has more entries."""
    (reply,) = pool.run([VerifierCall(f"{TABLE}:settings", ())])
    names = list(reply.value["settings"])
    results = pool.run([VerifierCall(f"{TABLE}:measure", (name, 1, 4_321)) for name in names])
    assert {name: r.failure for name, r in zip(names, results, strict=True) if r.failure} == {}
    assert {name: r.value["accepted"] for name, r in zip(names, results, strict=True) if r.value["accepted"]} == {}
    assert set(GUARDS) <= set(names)
    page = (TABLE.parents[1] / "docs" / "reference" / "gym.md").read_text("utf-8").splitlines()
    rows = {line.split("`")[1]: line for line in page if line.startswith("| `")}
    assert set(rows) == set(names), "run: python scripts/make_gym_table.py"
    for name, keys in reply.value["settings"].items():
        cells = [cell.strip() for cell in rows[name].strip("|").split("|")]
        assert cells[1] == ", ".join(f"`{key}`" for key in keys), name
        assert cells[4] == (GUARDS[name].why if name in GUARDS else ""), name


@needs_gym
@linux
@pytest.mark.slow
def test_an_answer_with_two_candidates_earns_no_partial_credit(pool: WorkerPool, rng: np.random.Generator) -> None:
    scoring = Path(__file__).parents[3] / "src" / "brorl" / "verification" / "gym" / "entries.py"
    calls = []
    for name in ("gsm_symbolic", "spell_backward", "time_intervals", "kakurasu"):
        tasks = generate(pool, name, int(rng.integers(1000)), 8)  # words of several lengths: some scores are rounded
        calls += [VerifierCall(f"{scoring}:score", (task.to_text(), f"{task.answer} or 77 a")) for task in tasks]
    replies = pool.run(calls)
    assert [(reply.failure, *reply.value[:2]) for reply in replies] == [(None, False, 0.0)] * len(calls)
    assert {reply.value[2] for reply in replies} >= {"rejected by a guard", "not the dataset's answer"}


def raw_judge(reference: str, answer: str, limits: Limits, worker: Worker) -> Reply:
    """Score without a guard, to see that the sandbox alone holds."""
    loaded = worker.load(Path(__file__).with_name("gym_raw.py").read_text("utf-8"), limits)
    assert loaded.failure is None, loaded
    return worker.call("raw", (reference, answer), limits)


@needs_gym
@linux
@pytest.mark.slow
def test_exploits_of_evaluating_scorers_reach_nothing(pool: WorkerPool, verifier: GymVerifier, tmp_path: Path) -> None:
    """An ordinary worker executes the exploit; the guard rejects it, and the sandbox without the guard contains it."""
    tmp_path.chmod(0o777)
    canary = tmp_path / "canary"
    exploit = f"__import__('os').system('touch {canary}') or open('{canary}', 'w')"
    executed = []
    limits = Limits(20.0)
    for name in sorted(EVALUATED):
        (task,) = generate(pool, name, 0, 8)[:1]
        (verdict,) = verifier.verify_all([(prompt(task), exploit)])
        assert not verdict.correct
        assert verdict.reason == "wrong answer: rejected by a guard"
        (reply,) = verifier._programs.run([partial(raw_judge, task.to_text(), exploit, limits)])
        assert not isinstance(reply, Undecided)
        assert reply.value != 1.0
        assert not canary.exists(), name
        pool.run([VerifierCall(f"{Path(__file__).with_name('gym_raw.py')}:raw", (task.to_text(), exploit))])
        if canary.exists():
            executed.append(name)
            canary.unlink()
    assert executed == sorted(EVALUATED)


@needs_gym
@linux
@pytest.mark.slow
def test_a_bomb_ends_its_own_verdict_alone(pool: WorkerPool, verifier: GymVerifier) -> None:
    (task,) = generate(pool, "polynomial_multiplication", 0, 1)
    (cube,) = generate(pool, "rubiks_cube", 0, 1)
    moves = cube.entry["metadata"]["example_correct_answer"]
    bombed = GymVerifier.__new__(GymVerifier)
    bombed.__dict__.update({**verifier.__dict__, "_limits": Limits(2.0, 1 << 28)})
    items = [(prompt(task), "9**9**9"), (prompt(cube), "R " * 40_000), (prompt(cube), moves), (prompt(task), "8")]
    verdicts = bombed.verify_all(items)
    assert verdicts[0].reason in ("timeout", "out of memory", "verifier crashed")
    assert not any(verdict.correct for verdict in verdicts[:2])
    assert verdicts[2].correct
    assert verdicts[3].reason == "wrong answer"
