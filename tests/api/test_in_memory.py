"""Rows and functions in memory: what a run trains on and is verified by, and that it can be resumed."""

import json
import linecache
import math
import pickle
import re
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from transformers.utils import get_json_schema

import brorl
from brorl.api.in_memory import moved, pickled, resolve_in_memory, rows_to_evaluate, terms_of
from brorl.config.reading import dump_yaml, make_config
from brorl.errors import UserError
from brorl.prompts.countdown import countdown_puzzles
from brorl.prompts.file_questions import read_source
from brorl.prompts.settings import FileSource
from brorl.verification.sandbox.inside.calling import called
from brorl.verification.sandbox.inside.functions import load
from brorl.verification.sandbox.pool import VerifierCall, Workers
from brorl.verification.settings import VerificationSettings

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
ROWS: list[dict[str, Any]] = [{"question": f"What is {i} + 1?", "answer": str(i + 1), "level": 1} for i in range(40)]
PUZZLES = [  # which the tokenizer of the shipped model can encode
    {"question": puzzle.text, "answer": puzzle.reference} for puzzle in countdown_puzzles(3, 9, range(1, 30))[:40]
]
SMALL: dict[str, Any] = {
    "rollouts_per_prompt": 4, "prompts_per_step": 2, "steps": 2, "sampling.max_new_tokens": 12, "report": False,
    "optimizer.mini_batches": 1, "evaluation.num_prompts": 2, "evaluation.rollouts_per_prompt": 2, "evaluation.ks": [1],
    "dynamic_sampling.enabled": False, "engine.threads": 1, "diagnostics.held_out_check_every": 0,
    "verification.workers": 1, "rewards.stop_properly": 1.0, "prompt.template": "{prompt}",
}  # fmt: skip


def right(response: str, reference: str) -> bool:
    return reference in response


def brief(completions: list[str], **_columns: Any) -> list[float]:
    return [1 / (1 + len(text)) for text in completions]


def in_a_cell(monkeypatch: pytest.MonkeyPatch, source: str, **variables: Any) -> dict[str, Any]:
    """Run source as IPython runs a cell: in `__main__`, its text known to linecache alone."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    name = f"/tmp/ipykernel_1/{abs(hash(source))}.py"
    monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(True), name))
    vars(main).update(variables)
    exec(compile(source, name, "exec"), vars(main))
    return vars(main)


def forms() -> dict[str, Any]:
    import datasets

    return {
        "a list": ROWS, "a tuple": tuple(ROWS), "a table": pa.Table.from_pylist(ROWS), "a frame": pd.DataFrame(ROWS),
        "a dataset": datasets.Dataset.from_list(ROWS), "a generator": iter(ROWS),
        "scalars": [{**row, "level": np.int64(1)} for row in ROWS],
    }  # fmt: skip


def test_every_form_of_rows_becomes_the_same_questions(tmp_path: Path) -> None:
    read = {}
    for form, data in forms().items():
        _, config, said = resolve_in_memory("quickstart", {"data": data, "steps": 3}, None, tmp_path / form)
        (source,) = config.data.sources
        assert config.steps == 3
        assert "data: 40 questions" in said[0]
        assert any("prompt_column: question" in line for line in said)
        read[form] = [(q.text, q.reference, q.domain) for q in read_source(source).questions]  # type: ignore[arg-type]
    assert read["a list"] == [(row["question"], row["answer"], "math") for row in ROWS]
    assert all(questions == read["a list"] for questions in read.values())


def test_narrow_floats_and_class_numbers_are_read_as_they_are_printed(tmp_path: Path) -> None:
    import datasets
    import torch

    values, questions = [0.1, 2.5, 1e-3], ["a?", "b?", "c?"]
    floats = pa.table({"question": questions, "answer": pa.array(values, pa.float32())})
    kinds = {
        "a table": floats,
        "a dataset": datasets.Dataset(floats),
        "a frame": pd.DataFrame({"question": questions, "answer": np.array(values, np.float32)}),
        "scalars": [{"question": q, "answer": v} for q, v in zip(questions, np.array(values, np.float32), strict=True)],
        "tensors": [{"question": q, "answer": torch.tensor(v)} for q, v in zip(questions, values, strict=True)],
    }
    for kind, data in kinds.items():
        _, config, _ = resolve_in_memory("quickstart", {"data": data}, None, tmp_path / kind)
        references = [q.reference for q in read_source(config.data.sources[0]).questions]  # type: ignore[arg-type]
        assert references == [str(value) for value in values], kind
    label = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"question": datasets.Value("string"), "answer": label})
    named = datasets.Dataset.from_dict({"question": questions, "answer": [1, 0, 1]}, features=features)
    _, config, _ = resolve_in_memory("quickstart", {"data": named}, None, tmp_path / "classes")
    references = [q.reference for q in read_source(config.data.sources[0]).questions]  # type: ignore[arg-type]
    assert references == ["yes", "no", "yes"]


def test_rows_without_a_recipe_have_the_one_of_init(tmp_path: Path) -> None:
    config = resolve_in_memory(None, {"data": ROWS, "model": "quickstart"}, None, tmp_path / "given").config
    assert (config.rollouts_per_prompt, config.prompts_per_step, config.model) == (16, 8, "quickstart")
    assert config.prompt.template != "{prompt}"  # the one for mathematical answers


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "expected a datasets.Dataset, a list of dicts"),
        (b"abc", "got bytes"),
        ([1, 2], "got list"),
        ([{"question": "1?", "answer": math.nan}], "row 1 has 'answer' of type float"),
        ({"train": pd.Series([1])}, "expected a datasets.Dataset"),
        ([{"question": "1 + 1?", "label?": 2}], "no column is clearly the reference answer"),
        ([{"question": "1?", "answer": [1, 2]}], "no column is clearly the reference answer"),
        ([{"question": "1?", "answer": 1}, {"question": "2?", "answer": None}], "data line 2: answer is null"),
        ([{"question": "Say hi", "answer": "what a fine day"}], "`reward=FUNCTION`"),
        ([{"question": "1?", "answer": 1, "when": object()}], "row 1 has 'when' of type object"),
    ],
)
def test_what_is_no_rows_is_refused_in_words_of_python(
    data: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(said)) as refusal:
        resolve_in_memory(None, {"data": data}, None, Path("given"))
    assert not re.search("--|data.sources", str(refusal.value))
    assert str(tmp_path) not in str(refusal.value)


def test_a_function_that_reads_several_columns_gets_them_from_the_rows(tmp_path: Path) -> None:
    def graded(completions: list[str], tests: list[Any], limit: list[int]) -> list[float]:
        return [1.0 for _ in zip(completions, tests, limit, strict=True)]

    rows = [{"prompt": f"Do {i}.", "tests": [i, i + 1], "limit": i} for i in range(9)]
    config = resolve_in_memory(None, {"data": rows}, graded, tmp_path).config
    (source,) = config.data.sources
    references = [json.loads(q.reference) for q in read_source(source).questions]  # type: ignore[arg-type]
    assert references == [{"tests": row["tests"], "limit": row["limit"]} for row in rows]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str == f"{data_source} {ground_truth} {extra_info['index']}")


def test_a_function_of_verl_gets_the_columns_of_verl(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {i} + 1?"}], "data_source": "sums",
         "extra_info": {"index": i}, "reward_model": {"ground_truth": str(i + 1)}}
        for i in range(10)
    ]  # fmt: skip
    _, config, _ = resolve_in_memory("quickstart", {"data": rows}, compute_score, tmp_path)
    question = read_source(config.data.sources[0]).questions[3]  # type: ignore[arg-type]
    given = {"response": "sums 4 3", "reference": question.reference, "source": "rows"}
    assert called(compute_score, given) == 1.0
    assert called(compute_score, {**given, "response": "4"}) == 0.0


def test_a_run_is_evaluated_on_the_columns_that_its_reward_reads(tmp_path: Path) -> None:
    def graded(completions: list[str], tests: list[Any], limit: list[int]) -> list[float]:
        return [1.0 for _ in zip(completions, tests, limit, strict=True)]

    def at_level(completions: list[str], level: list[int]) -> list[float]:
        return [1.0 for _ in zip(completions, level, strict=True)]

    rows = [{"prompt": f"Do {i}.", "answer": "x", "tests": [i], "limit": i, "level": -i} for i in range(9)]
    for reward, wanted in ((graded, '{"tests": [8], "limit": 8}'), (at_level, "-8")):
        run = tmp_path / reward.__name__
        config = resolve_in_memory(None, {"data": rows}, reward, run / "given").config
        (run / "config.yaml").write_text(dump_yaml(config))
        (run / "checkpoints" / "step-000001").mkdir(parents=True)
        (run / "checkpoints" / "step-000001" / "COMMIT").touch()  # complete
        stored, said = rows_to_evaluate(rows[8:], run)
        (question,) = read_source(FileSource(**json.loads(stored))).questions
        assert question.reference == wanted
        assert any("answer_column: " in line for line in said)


@pytest.mark.slow
def test_a_run_holds_its_rows_and_functions_and_is_resumed_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = in_a_cell(monkeypatch, "import math\nEND = '3'\ndef ends(response, reference):\n"
                     "    return math.floor(1.5) == 1 and END in response\n")  # fmt: skip
    reward = {"ends": cell["ends"], "brief": (brief, 0.5)}
    run = brorl.train("quickstart", data=PUZZLES, reward=reward, progress=False, output_dir="run", **SMALL)
    assert {file.suffix for file in Path("run/given").iterdir()} == {".jsonl", ".pkl"}
    stored = Path("run/config.yaml").read_text()
    assert "brorl-given-" not in stored
    assert str(Path("run/given").absolute()) in stored
    for record in run.metrics[1:]:
        assert record.sampling is not None
        brevity = (record.sampling.terms or {})["brief"]
        assert brevity is not None
        assert 0 < brevity <= 1
        assert record.sampling.reward == pytest.approx(record.sampling.accuracy + 0.5 * brevity)
    more = brorl.train("run", resume=True, steps=3, progress=False)
    assert [record.step for record in more.metrics] == [0, 1, 2, 3]
    others = [{"answer": "0", **row} for row in PUZZLES[:5]]
    stored_rows, _ = rows_to_evaluate(others, run.path)
    assert json.loads(stored_rows)["domain"] == "own"  # the verifier of the run


def in_a_worker(path: str, *values: Any, **settings: Any) -> Any:
    """Call a function in the trusted process of a worker, as a run does."""
    with Workers.from_settings(VerificationSettings(workers=1, **settings)) as workers:
        (reply,) = workers.functions.run([VerifierCall(path, values)])
        return reply.failure or reply.value


def path_of(reward: Any, folder: Path) -> str:
    """Return the path of a reward function in the settings of a run that it is given to."""
    config = resolve_in_memory(None, {}, reward, folder).config
    return next(iter(config.verification.functions.values()))


CELL = r"""
import json, re, xml.etree.ElementTree
from math import floor as down
from collections import Counter
WORDS, PATTERN, worst = ["a", "b"], re.compile(r"the\s*'(\d+)'", re.I), float("inf")
class Box:
    size = 3
    def __init__(self, text):
        self.text = text
    def fits(self):
        return len(self.text) <= down(self.size + 0.5)
def helper(text):
    return Box(text).fits() and PATTERN.search("THE '1'")[1] == "1"
def check(response, reference):
    inner = WORDS + [xml.etree.ElementTree.fromstring("<b/>").tag]
    return helper(response) and Counter(inner)["b"] == 2 and json.loads(reference) < worst
def make(words):
    def among(response, reference):
        return response in words
    return among
among, short = make(["a", "b"]), lambda response, reference: len(response) < 2
"""


def test_functions_of_a_notebook_work_in_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A function with helpers, a class and mutable variables, a closure, a lambda, a partial and a callable object."""
    cell = in_a_cell(monkeypatch, CELL)
    functions = [cell["check"], cell["among"], cell["short"], partial(cell["check"]), cell["Box"]("aa").fits]
    expected = [(True, False), (True, False), (True, False), (True, False)]
    for function, wanted in zip(functions[:4], expected, strict=True):
        path = path_of(function, tmp_path)
        assert ".pkl:" in path
        assert tuple(in_a_worker(path, response, "1") for response in ("a", "aaaa")) == wanted
    assert load(path_of(functions[4], tmp_path))() is True


def test_a_function_of_a_script_needs_no_guard_in_it(tmp_path: Path) -> None:
    """Workers load the function without the script, and import what is beside the script from there."""
    (tmp_path / "beside.py").write_text("def same(one, other):\n    return one == other\n")
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nimport beside\nfrom brorl.api.in_memory import resolve_in_memory\n"
        "def check(response, reference):\n    return beside.same(response, reference)\n"
        f"print(resolve_in_memory(None, {{}}, check, Path({str(tmp_path / 'given')!r})).config"
        ".verification.functions['countdown'])\nraise SystemExit('a second run')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path.parent)
    assert "a second run" in done.stderr
    path = done.stdout.strip()
    assert path.endswith(".pkl:check")
    assert [in_a_worker(path, response, "1") for response in ("1", "2")] == [True, False]


def test_a_function_of_a_package_keeps_its_relative_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "exact_judges"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "same.py").write_text("def same(one, other):\n    return one == other\n")
    (package / "check.py").write_text("from .same import same\ndef check(response, reference):\n"
                                      "    return same(response, reference)\n")  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    path = path_of(import_module("exact_judges.check").check, tmp_path / "given")
    assert in_a_worker(path, "1", "1") is True


def test_what_cannot_be_pickled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
import threading
lock = threading.Lock()
class Judge:
    def __init__(self):
        self.guard = threading.Lock()
    def __call__(self, response, reference):
        return True
def helper(text):
    return check and lock.acquire()
def check(response, reference):
    return helper(response)
def with_default(response, reference, own=lock):
    return own.acquire()
def make():
    inner = threading.Lock()
    return lambda response, reference: inner.acquire()
closure, judge = make(), Judge()
"""
    cell = in_a_cell(monkeypatch, source)
    named = {"check": ("helper", "lock"), "with_default": ("with_default", "own"), "closure": ("<lambda>", "inner"),
             "judge": ("Judge", "guard")}  # fmt: skip
    for name, (user, variable) in named.items():
        with pytest.raises(UserError, match=f"^reward: {user} uses '{variable}' of type lock"):
            pickled(cell[name])


def test_a_pickle_of_a_different_python_is_refused(tmp_path: Path) -> None:
    stored = pickle.loads(pickled(right))
    (tmp_path / "f.pkl").write_bytes(pickle.dumps({**stored, "python": (3, 8)}))
    with pytest.raises(RuntimeError, match=r"Python 3\.8"):
        load(f"{tmp_path / 'f.pkl'}:f")


def test_terms_have_names_and_weights() -> None:
    def of(reward: Any) -> list[tuple[str, float]]:
        return [(term.name, term.weight) for term in terms_of(reward)]

    assert of(right) == [("right", 1.0)]
    assert of({"correct": right, "short": (brief, -0.5)}) == [("correct", 1.0), ("short", -0.5)]
    for wrong, said in (
        ([right, right], "expected a function or a mapping of names to functions"),
        ({}, "expected a function or a mapping of names to functions"),
        ({"right": (right, "1")}, "expected a function or (function, weight) for 'right'"),
        ({"right": (right, 0.0), "brief": brief}, "give it a weight above 0"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            terms_of(wrong)


def test_the_weighted_sum_is_the_reward(tmp_path: Path) -> None:
    found = resolve_in_memory(None, {}, {"right": (right, 2.0), "brief": (brief, 0.5)}, tmp_path).config
    (domain,) = found.verification.functions
    factor = found.rewards.domain_weights[domain]
    assert (factor, factor * found.rewards.terms["brief"].weight) == (2.0, 0.5)
    assert found.rewards.partial_credit


def test_all_functions_get_the_same_columns(tmp_path: Path) -> None:
    """A function that needs another column than the first one would get the answer in its place."""

    def graded(completions: list[str], answer: list[str]) -> list[float]:
        return [1.0 for _ in zip(completions, answer, strict=True)]

    def at_level(completions: list[str], level: list[int]) -> list[float]:
        return [1.0 for _ in zip(completions, level, strict=True)]

    def renamed(completions: list[str], solution: list[str]) -> list[float]:
        return [1.0 for _ in zip(completions, solution, strict=True)]

    def both(completions: list[str], answer: list[str], level: list[int]) -> list[float]:
        return [1.0 for _ in zip(completions, answer, level, strict=True)]

    for first, second in ((graded, brief), (graded, renamed), (both, both), (right, graded)):
        resolve_in_memory(None, {"data": ROWS}, {"first": first, "second": second}, tmp_path)
    for first, second in ((graded, at_level), (graded, both), (both, graded), (right, at_level)):
        with pytest.raises(UserError, match="all functions get the same columns"):
            resolve_in_memory(None, {"data": ROWS}, {"first": first, "second": second}, tmp_path)


def test_a_function_gets_its_column_as_it_is(tmp_path: Path) -> None:
    """`init` would cut the answer of GSM8K for the verifier of mathematics."""
    rows = [{"question": f"What is {i}?", "answer": f"It is.\n#### {i}"} for i in range(9)]
    (source,) = resolve_in_memory(None, {"data": rows}, right, tmp_path).config.data.sources
    references = [q.reference for q in read_source(source).questions]  # type: ignore[arg-type]
    assert references == [row["answer"] for row in rows]


def test_moved_files_are_named_in_the_settings(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (old / "f.py").write_text("def f(response, reference): return True\n")
    config = make_config({}, {"verification.functions": {"countdown": f"{old / 'f.py'}:f"}}, "test")
    assert moved(config, old, new).verification.functions == {"countdown": f"{new / 'f.py'}:f"}
    assert (new / "f.py").read_text() == (old / "f.py").read_text()
    assert math.isfinite(moved(config, tmp_path / "none", new).optimizer.learning_rate)


def test_rows_are_checked_without_a_trace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cell = in_a_cell(monkeypatch, "def right(response, reference):\n    return reference in response\n"
                     "def brief(completions):\n    return [1 / len(completions[0])]\n")  # fmt: skip
    reward = {"right": cell["right"], "brief": (cell["brief"], 0.5)}
    found = brorl.check("quickstart", data=PUZZLES, reward=reward, timing=False, **SMALL)
    assert found.config.rewards.terms["brief"].weight == 0.5
    said = capsys.readouterr().out
    assert "data: 40 questions" in said
    assert "prompt_column: question" in said
    assert "rows: 32 training prompts" in said
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_rows_are_evaluated_on(capsys: pytest.CaptureFixture[str]) -> None:
    found = [brorl.evaluate("quickstart", data=PUZZLES[:9], samples=2, ks=[1], max_new_tokens=12) for _ in range(2)]
    assert found[0].path == found[1].path  # the same rows continue the same evaluation
    assert "(9 prompts)" in capsys.readouterr().out


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


TOOL_CELL = '''
from typing import Literal, Optional
import math, typing as t
Sign = Literal["+", "-"]
def rounded(value):
    return math.floor(value + 0.5)
def combine(a: float, b: Optional[int] = None, sign: Sign = "+", more: t.Any = None) -> int:
    """Combine two numbers.

    Args:
        a: The first.
        b: The second.
        sign: How.
        more: Of no effect.
    """
    return rounded(a + (b or 0) if sign == "+" else a - (b or 0))
'''


def test_tools_in_memory_become_paths_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cell = in_a_cell(monkeypatch, TOOL_CELL)
    overrides = {"tools": [add, cell["combine"]], "tools.max_turns": 3, "steps": 4}
    config = resolve_in_memory("quickstart", overrides, None, tmp_path / "given").config
    assert (config.tools.max_turns, config.steps) == (3, 4)
    assert config.tools.functions["add"] == f"{Path(__file__).absolute()}:add"
    assert [*config.tools.functions] == ["add", "combine"]
    assert {f"tools.functions.{name}": path for name, path in config.tools.functions.items()} == config.own_functions
    written = load(config.tools.functions["combine"])
    assert get_json_schema(written) == get_json_schema(cell["combine"])
    assert written(2.6, 4, "-") == cell["combine"](2.6, 4, "-") == -1
    later = in_a_cell(monkeypatch, f"from __future__ import annotations\n{TOOL_CELL}")["combine"]
    text = resolve_in_memory("quickstart", {"tools": [later]}, None, tmp_path / "given").config.tools.functions
    assert get_json_schema(load(text["combine"])) == get_json_schema(cell["combine"])
    there = moved(config, tmp_path / "given", tmp_path / "run").tools.functions["combine"]
    assert there.startswith(str(tmp_path / "run"))
    settings = resolve_in_memory("quickstart", {"tools": {"calculator": True}}, None, tmp_path / "none").config
    assert settings.tools.calculator
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([add, add], "two functions have the name add"),
        (["add"], "contains 'add'"),
        ([ModuleType], "contains <class"),
        ([Path("a").exists], "contains <bound method"),
        ([lambda a: a], "tools: <lambda>"),
    ],
)
def test_what_is_no_list_of_tools_is_refused(tools: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        resolve_in_memory("quickstart", {"tools": tools}, None, tmp_path)


def test_a_resumed_run_keeps_its_tools() -> None:
    with pytest.raises(UserError, match="a resumed run keeps its tools"):
        brorl.train("run", resume=True, tools=[add])
