"""A user's verifier: what it may return, and what becomes of what it may not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from brorl.errors import UserError
from brorl.prompts.prompt import Prompt
from brorl.verdict import Verdict, is_failure
from brorl.verification.domains.verifiers import FunctionVerifier
from brorl.verification.sandbox.pool import WorkerPool
from case_tables import table

SOURCE = '''
import os
import sys
import time

def returns(response, reference):
    """Returns what the response says in Python."""
    return eval(response)

def same(response: str, reference: str) -> bool:
    return response == reference

def with_prompt(response, reference, prompt):
    return response == f"{prompt}{reference}"

def with_option(response, reference, prompt="none"):
    return prompt == "2+2=" and response == reference

def with_any(*arguments):
    return True

def one(response):
    return True

def four(response, reference, prompt, more):
    return True

def neighbor(response, reference):
    import the_neighbor
    return the_neighbor.ANSWER == response
'''


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(num_workers=2, timeout_s=0.5) as pool:
        yield pool


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(SOURCE, "utf-8")
    (tmp_path / "the_neighbor.py").write_text("ANSWER = 'next door'\n", "utf-8")
    return tmp_path / "own.py"


def ask(pool: WorkerPool, function: str, *responses: str) -> list[Verdict]:
    prompt = Prompt("p", "2+2=", (1,), "4", "sums")
    return FunctionVerifier(pool, function, "sums").verify_all([(prompt, response) for response in responses])


def test_a_prompt_is_the_question_without_its_template(pool: WorkerPool, own: Path) -> None:
    """`brorl verify` has no template: both must call the function with the same text."""
    prompt = Prompt("p", "<user>2+2=<end>", (1,), "4", "sums", question="2+2=")
    (verdict,) = FunctionVerifier(pool, f"{own}:with_prompt", "sums").verify_all([(prompt, "2+2=4")])
    assert verdict.correct


@pytest.mark.parametrize(*table(__file__, "what_may_be_returned"))
def test_what_may_be_returned(
    pool: WorkerPool, own: Path, returned: str, correct: bool, score: float, extracted: str | None, reason: str
) -> None:
    (verdict,) = ask(pool, f"{own}:returns", returned)
    assert (verdict.correct, verdict.score, verdict.extracted, verdict.reason) == (correct, score, extracted, reason)
    assert not is_failure(reason)


@pytest.mark.parametrize(*table(__file__, "what_may_not_be_returned_is_a_verdict_that_is_counted"))
def test_what_may_not_be_returned_is_a_verdict_that_is_counted(
    pool: WorkerPool, own: Path, returned: str, reason: str
) -> None:
    first, verdict, last = ask(pool, f"{own}:returns", "True", returned, "False")
    assert verdict.reason.startswith(reason)
    assert (verdict.correct, verdict.score, verdict.extracted) == (False, 0.0, None)
    assert is_failure(verdict.reason)
    assert (first.correct, last.correct, last.reason) == (True, False, "wrong answer")


ASYNC = """
import asyncio
import numpy as np

lock = asyncio.Lock()  # bound to the first event loop that waits for it
loops = set()

async def same(response, reference):
    async with lock:
        await asyncio.sleep(0.001)
    loops.add(id(asyncio.get_running_loop()))
    return {"correct": response == reference, "reason": f"{len(loops)} loops"}

class Judge:
    async def __call__(self, response, reference, prompt):
        return await asyncio.to_thread(np.equal, response, f"{prompt}{reference}")
judge = Judge()

async def fails(response, reference):
    raise ValueError(response)

async def hangs(response, reference):
    await asyncio.sleep(1000)

async def reward(completions, answer, **columns):
    await asyncio.sleep(0)
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
"""


def test_coroutine_functions_are_awaited(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "judges.py"
    path.write_text(ASYNC, "utf-8")
    verdicts = ask(pool, f"{path}:same", *["4", "5"] * 4)
    assert [verdict.correct for verdict in verdicts] == [True, False] * 4
    assert {verdict.reason for verdict in verdicts} == {"1 loops"}
    assert [verdict.correct for verdict in ask(pool, f"{path}:judge", "2+2=4", "4")] == [True, False]
    assert [verdict.score for verdict in ask(pool, f"{path}:reward", "4", "5")] == [1.0, 0.0]
    assert [verdict.reason for verdict in ask(pool, f"{path}:fails", "no")] == ["verifier raised ValueError: no"]
    assert [verdict.reason for verdict in ask(pool, f"{path}:hangs", "4")] == ["timeout"]


def test_a_timeout_is_a_verdict(pool: WorkerPool, own: Path) -> None:
    verdicts = ask(pool, f"{own}:returns", "time.sleep(300)", "True")
    assert [verdict.reason for verdict in verdicts] == ["timeout", "correct"]
    assert verdicts[0].seconds >= 0.9 * pool.timeout_s


def test_it_gets_as_many_arguments_as_it_takes(pool: WorkerPool, own: Path) -> None:
    for name, response in (("same", "4"), ("with_prompt", "2+2=4"), ("with_option", "4")):
        right, wrong = ask(pool, f"{own}:{name}", response, response + "!")
        assert right.correct, name
        assert not wrong.correct


def test_any_text_reaches_it_unchanged(pool: WorkerPool, own: Path) -> None:
    for text in ("\x00", "\ud800", "\u202e4", "4\r\n", "4" * 100_000, ""):
        prompt = Prompt("p", "?", (1,), text, "sums")
        (verdict,) = FunctionVerifier(pool, f"{own}:same", "sums").verify_all([(prompt, text)])
        assert verdict.correct


def test_modules_of_the_current_directory_can_be_named(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = own.parent / "mine" / "deep"
    package.mkdir(parents=True)
    (package / "rules.py").write_text("class Rules:\n    @staticmethod\n    def ok(a, b): return a == b\n", "utf-8")
    monkeypatch.chdir(own.parent)
    with WorkerPool(num_workers=1) as pool:
        for function, response in (
            ("own:same", "4"),
            ("mine.deep.rules:Rules.ok", "4"),
            ("own.py:same", "4"),
            ("./own.py:neighbor", "next door"),
        ):
            assert ask(pool, function, response)[0].correct, function


@pytest.mark.slow
def test_a_mistake_in_the_setting_is_found_before_training(pool: WorkerPool, own: Path) -> None:
    importing = own.with_name("importing.py")
    importing.write_text("import no_such_package.part\ncheck = no_such_package.part.check\n")
    for function, message in (
        (f"{importing}:check", r"No module named 'no_such_package'; install .*\(pip install no_such_package, "),
        (
            "no_such:thing",
            r"verification\.functions\.sums: cannot load 'no_such:thing': ModuleNotFoundError.*; use pack",
        ),
        (f"{own}:missing", "has no attribute 'missing'"),
        (f"{own.parent}/none.py:same", "no such file"),
        ("os", "not of the form"),
        (f"{own}:one", r"verification\.functions\.sums: .* must take two arguments"),
        (f"{own}:four", "must take two arguments.*: it is unclear what to pass as its parameter 'more'"),
        (f"{own}:with_any", "takes any number of arguments; if a decorator made it, use functools.wraps there"),
        ("builtins:getattr", r"verification\.functions\.sums: .* must take two arguments"),  # without a signature
    ):
        with pytest.raises(UserError, match=message):
            FunctionVerifier(pool, function, "sums")
    FunctionVerifier(pool, f"{own}:same", "sums")


REWARDS = """
def with_answer(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]

def keywords(prompts, completions, **columns):
    (prompt,), (completion,) = prompts, completions
    assert columns["solution"] == columns["ground_truth"] == columns["reference"] == columns["answer"]
    return [0.5 * (prompt == "2+2=") + 0.5 * (completion == columns["solution"][0])]

def another_name(completions, gold):
    return [completions[0] == gold[0]]

def with_default(completions, answer=None):
    return [completions == answer]

def two_columns(completions, answer, unit):
    return [completions[0] == answer[0] + unit[0]]

def messages(completions, prompts, answer):
    assert prompts[0] == [{"role": "user", "content": "2+2="}]
    return [completions[0][0]["content"] == answer[0]]

def bare(completions):
    return [len(completions[0]) == 1]

def too_many(completions, **kwargs):
    return [1.0, 1.0]

def no_list(completions, **kwargs):
    return 1.0

def array(completions, answer):
    import numpy as np
    return np.array([text == right for text, right in zip(completions, answer, strict=True)])

def numpy_list(completions, answer):
    import numpy as np
    return [np.float32(text == right) for text, right in zip(completions, answer, strict=True)]

def tensor(completions, answer):
    import torch
    return torch.tensor([float(text == right) for text, right in zip(completions, answer, strict=True)])

def tensor_list(completions, answer):
    import torch
    return [torch.tensor(text == right) for text, right in zip(completions, answer, strict=True)]

def outside(completions, **kwargs):
    return [2.0]
"""


def reward(
    pool: WorkerPool, folder: Path, name: str, response: str, reference: str = "4", as_messages: bool = False
) -> Verdict:
    (folder / "rewards.py").write_text(REWARDS, "utf-8")
    verifier = FunctionVerifier(pool, f"{folder / 'rewards.py'}:{name}", "sums", as_messages)
    return verifier.verify_all([(Prompt("p", "2+2=", (1,), reference, "sums"), response)])[0]


@pytest.mark.parametrize("name", ["with_answer", "keywords", "another_name", "with_default", "array", "numpy_list"])
def test_reward_functions_with_the_signature_of_trl_work_as_they_are(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    assert reward(pool, tmp_path, name, "4").reason == "correct"
    wrong = reward(pool, tmp_path, name, "5")
    assert (wrong.reason, wrong.score) == ("wrong answer", 0.5 if name == "keywords" else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "tensor_list"])
def test_rewards_of_torch_are_numbers(tmp_path: Path, name: str) -> None:
    with WorkerPool(1, timeout_s=120.0, memory_bytes=4 << 30) as own:  # the import of torch counts as time of the call
        assert reward(own, tmp_path, name, "4").reason == "correct"
        assert reward(own, tmp_path, name, "5").reason == "wrong answer"


def test_reward_functions_get_several_columns_from_a_json_object(pool: WorkerPool, tmp_path: Path) -> None:
    row = '{"answer": "4", "unit": "m", "more": 1}'
    assert reward(pool, tmp_path, "two_columns", "4m", row).correct
    missing = reward(pool, tmp_path, "two_columns", "4m", '{"answer": "4"}')
    assert "needs the columns answer, unit: the answer column must contain a JSON object" in str(missing.reason)
    assert is_failure(str(missing.reason))


def test_reward_functions_can_get_messages(pool: WorkerPool, tmp_path: Path) -> None:
    assert reward(pool, tmp_path, "messages", "4", as_messages=True).correct
    assert is_failure(str(reward(pool, tmp_path, "messages", "4").reason))
    assert reward(pool, tmp_path, "bare", "4").correct


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("too_many", "must return a list with one reward per completion, not [1.0, 1.0]"),
        ("no_list", "must return a list with one reward per completion, not 1.0"),
        ("outside", "verifier returned 2.0, not a number from 0 to 1"),
    ],
)
def test_other_results_of_reward_functions_are_named(pool: WorkerPool, tmp_path: Path, name: str, said: str) -> None:
    verdict = reward(pool, tmp_path, name, "4")
    assert not verdict.correct
    assert said in str(verdict.reason)
