"""Programs run as a judge's machine would run them, within their limits, and are gone afterwards."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from judges import (
    LIMITS,
    call_judge,
    descendants,
    ended,
    is_running,
    outside_judge,
    programs,
    returned,
    run_judge,
    servers,
    wait_until,
)

from brorl.errors import UserError
from brorl.verification.sandbox import process
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.request import Limits, LostError, Reply, Undecided
from brorl.verification.sandbox.values import MAX_DEPTH, encode
from brorl.verification.sandbox.worker import Worker
from case_tables import table

pytestmark = pytest.mark.linux
SHORT = Limits(seconds=0.15)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProgramPool]:
    with ProgramPool(num_workers=2) as pool:
        yield pool


@pytest.mark.parametrize(*table(__file__, "a_program_runs_as_a_script"))
def test_a_program_runs_as_a_script(pool: ProgramPool, source: str, stdin: str, stdout: str) -> None:
    reply = ended(pool, source, stdin)
    assert (reply.value, reply.failure) == (stdout, None)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["seccomp", "auto"])
def test_programs_find_the_same_random_state_and_order_of_sets(level: str, rng: np.random.Generator) -> None:
    words = [str(word) for word in rng.integers(1 << 40, size=20)]
    source = f"import random\nprint(random.random(), set({words}), __import__('threading').active_count())"
    with ProgramPool(2, level) as one, ProgramPool(1, level) as other:
        outputs = {ended(pool, source).value for pool in (one, one, other)}
    assert len(outputs) == 1
    assert outputs.pop().endswith("} 1\n")


def test_input_of_any_size_arrives(pool: ProgramPool, rng: np.random.Generator) -> None:
    numbers = rng.integers(-(10**9), 10**9, 300_000)
    source = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"
    assert ended(pool, source, "\n".join(map(str, numbers))).value == f"{int(numbers.sum())}\n"


def test_deep_recursion_works(pool: ProgramPool, rng: np.random.Generator) -> None:
    depth = int(rng.integers(20_000, 50_000))
    source = f"""
import sys
from functools import lru_cache
sys.setrecursionlimit(10**6)
@lru_cache(None)
def f(n): return 0 if n == 0 else f(n - 1) + 1
print(f({depth}))
"""
    assert ended(pool, source).value == f"{depth}\n"


@pytest.mark.parametrize(*table(__file__, "a_failure_has_its_cause"))
def test_a_failure_has_its_cause(pool: ProgramPool, source: str, failure: str) -> None:
    reply = ended(pool, source)
    assert reply.failure == failure
    assert len(reply.value) <= LIMITS.output_bytes


def test_an_endless_program_that_no_signal_ends_is_stopped(pool: ProgramPool) -> None:
    """The attacks of `loops.attacks` have others."""
    source = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass"
    before = programs()  # the tests of tools keep a pool until the session ends
    assert ended(pool, source, limits=SHORT).failure == "timeout"
    wait_until(lambda: programs() <= before, 20)
    (call,) = returned(pool, f"def f():\n  exec({source!r}, {{}})\n  while True: pass", ("f", ()), limits=SHORT)
    assert call.failure == "timeout"
    wait_until(lambda: programs() <= before, 20)


def test_the_output_before_a_failure_is_kept(pool: ProgramPool) -> None:
    reply = ended(pool, "print('early', flush=True)\nwhile True: pass", limits=Limits(0.5))
    assert (reply.value, reply.failure) == ("early\n", "timeout")


def test_functions_are_called_with_values_of_exact_types(pool: ProgramPool) -> None:
    source = """
from collections import namedtuple, defaultdict, deque
state = []
def echo(*values): return values
def count(): state.append(0); return len(state)
class Solution:
    def __init__(self): self.calls = 0
    def method(self, x): self.calls += 1; return (x, self.calls)
def odd(): return namedtuple('P', 'x y')(1, 2), deque([1]), defaultdict(int, a=1)
"""
    values = (1, True, 2.5, "a", None, [1, (2, {3})], {"k": b"v"}, 10**6000, float("inf"))
    method = ("Solution.method", (5,))
    replies = returned(pool, source, ("echo", values), ("count", ()), ("count", ()), method, method, ("odd", ()))
    assert [reply.failure for reply in replies] == [None] * 6
    assert replies[0].value == values
    assert [type(item) for item in replies[0].value] == [type(item) for item in values]  # type: ignore[attr-defined]
    assert [reply.value for reply in replies[1:]] == [1, 2, (5, 1), (5, 1), ((1, 2), [1], {"a": 1})]


@pytest.mark.parametrize(*table(__file__, "a_failing_call_has_its_cause"))
def test_a_failing_call_has_its_cause(pool: ProgramPool, body: str, failure: str) -> None:
    (reply,) = returned(pool, f"def f(): {body}", ("f", ()))
    assert (reply.value, reply.failure) == (None, failure)


def test_a_program_that_does_not_load_is_not_called(pool: ProgramPool) -> None:
    for source, failure in [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(0)", "exited with code 0"),
        ("import os; os._exit(0)", "exited with code 0"),
        ("def f(:", "SyntaxError: invalid syntax"),
    ]:
        (reply,) = returned(pool, source, ("f", ()))
        assert reply.failure == failure
    unknown, attribute = returned(pool, "class Solution: pass", ("g", ()), ("Solution.g", ()))
    assert unknown.failure == "NameError: name 'g' is not defined"
    assert attribute.failure == "AttributeError: 'Solution' object has no attribute 'g'"


def test_calls_after_the_end_fail_with_its_cause(pool: ProgramPool) -> None:
    source = "def loop():\n  while True: pass\ndef f(): return 1"
    first, second = returned(pool, source, ("loop", ()), ("f", ()), limits=SHORT)
    assert (first.failure, second.failure) == ("timeout", "timeout")


FORGERS = {
    "answers in advance": """
import os, struct
os.write(63, struct.pack(">BQI", 13, 0, 1) + b"5")
def f(): return 1
""",
    "answers twice": """
import os, struct, sys
def f():
    frame = sys._getframe(1).f_locals["frame"]
    os.write(63, struct.pack(">BQI", 14, frame.token, 1) + b"5")
    return 1
""",
    "answers the next request too": """
import os, struct, sys
def f():
    frame = sys._getframe(1).f_locals["frame"]
    os.write(63, (struct.pack(">BQI", 14, frame.token, 1) + b"5") * 2)
    while True: pass
""",
    "claims not to be confined": """
import os, struct
def f():
    os.write(63, struct.pack(">BQI", 12, 0, 4) + b"lost")
    return 1
""",
}


@pytest.mark.parametrize("source", FORGERS.values(), ids=FORGERS.keys())
def test_forged_replies_gain_nothing(pool: ProgramPool, source: str) -> None:
    """No forgery is `Undecided`, which would take the response out of its group."""
    replies = returned(pool, source, ("f", ()), ("f", ()), ("f", ()))
    assert replies[-1].failure == "broke the sandbox protocol"


def test_a_flood_of_messages_is_stopped(pool: ProgramPool) -> None:
    flood = "import os, struct\nwhile True: os.write(63, struct.pack('>BQI', 13, {token}, 1) + b'x')"
    assert ended(pool, flood.format(token=0)).failure == "broke the sandbox protocol"
    own = "import sys\ntoken = sys._getframe(3).f_locals['frame'].token\n" + flood.format(token="token")
    assert ended(pool, own).failure in ("broke the sandbox protocol", "x")


def test_a_text_of_too_many_parts_is_not_decoded(pool: ProgramPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same number of bytes takes a hundred times as long to read if it is thousands of dicts."""
    decoded: list[int] = []

    def decode(text: str) -> object:
        decoded.append(len(text))
        return text

    monkeypatch.setattr(process, "decode", decode)
    source = "def dense(n): return [{}] * n\ndef long(n): return ['x' * n]"
    limits = Limits(LIMITS.seconds, output_bytes=1 << 20, output_parts=200)
    calls = [("dense", (1_000,)), ("long", (100_000,)), ("dense", (100,)), ("dense", (101,))]
    replies = returned(pool, source, *calls, limits=limits)
    texts = [["x" * 100_000], [{}] * 100]
    assert [reply.failure for reply in replies] == ["too much output", None, None, "too much output"]
    assert decoded == [len(encode(None)), *(len(encode(content)) for content in texts)]


def test_the_judge_answers_outside_functions(pool: ProgramPool, rng: np.random.Generator) -> None:
    a, b, c = (int(x) for x in rng.integers(-1000, 1000, 3))
    source = """
def check(a, b, c): return add(add(a, b), c) * 2
def caught(text):
    try: fail(text)
    except Exception as error: return type(error).__name__, str(error)
def uncaught(): return fail('ValueError: negative')
"""
    judges = [
        outside_judge(source, "check", a, b, c),
        outside_judge(source, "caught", "KeyError: 5"),
        outside_judge(source, "caught", "no exception of this name"),
        outside_judge(source, "uncaught"),
        outside_judge("x = add(1, 2)\ndef f(): return x", "f"),
        outside_judge("def f(): return add(object())", "f"),
    ]
    assert pool.run(judges) == [
        [("add", a, b), ("add", a + b, c), 2 * (a + b + c)],
        [("fail", "KeyError: 5"), ("KeyError", "5")],  # as of `raise KeyError(5)`
        [("fail", "no exception of this name"), ("RuntimeError", "no exception of this name")],
        [("fail", "ValueError: negative"), "ValueError: negative"],
        [("add", 1, 2), 3],
        ["did not return a plain value: of type object"],
    ]


def test_two_programs_talk_through_the_judge(pool: ProgramPool) -> None:
    """Tests in one process, the answer in another: neither sees the other's memory."""

    def judge(worker: Worker) -> list[object]:
        def answer(x: int) -> object:
            return worker.call("answer", (x,), LIMITS).value

        worker.load("secret = 1\ndef answer(x): return 'secret' in globals(), x * 2", LIMITS)
        worker.load("def check(x): return candidate(x), 'secret' in globals()", LIMITS, "tests", {"candidate": answer})
        return worker.call("check", (21,), LIMITS, "tests").value  # type: ignore[no-any-return]

    assert pool.run([judge]) == [((True, 42), False)]


def test_the_deepest_value_passes_through_the_judge(pool: ProgramPool) -> None:
    """A value at the limit of depth is one level deeper in the message that passes it on."""

    def judge(worker: Worker) -> object:
        worker.load(f"def answer(x):\n    for _ in range({MAX_DEPTH}): x = [x]\n    return x", LIMITS)
        outside = {"candidate": lambda x: worker.call("answer", (x,), LIMITS).value}
        worker.load("def check(x): return len(candidate(x))", LIMITS, "tests", outside)
        return worker.call("check", (21,), LIMITS, "tests").value

    assert pool.run([judge]) == [1]


def test_a_server_forgets_the_processes_of_earlier_judges() -> None:
    with ProgramPool(num_workers=1) as own:
        for _ in range(3):
            own.run([call_judge("def f(): return 1", ("f", ()))] * 5)
        (idle,) = own._idle
        assert len(idle.server._endings) <= 2


def test_every_judge_gets_its_own_replies(pool: ProgramPool, rng: np.random.Generator) -> None:
    numbers = [int(n) for n in rng.integers(0, 10**6, 60)]
    judges = [run_judge(f"print(int(input()) + {n})", f"{n}\n") for n in numbers]
    replies = pool.run(judges)
    assert [reply.value for reply in replies if isinstance(reply, Reply)] == [f"{2 * n}\n" for n in numbers]
    assert pool.run([]) == []


@pytest.mark.slow
def test_an_exception_of_a_judge_ends_the_run_and_its_programs() -> None:
    def judge(worker: Worker) -> Reply:
        worker.load("def f(): pass", LIMITS)
        worker.call("f", (), LIMITS)
        raise ZeroDivisionError("of the judge")

    with ProgramPool(2) as pool:
        with pytest.raises(ZeroDivisionError, match="of the judge"):
            pool.run([judge] + [run_judge("while True: pass")] * 3)
        with pytest.raises(ZeroDivisionError, match="of the judge"):
            pool.run([run_judge("while True: pass"), judge])
        assert ended(pool, "print(1)").value == "1\n"


def test_a_run_works_from_any_thread() -> None:
    outputs: list[str] = []
    with ProgramPool(1) as own:
        threads = [threading.Thread(target=lambda: outputs.append(ended(own, "print(5)").value)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ended(own, "print(6)").value == "6\n"  # the thread that started the server has ended
    assert outputs == ["5\n"] * 3


@pytest.mark.slow
def test_an_interrupt_leaves_nothing() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
    try:
        interrupt_programs()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_programs() -> None:
    before = programs()
    with ProgramPool(2) as pool:
        ended(pool, "")
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.run([run_judge("while True: pass")] * 2)
        assert ended(pool, "print(1)").value == "1\n"
        wait_until(lambda: programs() <= before, 20)


SLEEPING = "def f():\n  import time\n  time.sleep(1000)"


def kill_and_call(pids: Callable[[], set[int]], worker: Worker) -> str:
    """Kill processes while a program waits for a call."""
    worker.load(SLEEPING, LIMITS)
    for pid in pids():
        os.kill(pid, signal.SIGKILL)
    return f"no loss: {worker.call('f', (), LIMITS)}"


@pytest.mark.slow
def test_a_lost_server_is_replaced_once() -> None:
    tries: list[int] = []

    def judge(worker: Worker) -> str:
        tries.append(1)
        return kill_and_call(servers, worker) if len(tries) == 1 else worker.run("print(1)", "", LIMITS).value

    with ProgramPool(1) as own:
        assert own.run([judge]) == ["1\n"]
        assert own.run([partial(kill_and_call, servers)]) == [Undecided("a worker was lost")]
        assert ended(own, "print(1)").value == "1\n"
    assert len(tries) == 2


def test_a_program_killed_from_outside_is_lost() -> None:
    with ProgramPool(1) as pool:
        assert pool.run([partial(kill_and_call, programs)]) == [Undecided("a process was killed from outside")]


def test_a_program_without_confinement_that_kills_itself_is_at_fault() -> None:
    with ProgramPool(1, "unsafe") as own:
        assert ended(own, "import os\nos.kill(os.getpid(), 9)").failure == "killed by signal 9"


@pytest.mark.slow
def test_nothing_outlives_a_killed_trainer() -> None:
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from brorl.verification.sandbox.pool import ProgramPool
from judges import run_judge
pool = ProgramPool(64)
pool.run([run_judge("while True: pass")] * 64)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    wait_until(lambda: len(descendants(trainer.pid)) >= 128)  # 64 servers with a program each
    left = descendants(trainer.pid)
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not any(is_running(pid) for pid in left))


@pytest.mark.slow
def test_packages_are_imported_before_the_program_is_confined() -> None:
    source = "import numpy\ndef total(n): return float(numpy.arange(n).sum())"
    with ProgramPool(1).preloading("numpy") as pool:
        assert [reply.value for reply in returned(pool, source, ("total", (5,)))] == [10.0]
    with ProgramPool(1) as pool:
        (reply,) = returned(pool, source, ("total", (5,)))
        assert reply.failure == "ModuleNotFoundError: No module named 'numpy'"
    with (
        ProgramPool(1).preloading("no_such_module") as pool,
        pytest.raises(UserError, match="No module named 'no_such"),
    ):
        ended(pool, "")


@pytest.mark.slow
def test_closing_ends_the_servers_of_preloading_too() -> None:
    before = servers()
    with ProgramPool(1) as pool:
        preloaded = pool.preloading("statistics")
        assert pool.preloading("statistics") is preloaded
        assert ended(pool, "print(1)").value == ended(preloaded, "print(1)").value == "1\n"
        assert len(servers() - before) == 2
    assert servers() <= before
    assert ended(preloaded, "print(2)").value == "2\n"  # it starts new ones
    pool.close()
    assert servers() <= before


@pytest.mark.slow
def test_a_judge_can_report_a_fault_of_the_machine(pool: ProgramPool) -> None:
    """It runs once more, and then it is lost."""
    begun: list[str] = []

    def judge(name: str, failures: int, worker: Worker) -> str:
        begun.append(name)
        worker.run("print(1)", "", LIMITS)
        if begun.count(name) <= failures:
            raise LostError("the scorers were not loaded")
        return name

    outcomes = pool.run([partial(judge, *arguments) for arguments in (("a", 0), ("b", 1), ("c", 2))])
    assert outcomes == ["a", "b", Undecided("the scorers were not loaded")]
    assert sorted(begun) == ["a", "b", "b", "c", "c"]


@pytest.mark.slow
def test_an_end_before_the_confinement_is_no_fault_of_the_program(pool: ProgramPool) -> None:
    limits = Limits(60.0, memory_bytes=1e9)  # type: ignore[arg-type] # the system takes no float

    outcomes = pool.run([run_judge("print(1)", limits=limits), lambda worker: worker.load("x = 1", limits)])
    assert outcomes == [Undecided("a process ended before it was confined")] * 2
    assert ended(pool, "print(1)").value == "1\n"
