"""Rows of programming questions, made by hand in the shape of their public datasets."""

import base64
import json
import os
import pickle
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases, TestCode
from brorl.prompts.file_questions import read_source
from brorl.prompts.public_data import LAYOUTS
from brorl.prompts.question import Question
from brorl.prompts.row import DroppedRow
from brorl.prompts.settings import FileSource
from each_row import each_row

SUM = "Two integers are given on one line. Print their sum.\n"


def read(layout: str, row: dict[str, Any]) -> Question:
    assert {*LAYOUTS[layout].columns} <= {*row}
    return LAYOUTS[layout].question({name: row[name] for name in LAYOUTS[layout].columns}, 0)


def loaded(layout: str, row: dict[str, Any]) -> CodeTests:
    fields = read(layout, row)
    assert fields.domain == "code"
    return CodeTests.from_text(fields.reference)


def dropped(layout: str, row: dict[str, Any]) -> str:
    with pytest.raises(DroppedRow) as caught:
        LAYOUTS[layout].question({name: row[name] for name in LAYOUTS[layout].columns}, 0)
    return str(caught.value)


def apps(question: str = SUM, starter: str = "", **cases: Any) -> dict[str, Any]:
    """A row of APPS: the cases are JSON text, or empty."""
    return {
        "problem_id": 1,
        "question": question,
        "solutions": json.dumps(["print(sum(map(int, input().split())))"]),
        "input_output": json.dumps(cases) if cases else "",
        "difficulty": "interview",
        "url": "https://codeforces.com/problemset/problem/1/A",
        "starter_code": starter,
    }


class TestApps:
    @each_row(
        ("solutions", "wanted"),
        [
            (json.dumps(["print(1)", "print(2)"]), "print(1)"),
            (["print(1)"], "print(1)"),
            ("", None),
            (None, None),
            ("[]", None),
        ],
    )
    def test_its_solution_is_tried(self, solutions: Any, wanted: str | None) -> None:
        row = {**apps(inputs=["1 2\n"], outputs=["3\n"]), "solutions": solutions, "time_limit": "1 second"}
        for layout in (LAYOUTS["apps"], LAYOUTS["taco"]):
            columns = (*layout.columns, *layout.optional)
            question = layout.question({name: row[name] for name in columns}, 0)
            assert CodeTests.from_text(question.reference).solution == wanted

    def test_a_program(self) -> None:
        row = apps(inputs=["1 2\n", ["3", "4"]], outputs=["3\n", ["7"]])
        tests = loaded("apps", row)
        assert tests.tests == StdinCases(("1 2\n", "3\n4"), ("3\n", "7"), tolerance=1e-5)
        assert "from typing import *" in tests.prelude
        text = read("apps", row).text
        assert text.startswith(SUM.strip())
        assert "reads from standard input and writes to standard output" in text
        assert "```python" in text

    def test_a_function_of_codewars_has_wrapped_outputs(self) -> None:
        row = apps("Write a function that adds numbers.", "def add(a, b):\n\t", fn_name="add", inputs=[[1, 2], [3, 4]],
                   outputs=[[3], [7]])  # fmt: skip
        tests = loaded("apps", row).tests
        assert isinstance(tests, CallCases)
        assert (tests.function, tests.unwrap) == ("add", True)
        assert tests.cases() == [((1, 2), [3]), ((3, 4), [7])]
        text = read("apps", row).text
        assert "Start from this code:\n\n```python\ndef add(a, b):\n```" in text
        assert "Write the Python function `add`." in text

    def test_a_function_of_leetcode(self) -> None:
        question = "Return the positions of two numbers with this sum. You may return the answer in any order."
        row = apps(question, "class Solution:\n    def twoSum(self, nums, target):\n        ", fn_name="twoSum",
                   inputs=[[[2, 7, 11], 9], [[3, 3], 6]], outputs=[[0, 1], [0, 1]])  # fmt: skip
        tests = loaded("apps", row).tests
        assert isinstance(tests, CallCases)
        assert (tests.any_order, tests.unwrap) == (True, False)

    def test_an_input_in_any_order_is_no_answer_in_any_order(self) -> None:
        question = "You get a list of integers, given in any order and in any case. Return the list in ascending order."
        row = apps(question, fn_name="f", inputs=[[[3, 1, 2]]], outputs=[[1, 2, 3]])
        tests = loaded("apps", row).tests
        assert isinstance(tests, CallCases)
        assert not tests.any_order

    def test_text_keys_become_integers(self) -> None:
        row = apps("Invert this dictionary of integers.", fn_name="f", inputs=[[{"1": 2}]], outputs=[{"2": 1}])
        tests = loaded("apps", row).tests
        assert isinstance(tests, CallCases)
        assert tests.cases() == [(({1: 2},), {2: 1})]

    def test_rows_that_cannot_be_verified(self) -> None:
        cases = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
        assert dropped("apps", apps()) == "no tests"
        assert dropped("apps", apps(inputs=[], outputs=[])) == "no tests"
        assert dropped("apps", apps("[Image]", **cases)) == "the question is an image"
        assert dropped("apps", apps(inputs=["1 2\n"], outputs=[])) == "the tests cannot be read"
        assert dropped("apps", apps(fn_name="f g", inputs=[[1]], outputs=[[1]])) == "the tests cannot be read"
        several = apps("Return any valid order of the moves.", fn_name="f", inputs=[[1]], outputs=[[1]])
        assert dropped("apps", several) == "several outputs are valid"
        broken = {**apps(), "input_output": '{"inputs": ["1'}
        assert dropped("apps", broken) == "the tests cannot be read"
        huge = {**apps(), "input_output": '{"fn_name": "f", "inputs": [[1]], "outputs": [' + "9" * 5000 + "]}"}
        assert dropped("apps", huge) == "the tests cannot be read"
        with pytest.raises(ValueError, match="question must be a string, got None"):
            LAYOUTS["apps"].question({**apps(**cases), "question": None}, 0)
        with pytest.raises((ValueError, TypeError, AttributeError)):
            LAYOUTS["apps"].question({**apps(**cases), "input_output": '["a"]'}, 0)
        with pytest.raises(ValueError, match="input_output must be JSON text"):
            LAYOUTS["apps"].question({**apps(**cases), "input_output": {"inputs": []}}, 0)

    @each_row(
        "sentence",
        ["If there are multiple answers, print any.", "Print any of them.", "Output any valid order of moves.",
         "If there are several possible solutions, you may output any of these.", "You can print any correct answer.",
         "In case of many answers, the first counts.", "Print the numbers in any order."],
    )  # fmt: skip
    def test_several_valid_outputs(self, sentence: str) -> None:
        row = apps(f"{SUM} {sentence}", inputs=["1 2\n"], outputs=["3\n"])
        assert dropped("apps", row) == "several outputs are valid"

    @pytest.mark.parametrize(
        ("sentence", "any_case"),
        [("Print YES or NO. You can print each letter in any case.", True), ("Print it in any register.", True),
         ("Many people give several numbers.", False), ("There is no number with any digit.", False)],
    )  # fmt: skip
    def test_other_sentences_are_kept(self, sentence: str, any_case: bool) -> None:
        tests = loaded("apps", apps(f"{SUM} {sentence}", inputs=["1 2\n"], outputs=["3\n"])).tests
        assert isinstance(tests, StdinCases)
        assert tests.ignore_case is any_case

    def test_many_cases_are_thinned_out_evenly(self) -> None:
        texts = [str(number) for number in range(1_000)]
        tests = loaded("apps", apps(inputs=texts, outputs=texts)).tests
        assert isinstance(tests, StdinCases)
        kept = [int(text) for text in tests.inputs]
        assert len(kept) == 100
        assert (kept[0], kept[-1]) == (0, 999)
        assert {b - a for a, b in pairwise(kept)} <= {10, 11}
        assert tests.outputs == tests.inputs

    def test_large_cases_are_left_out_where_they_do_not_fit(self) -> None:
        large = "1" * 700_000
        tests = loaded("apps", apps(inputs=["a", large, large, "b"], outputs=["1", "2", "3", "4"])).tests
        assert isinstance(tests, StdinCases)
        assert tests.outputs == ("1", "2", "4")


@pytest.mark.parametrize(
    ("limit", "seconds"), [("2.0 seconds", 2.0), ("1 second", 1.0), (None, None), ("", None), ("0.0 seconds", None)]
)
def test_taco_has_time_limits(limit: str | None, seconds: float | None) -> None:
    row = apps(inputs=["1 2\n"], outputs=["3\n"]) | {
        "name": None, "source": "codeforces", "tags": "[]", "skill_types": "[]", "raw_tags": "[]", "date": None,
        "time_limit": limit, "memory_limit": "256.0 megabytes", "picture_num": None, "Expected Auxiliary Space": None,
        "Expected Time Complexity": None,
    }  # fmt: skip
    assert loaded("taco", row).time_limit_s == seconds


def contest(**changes: Any) -> dict[str, Any]:
    return {
        "name": "76_B. Mice",
        "description": SUM,
        "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
        "private_tests": {"input": ["3 4\n"], "output": ["7\n"]},
        "generated_tests": {"input": [], "output": []},
        "source": 2,
        "difficulty": 8,
        "solutions": {"language": [2, 1, 3, 3], "solution": ["int main", "print 1", "print(sum(1))", "later"]},
        "incorrect_solutions": {"language": [3], "solution": ["print(0)"]},
        "cf_contest_id": 76,
        "time_limit": {"seconds": 0, "nanos": 500000000},
        "memory_limit_bytes": 256000000,
        "input_file": "",
        "output_file": "",
        **changes,
    }


class TestCodeContests:
    def test_all_tests_limits_and_a_solution_in_python_3(self) -> None:
        row = contest(generated_tests={"input": ["5 6\n"], "output": ["11\n"]})
        tests = loaded("code_contests", row)
        assert isinstance(tests.tests, StdinCases)
        assert tests.tests.inputs == ("1 2\n", "3 4\n", "5 6\n")
        assert tests.tests.outputs == ("3\n", "7\n", "11\n")
        assert (tests.time_limit_s, tests.memory_bytes) == (0.5, 256000000)
        assert tests.solution == "print(sum(1))"

    def test_what_is_missing(self) -> None:
        tests = loaded("code_contests", contest(time_limit=None, memory_limit_bytes=0, solutions=None))
        assert (tests.time_limit_s, tests.memory_bytes, tests.solution) == (None, None, None)

    def test_rows_that_cannot_be_verified(self) -> None:
        empty = {"input": [], "output": []}
        assert dropped("code_contests", contest(public_tests=empty, private_tests=empty)) == "no tests"
        assert dropped("code_contests", contest(input_file="in.txt")) == "the program reads or writes files"
        assert dropped("code_contests", contest(description="<image>")) == "the question is an image"
        several = contest(description=f"{SUM} If there are multiple solutions, print any of them.")
        assert dropped("code_contests", several) == "several outputs are valid"


def codeforces(**changes: Any) -> dict[str, Any]:
    return {
        "id": "1/A", "aliases": None, "contest_id": "1", "index": "A", "time_limit": 2.0, "memory_limit": 256.0,
        "title": "Sum", "description": "Add two integers.", "input_format": "One line with two integers.",
        "output_format": "Their sum.", "interaction_format": None, "note": "It is easy.",
        "examples": [{"input": "1 2", "output": "3"}], "editorial": None, "rating": 800, "tags": ["math"],
        "official_tests": [{"input": "1 2", "output": "3"}, {"input": "3 4", "output": "7"}],
        "official_tests_complete": True, "input_mode": "stdio", "generated_checker": None, "executable": True,
        "generated_tests": 0, **changes,
    }  # fmt: skip


class TestCodeforces:
    def test_examples_and_official_tests_once_each(self) -> None:
        row = codeforces()
        tests = loaded("codeforces", row)
        assert tests.tests == StdinCases(("1 2", "3 4"), ("3", "7"), tolerance=1e-6)
        assert (tests.time_limit_s, tests.memory_bytes) == (2.0, 256 << 20)
        text = read("codeforces", row).text
        for part in (
            "# Sum",
            "## Input\nOne line",
            "## Output\nTheir sum.",
            "## Note\nIt is",
            "Input:\n1 2\nOutput:\n3",
        ):
            assert part in text

    @pytest.mark.parametrize(
        ("change", "reason"),
        [({"interaction_format": "Ask."}, "the program is interactive"),
         ({"input_mode": "file"}, "the program reads or writes files"),
         ({"generated_checker": "import sys"}, "the tests need a checker"),
         ({"official_tests": None, "examples": None}, "no tests"),
         ({"output_format": "Print any of the answers."}, "several outputs are valid")],
    )  # fmt: skip
    def test_rows_that_cannot_be_verified(self, change: dict[str, Any], reason: str) -> None:
        assert dropped("codeforces", codeforces(**change)) == reason


def packed(cases: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def live(kind: str, public: list[tuple[str, str]], private: str, **changes: Any) -> dict[str, Any]:
    return {
        "question_title": "Sum", "question_content": SUM, "platform": "atcoder", "question_id": "abc1_a",
        "contest_id": "abc1", "contest_date": "2023-08-21T00:00:00", "starter_code": "", "difficulty": "easy",
        "public_test_cases": json.dumps([{"input": i, "output": o, "testtype": kind} for i, o in public]),
        "private_test_cases": private, "metadata": "{}", **changes,
    }  # fmt: skip


class TestLiveCodeBench:
    PRIVATE = ({"input": "3 4\n", "output": "7", "testtype": "stdin"},)

    @pytest.mark.parametrize("form", [packed, json.dumps])
    def test_private_cases_of_both_forms(self, form: Any) -> None:
        tests = loaded("livecodebench", live("stdin", [("1 2\n", "3\n")], form(list(self.PRIVATE)))).tests
        assert tests == StdinCases(("1 2\n", "3 4\n"), ("3\n", "7"), "lines", 0.0)

    def test_a_function(self) -> None:
        private = [{"input": '[3, 4]\n"x"', "output": "[7.5]", "testtype": "functional"}]
        row = live("functional", [('[1, 2]\n"y"', "[3]")], packed(private), metadata='{"func_name": "addAll"}',
                   starter_code="class Solution:\n    def addAll(self, a: List[int], b: str) -> int:\n  ")  # fmt: skip
        tests = loaded("livecodebench", row).tests
        assert isinstance(tests, CallCases)
        assert tests.function == "addAll"
        assert tests.cases() == [(([1, 2], "y"), [3]), (([3, 4], "x"), [7.5])]
        assert "class Solution:" in read("livecodebench", row).text

    def test_a_pickle_of_anything_but_text_is_rejected(self) -> None:
        class Attack:
            def __reduce__(self) -> Any:
                return os.system, ("touch /tmp/brorl_was_here",)

        for value, problem in ((Attack(), "it names .*system"), ([1], "must be JSON text")):
            private = base64.b64encode(zlib.compress(pickle.dumps(value))).decode()
            with pytest.raises(ValueError, match=problem):
                LAYOUTS["livecodebench"].question(live("stdin", [("1", "2")], private), 0)
        assert not os.path.exists("/tmp/brorl_was_here")  # noqa: PTH110
        for broken in ("no base64!", base64.b64encode(b"no zlib").decode()):
            with pytest.raises(ValueError, match="private_test_cases cannot be unpacked"):
                LAYOUTS["livecodebench"].question(live("stdin", [("1", "2")], broken), 0)

    def test_no_cases(self) -> None:
        assert dropped("livecodebench", live("stdin", [], "[]")) == "no tests"


def eurus(ability: str, question: str, answer: Any) -> dict[str, Any]:
    return {
        "data_source": "taco",
        "prompt": [{"content": "You have these actions: [ASSESS]", "role": "system"},
                   {"content": question, "role": "user"}],
        "ability": ability,
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": 0, "split": "dummy"},
    }  # fmt: skip


class TestEurus:
    ASKED = (
        f"{SUM}\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
    )

    def test_rows_of_code(self) -> None:
        row = eurus("code", self.ASKED, json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}))
        assert read("eurus2", row).text == self.ASKED
        assert loaded("eurus2", row).tests == StdinCases(("1 2\n",), ("3\n",), tolerance=1e-5)

    def test_a_function_is_named_in_the_question(self) -> None:
        answer = json.dumps({"fn_name": "minFlips", "inputs": [["0101"], ["1111"]], "outputs": [[0], [2]]})
        named = eurus("code", f"{self.ASKED} Complete minFlips().", answer)
        assert read("eurus2", named).text == f"{self.ASKED} Complete minFlips()."
        assert "Write the Python function `minFlips`." in read("eurus2", eurus("code", self.ASKED, answer)).text
        tests = loaded("eurus2", named).tests
        assert isinstance(tests, CallCases)
        assert tests.unwrap
        assert tests.cases() == [(("0101",), [0]), (("1111",), [2])]

    def test_arguments_as_lines_of_json(self) -> None:
        answer = json.dumps({"fn_name": "f", "inputs": ['[1, 2]\n"x"'], "outputs": ["[3]"]})
        tests = loaded("eurus2", eurus("code", self.ASKED, answer)).tests
        assert isinstance(tests, CallCases)
        assert tests.cases() == [(([1, 2], "x"), [3])]

    def test_rows_of_mathematics_and_others(self) -> None:
        fields = read(
            "eurus2", eurus("math", "What is 1 + 1?\n\nPresent the answer in LaTex format: \\boxed{Your answer}", "2")
        )
        assert (fields.reference, fields.domain) == ("2", "math")
        assert fields.text.startswith("What is 1 + 1?")
        assert dropped("eurus2", eurus("law", "Who?", "I")) == "the ability is law"
        assert dropped("eurus2", eurus("code", self.ASKED, "")) == "no tests"

    def test_one_source_of_the_code(self) -> None:
        answer = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
        for name in ("apps", "codecontests", "codeforces", "taco"):
            row = {**eurus("code", self.ASKED, answer), "data_source": name}
            assert read(f"prime_{name}", row) == read("eurus2_code", row)
            for other in ("numina_olympiads", "apps" if name == "taco" else "taco"):
                assert (
                    dropped(f"prime_{name}", {**row, "data_source": other}) == f"the data_source is {other}, not {name}"
                )


class TestFunctionsWithTestCode:
    def test_human_eval(self) -> None:
        prompt = 'from typing import List\n\n\ndef add(x: List[int]) -> int:\n    """Add all numbers."""\n'
        row = {
            "task_id": "HumanEval/0", "prompt": prompt, "canonical_solution": "    return sum(x)\n",
            "entry_point": "add", "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n",
        }  # fmt: skip
        tests = loaded("humaneval", row)
        assert isinstance(tests.tests, TestCode)
        assert tests.tests.function == "add"
        assert tests.tests.code.endswith("check(candidate)\n")
        assert tests.prelude == "from typing import List"
        names: dict[str, Any] = {}
        exec(f"{tests.solution}\ncandidate = add\n{tests.tests.code}", names)
        assert prompt.strip() in read("humaneval", row).text

    @pytest.mark.parametrize(
        ("call", "shown"),
        [("assertion(add(*inp), exp, 0)", ["assert add(1, 2) == 3"]),
         ("assertion(set(add(*inp)), exp, 0)", []),
         ("pass", ["assert set(add(1, 2)) == set((3,))"]),
         ("pass", ["assert math.isclose(add(1, 2), 3.0)"]), ("pass", ["assert not add(1, 2)"])],
    )  # fmt: skip
    def test_mbpp(self, call: str, shown: list[str]) -> None:
        row = {
            "task_id": 2, "code": "def add(a, b):\n    return a + b", "prompt": "Write a function to add two numbers.",
            "source_file": "a.ipynb", "test_imports": ["import math"], "test_list": shown,
            "test": f"inputs = [[1, 2]]\nresults = [3]\nfor i, (inp, exp) in enumerate(zip(inputs, results)):\n"
                    f"    {call}\nadd(1, 2)\n",
        }  # fmt: skip
        tests = loaded("mbpp", row)
        assert isinstance(tests.tests, TestCode)
        assert tests.tests.function == "add"
        assert (tests.prelude, tests.solution) == ("import math", row["code"])
        assert all(line in read("mbpp", row).text for line in shown)

    @pytest.mark.parametrize(("layout", "text"), [("mbpp_original", "text"), ("mbpp_sanitized", "prompt")])
    def test_mbpp_with_assertions_alone_shows_the_first(self, layout: str, text: str) -> None:
        shown = ["assert sorted(add([1], [2])) == [1, 2]", "assert add([], [5]) == [5]"]
        row = {
            text: "Write a function to join two lists.",
            "code": "def add(a, b):\r\n  return a + b",
            "test_list": shown,
        }
        fields = LAYOUTS[layout].question(row, 0)
        tests = CodeTests.from_text(fields.reference)
        assert isinstance(tests.tests, TestCode)
        assert (tests.tests.function, tests.tests.code, tests.prelude) == ("add", "\n".join(shown), "")
        assert (shown[0] in fields.text, shown[1] in fields.text) == (True, False)
        more = {"test_setup_code": "import math", "test_imports": ["import math"], "challenge_test_list": ["add(1, 2)"]}
        tests = CodeTests.from_text(LAYOUTS[layout].question({**row, **more}, 0).reference)
        assert isinstance(tests.tests, TestCode)
        assert (tests.tests.code, tests.prelude) == ("\n".join([*shown, "add(1, 2)"]), "import math")

    def test_optional_columns_are_read_from_parquet(self, tmp_path: Path) -> None:
        row = {
            "text": "Add.", "code": "def add(a):\n  return a", "test_list": ["assert add(1) == 1"],
            "test_setup_code": "import math", "challenge_test_list": ["assert add(2) == 2"], "task_id": 1,
        }  # fmt: skip
        parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
        (question,) = read_source(FileSource(path=str(tmp_path / "rows.parquet"), layout="mbpp_original")).questions
        tests = CodeTests.from_text(question.reference)
        assert isinstance(tests.tests, TestCode)
        assert ("add(2)" in tests.tests.code, tests.prelude) == (True, "import math")

    def test_mbpp_without_a_call(self) -> None:
        row = {"code": "", "prompt": "Add.", "test_imports": [], "test_list": [], "test": "pass"}
        assert dropped("mbpp", row) == "no tests"
