"""Reading questions against plain loops over what was written; a refusal names the place, the problem and the fix."""

import csv
import errno
import json
import os
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from brorl.errors import UserError
from brorl.prompts.file_questions import read_commas, read_source
from brorl.prompts.public_data import layouts_of
from brorl.prompts.question import Message, Question
from brorl.prompts.row_readers import read_rows
from brorl.prompts.settings import FileSource
from each_row import each_row
from error_names import check_names

KINDS = ".jsonl, .json, .parquet, .csv, .tsv"
DEFAULT = {"prompt": "1 + 1?", "answer": "2"}


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return str(path)


def some_rows(rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    a, b = rng.integers(0, 10**6, (2, count)).tolist()
    return [{"prompt": f"{i}: {x} + {y} = ?", "answer": str(x + y)} for i, (x, y) in enumerate(zip(a, b, strict=True))]


def read(path: Any, **settings: Any) -> list[Question]:
    return list(read_source(FileSource(path=str(path), **{"name": "s", **settings})).questions)


def pairs(questions: list[Question]) -> list[tuple[str, str]]:
    return [(q.text, q.reference) for q in questions]


def refusal(path: str, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{Path.cwd()}/", "")  # paths are absolute


class TestFormats:
    def test_a_question_carries_all_its_columns(self, tmp_path: Path) -> None:
        path = write_lines(
            tmp_path / "q.jsonl", [{"q": "2?", "a": "so\n#### 2", "key": 7, "kind": "code", "other": None}]
        )
        columns = {"prompt_column": "q", "answer_column": "a", "id_column": "key", "domain_column": "kind"}
        assert read(path, **columns, answer_after="####") == [Question("s:7", "2?", "2", "code", "s")]

    # U+2028, U+0085 and a carriage return end a line for str.splitlines, and not in a file of JSON lines.
    @given(
        st.lists(
            st.tuples(*[st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)] * 2),
            min_size=1, max_size=6, unique_by=lambda row: row[0],
        ),
        st.booleans(), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n", "\n \r\n"]),
    )  # fmt: skip
    def test_any_text_survives_json_lines_and_arrays(
        self, tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], escape: bool, bom: bool, end: str
    ) -> None:
        folder = tmp_path_factory.mktemp("round")
        lines = [json.dumps({"prompt": p, "answer": a}, ensure_ascii=escape) for p, a in rows]
        encoding = "utf-8-sig" if bom else "utf-8"
        (folder / "a.jsonl").write_bytes(end.join(lines).encode(encoding))
        (folder / "b.jsonl").write_bytes("".join(line + end for line in lines).encode(encoding))
        (folder / "c.json").write_bytes(f"{end}[{f'{end}, '.join(lines)}{end}]{end}".encode(encoding))
        (folder / "d.json").write_bytes("".join(line + end for line in lines).encode(encoding))
        for name in "a.jsonl", "b.jsonl", "c.json", "d.json":
            assert pairs(read(folder / name)) == rows

    def test_ids_are_line_numbers_and_blank_lines_count(self, tmp_path: Path) -> None:
        (tmp_path / "q.jsonl").write_text('\n{"prompt": "a", "answer": 1}\n \n{"prompt": "b", "answer": 2}')
        assert [q.id for q in read(tmp_path / "q.jsonl")] == ["s:2", "s:4"]

    def test_parquet_gives_what_json_lines_give(self, tmp_path: Path, rng: np.random.Generator) -> None:
        rows = some_rows(rng, 3000)  # over several batches
        lines = write_lines(tmp_path / "q.jsonl", rows)
        parquet.write_table(pa.Table.from_pylist([{"other": [1], **row} for row in rows]), tmp_path / "q.parquet")
        found = read(tmp_path / "q.parquet")
        assert found == read(lines)
        assert pairs(found) == [(row["prompt"], row["answer"]) for row in rows]
        assert found[2999].id == "s:3000"

    def test_numbers_become_their_shortest_text(self, tmp_path: Path) -> None:
        answers = [42, -3, 0.5, 1e-7, 2.0, 10**30]
        lines = write_lines(tmp_path / "q.jsonl", [{"prompt": i, "answer": a} for i, a in enumerate(answers)])
        assert pairs(read(lines)) == [(str(i), str(a)) for i, a in enumerate(answers)]
        columns = {
            "int8": pa.array([7], pa.int8()),
            "float32": pa.array([0.1], pa.float32()),
            "float16": pa.array([np.float16(0.1)], pa.float16()),
            "decimal": pa.array([Decimal("0.10")]),
        }
        parquet.write_table(pa.table({"prompt": ["?"], **columns}), tmp_path / "q.parquet")
        found = {name: read(tmp_path / "q.parquet", answer_column=name)[0].reference for name in columns}
        assert found == {"int8": "7", "float32": "0.1", "float16": "0.1", "decimal": "0.10"}

    def test_folders_and_patterns_are_read_by_name(self, tmp_path: Path, rng: np.random.Generator) -> None:
        rows = some_rows(rng, 9)
        (tmp_path / "sub").mkdir()
        (tmp_path / ".cache").mkdir()
        write_lines(tmp_path / "b.jsonl", rows[2:5])
        parquet.write_table(pa.Table.from_pylist(rows[:2]), tmp_path / "a.parquet")
        (tmp_path / "sub" / "c.json").write_text(json.dumps(rows[5:]))
        (tmp_path / "README.md").write_text("not data")
        write_lines(tmp_path / ".cache" / "x.jsonl", [{"prompt": "hidden", "answer": 0}])
        found = read(tmp_path)
        assert pairs(found) == [(row["prompt"], row["answer"]) for row in rows]
        parts = {"a.parquet": 2, "b.jsonl": 3, "sub/c.json": 4}
        assert [q.id for q in found] == [f"s:{part}:{i}" for part, end in parts.items() for i in range(1, end + 1)]
        assert read(f"{tmp_path}/**/*.js*") == found[2:]
        assert pairs(read(f"{tmp_path}/?.jsonl")) == pairs(found[2:5])

    def test_patterns_may_be_relative(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_lines(tmp_path / "b.jsonl", [{"prompt": "b", "answer": 1}])
        write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "answer": 1}])
        monkeypatch.chdir(tmp_path)
        assert [q.id for q in read("*.jsonl")] == ["s:a.jsonl:1", "s:b.jsonl:1"]
        assert [q.id for q in read("b.jsonl")] == ["s:1"]

    def test_limit_reads_the_first_rows_and_no_further(self, tmp_path: Path, rng: np.random.Generator) -> None:
        rows = some_rows(rng, 5)
        path = write_lines(tmp_path / "q.jsonl", [*rows, "broken"])
        assert pairs(read(path, limit=5)) == [(r["prompt"], r["answer"]) for r in rows]
        assert len(read(path, limit=2)) == 2

    def test_true_and_false_are_words(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "q.jsonl", [{"prompt": "a", "answer": True}, {"prompt": "b", "answer": False}])
        assert [q.reference for q in read(path)] == ["true", "false"]

    def test_an_answer_is_what_follows_its_last_marker(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "q.jsonl", [{"prompt": "?", "answer": "#### 1 no\n####  1,000 \n"}])
        assert read(path, answer_after="####")[0].reference == "1,000"

    def test_keys_inside_columns(self, tmp_path: Path) -> None:
        row = {"prompt": "?", "reward_model": {"ground_truth": "34", "style": "rule"}, "extra": {"index": {"i": 5}}}
        write_lines(tmp_path / "q.jsonl", [row])
        parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "q.parquet")
        for name in "q.jsonl", "q.parquet":
            found = read(tmp_path / name, answer_column="reward_model.ground_truth", id_column="extra.index.i")
            assert found == [Question("s:5", "?", "34", "math", "s")]
        literal = write_lines(tmp_path / "dots.jsonl", [{"prompt": "?", "a.b": "1", "a": {"b": "2"}}])
        assert read(literal, answer_column="a.b")[0].reference == "1"

    def test_messages_are_prompts_and_a_lone_one_is_its_text(self, tmp_path: Path) -> None:
        talk = [{"content": "Be brief.", "role": "system"}, {"role": "user", "content": "Hi {prompt}", "name": None}]
        rows = [{"prompt": talk, "answer": "a"}, {"prompt": talk[1:], "answer": "b"}]
        write_lines(tmp_path / "q.jsonl", rows)
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "q.parquet")
        for name in "q.jsonl", "q.parquet":
            first, second = read(tmp_path / name)
            assert first.messages == (Message("system", "Be brief."), Message("user", "Hi {prompt}"))
            assert (first.text, second.text, second.messages) == ("", "Hi {prompt}", ())


class TestTables:
    @pytest.mark.parametrize(("name", "separator"), [("q.csv", ","), ("q.csv", ";"), ("q.TSV", "\t")])
    @given(
        st.lists(
            st.tuples(*[st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"), min_size=1)
                        .filter(str.strip)] * 2), min_size=1, max_size=5, unique_by=lambda row: row[0],
        )
    )  # fmt: skip
    def test_any_text_survives(
        self, tmp_path_factory: pytest.TempPathFactory, name: str, separator: str, rows: list[tuple[str, str]]
    ) -> None:
        path = tmp_path_factory.mktemp("tables") / name
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file, delimiter=separator).writerows([("prompt", "answer"), *rows])
        assert pairs(read(path)) == rows

    def test_numbers_stay_as_they_are_written(self, tmp_path: Path) -> None:
        answers = ["007", "1e3", "1.50", "TRUE", "1,000", "NA", " 5"]
        lines = [f'{i}?,"{answer}"' for i, answer in enumerate(answers)]
        (tmp_path / "q.csv").write_text("\n".join(["prompt,answer", *lines]))
        found = read(tmp_path / "q.csv")
        assert pairs(found) == [(f"{i}?", answer) for i, answer in enumerate(answers)]

    def test_ids_and_errors_have_the_line_in_which_a_row_begins(self, tmp_path: Path) -> None:
        path = tmp_path / "q.csv"
        path.write_text('prompt,answer\n"two\nlines",2\n\n"four\nlines",4\n5,\n')
        assert refusal(str(path)) == f"{path} line 7: answer is empty; fill it in or delete the row"
        path.write_text('prompt,answer\n"two\nlines",2\n\n"four\nlines",4\n')
        assert [q.id for q in read(path)] == ["s:2", "s:5"]

    @each_row(
        ("raw", "named"),
        [
            (b"prompt,answer\n1,2,3\n", (" line 2 ", "3 values for 2 columns (prompt, answer)", "double quotes")),
            (b"prompt,answer\n1\n", (" line 2 ", "1 values for 2 columns (prompt, answer)", "double quotes")),
            (b'prompt,answer\n1,2\n"3,4\n', (" line 3 ", "unexpected end of data", "a quote")),
            (b"answer,answer\n1,2\n", ("two columns named 'answer'",)),
            (b"answer, answer\n1,2\n", ("two columns named 'answer'",)),
            (b"prompt,answer\n\xe9,2\n", (" line 2 ", "byte 0xe9 at 1", "UTF-8")),
            (b"prompt,answer\n", ("is empty", "`path`")),
            (b"", ("is empty", "`path`")),
        ],
    )
    def test_what_is_no_table(self, tmp_path: Path, raw: bytes, named: tuple[str, ...]) -> None:
        (tmp_path / "q.csv").write_bytes(raw)
        check_names(refusal(str(tmp_path / "q.csv")), f"{tmp_path}/q.csv", *named)


class TestDataSets:
    def test_what_datasets_saved(self, tmp_path: Path, rng: np.random.Generator) -> None:
        rows = some_rows(rng, 1500)
        saved = datasets.Dataset.from_list([{"unused": 1.5, **row} for row in rows]).with_format("numpy")
        saved.save_to_disk(str(tmp_path / "one"))
        datasets.DatasetDict(train=saved.select(range(7)), test=saved).save_to_disk(str(tmp_path / "two"))
        expected = [(row["prompt"], row["answer"]) for row in rows]
        found = read(tmp_path / "one")
        assert pairs(found) == expected
        assert found[-1].id == "s:1500"
        assert pairs(read(tmp_path / "two")) == expected[:7]
        assert pairs(read(tmp_path / "two", split="test")) == expected
        path = str(tmp_path / "two")
        fix = ("`split`", f"`path: {path}/train`")
        check_names(refusal(path, split="tset"), path, "'tset'", "train, test", *fix)
        said = refusal(path, answer_column="solution")
        check_names(said, f"{path} (train) row 1", "'solution'", "unused, prompt, answer", "answer_column: answer")
        assert pairs(read(f"{path}/test")) == expected  # a split alone
        shuffled = saved.shuffle(seed=1)
        shuffled.save_to_disk(str(tmp_path / "shards"), num_shards=3)
        assert pairs(read(tmp_path / "shards")) == [
            (row["prompt"], row["answer"]) for row in shuffled.with_format(None)
        ]
        (tmp_path / "one" / "state.json").write_text("{}")
        assert refusal(str(tmp_path / "one")).startswith(f"the dataset in {tmp_path}/one cannot be read (")

    def test_the_hub_is_asked_for_ids(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A shuffled dataset with a numpy format, whose rows are not in the order of its table."""
        monkeypatch.chdir(tmp_path)
        table = datasets.Dataset.from_dict(
            {"question": [f"q{i}" for i in range(9)], "answer": [f"x #### {i}" for i in range(9)]}
        )
        asked: list[Any] = []

        def load(*args: Any, **kwargs: Any) -> datasets.Dataset:
            asked.append((args, kwargs))
            return table.shuffle(seed=1)

        monkeypatch.setattr(datasets, "load_dataset", load)
        columns = {"prompt_column": "question", "answer_after": "####"}
        found = read("openai/gsm8k", name="gsm8k", **columns, subset="main", split="test")
        assert pairs(found) == [(r["question"], r["question"][1:]) for r in table.shuffle(seed=1)]
        assert asked == [(("openai/gsm8k", "main"), {"split": "test", "revision": None})]
        assert [q.id for q in found][:2] == ["gsm8k:1", "gsm8k:2"]

    def test_a_revision_of_a_dataset(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`datasets` gets it, layouts know the dataset at any revision, and a file may have an @ in its name."""
        asked: list[Any] = []

        def load(*args: Any, **kwargs: Any) -> datasets.Dataset:
            asked.append((args, kwargs))
            return datasets.Dataset.from_dict({"question": ["q"], "answer": ["x #### 3"]})

        monkeypatch.setattr(datasets, "load_dataset", load)
        monkeypatch.chdir(tmp_path)
        assert FileSource(path="openai/gsm8k@v1.2").label == "gsm8k"
        assert pairs(read("openai/gsm8k@v1.2", subset="main", layout="gsm8k")) == [("q", "3")]
        assert asked == [(("openai/gsm8k", "main"), {"split": "train", "revision": "v1.2"})]
        assert layouts_of("openai/gsm8k@v1.2") == ["gsm8k"]
        (tmp_path / "openai").mkdir()
        write_lines(tmp_path / "openai" / "mine@home.jsonl", [DEFAULT])
        assert len(read("openai/mine@home.jsonl")) == 1

    def test_what_the_hub_says_is_passed_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The reason is that of datasets itself, about a folder of this shape."""
        (tmp_path / "o" / "d").mkdir(parents=True)
        write_lines(tmp_path / "o" / "d" / "train.jsonl", [DEFAULT])
        real = datasets.load_dataset

        def load(path: str, *args: Any, **kwargs: Any) -> Any:
            return real(str(tmp_path / path), *args, **kwargs, cache_dir=str(tmp_path / "cache"))

        monkeypatch.setattr(datasets, "load_dataset", load)
        wrong_split, wrong_subset = refusal("o/d", split="tset"), refusal("o/d", subset="main")
        check_names(wrong_split, "o/d (split tset)", "Should be one of ['train']", "`path`", "connection")
        check_names(wrong_subset, "o/d (subset main, split train)", "BuilderConfig 'main' not found", "connection")
        check_names(refusal("o/none"), "o/none (split train)")

    def test_without_the_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        check_names(refusal("openai/gsm8k"), "openai/gsm8k", "not a file", "pip install 'brorl[datasets]'")
        (tmp_path / "dataset_dict.json").write_text("{}")
        check_names(refusal(str(tmp_path)), str(tmp_path), "pip install 'brorl[datasets]'")
        assert read(write_lines(tmp_path / "q.jsonl", [DEFAULT]))


class TestPaths:
    def test_nothing_of_this_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub for a file"))
        here = f"working directory {tmp_path}"
        for path in ("prompts.jsonl", "data/prompts.parquet", "./data/x", "/no/x", "../x", "a/b/c", "gsm8k", "~/x"):
            check_names(refusal(path), f"no file or folder {path} ", here, "`path`", "openai/gsm8k")
        check_names(refusal("data/*.jsonl"), "data/*.jsonl", KINDS, here, "`path`")
        (tmp_path / "empty").mkdir()
        check_names(refusal("empty"), "folder empty", KINDS, "`path`")
        (tmp_path / "a.xlsx").write_text("prompt,answer")
        check_names(refusal("a.xlsx"), "a.xlsx", KINDS, "to_json('a.jsonl')")
        write_lines(tmp_path / "q.jsonl", [DEFAULT])
        check_names(refusal("q.jsonl", subset="main"), "q.jsonl", "'main'", "remove `subset`")

    def test_a_folder_of_splits_is_not_all_trained_on(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "train-00.jsonl", [DEFAULT])
        assert len(read(tmp_path)) == 1
        write_lines(tmp_path / "contest.jsonl", [DEFAULT])
        assert len(read(tmp_path)) == 1
        write_lines(tmp_path / "test-00.jsonl", [DEFAULT])
        fix = f"`path: {tmp_path}/train-00.jsonl`"
        check_names(refusal(str(tmp_path)), f"folder {tmp_path}", "train-00.jsonl, test-00.jsonl", fix)

    def test_a_folder_that_is_named_like_a_file_is_searched(self, tmp_path: Path) -> None:
        """As Spark and Dask write them: a folder train.jsonl of parts."""
        (folder := tmp_path / "train.jsonl").mkdir()
        write_lines(folder / "part-0000.jsonl", [DEFAULT])
        assert len(read(tmp_path)) == 1

    def test_a_file_without_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = Path(write_lines(tmp_path / "q.jsonl", [DEFAULT]))
        path.chmod(0)

        def refuse(self: Path, _: str) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))

        if os.geteuid() == 0:  # whom nothing is denied
            monkeypatch.setattr(Path, "open", refuse)
        check_names(refusal(str(path)), str(path), "Permission denied", "`path`")


@each_row(
    ("domain", "answers", "read_as"),
    [
        ("math", ["32,5", "2,5", "7"], ["32.5", "2.5", "7"]),
        ("math", ["2,5", "3.5"], ["2, 5", "3.5"]),
        ("math", ["2,5", "1,3"], ["2,5", "1,3"]),
        ("math", ["1,000", "2,500"], ["1,000", "2,500"]),
        (
            "science",
            ["32,5 m", '{"value": "2,5", "tolerance": 0.05}'],
            ["32.5 m", '{"value": "2,5", "tolerance": 0.05}'],
        ),
        ("own", ["32,5", "2,5"], ["32,5", "2,5"]),
    ],
)
def test_commas_have_one_reading_in_a_column(
    tmp_path: Path, domain: str, answers: list[str], read_as: list[str]
) -> None:
    rows = [{"prompt": f"{number}?", "answer": answer} for number, answer in enumerate(answers)]
    path = write_lines(tmp_path / "q.jsonl", rows)
    reading = read_commas(read_source(FileSource(path=path, domain=domain)), ["math", "science"])
    assert [question.reference for question in reading.questions] == read_as


USER, ASSISTANT = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Reply with a number."}


class TestConversations:
    @each_row(
        ("row", "settings", "key", "reference"),
        [
            # JSON text of messages is messages, and any other list is text
            ({"prompt": json.dumps([SYSTEM, USER]), "answer": "2"}, {}, [SYSTEM, USER], "2"),
            ({"prompt": str([USER]), "answer": "2"}, {}, [USER], "2"),
            ({"prompt": '["a", "b"]', "answer": "2"}, {}, '["a", "b"]', "2"),
            ({"prompt": '[{"role": "user"}]', "answer": "2"}, {}, '[{"role": "user"}]', "2"),
            # the answer at their end is never shown
            ({"messages": [SYSTEM, USER, ASSISTANT]}, {"prompt_column": "messages", "answer_column": "messages"},
             [SYSTEM, USER], "2"),
            ({"messages": json.dumps([USER, ASSISTANT])}, {"prompt_column": "messages", "answer_column": "messages"},
             [USER], "2"),
            ({"prompt": [USER, ASSISTANT, USER, ASSISTANT], "answer": "3"}, {}, [USER, ASSISTANT, USER], "3"),
            ({"prompt": [USER], "answer": [ASSISTANT]}, {}, [USER], "2"),
        ],
    )  # fmt: skip
    def test_they_are_split(
        self, tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], key: Any, reference: str
    ) -> None:
        (question,) = read(write_lines(tmp_path / "q.jsonl", [row]), **settings)
        shown = [(message.role, message.content) for message in question.messages] or question.text
        wanted = key if isinstance(key, str) else [(turn["role"], turn["content"]) for turn in key]
        assert shown == (wanted[0][1] if len(wanted) == 1 and not isinstance(key, str) else wanted)
        assert question.reference == reference

    def test_one_without_an_answer_is_refused(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "q.jsonl", [{"messages": [USER]}, {"messages": [USER, ASSISTANT]}])
        said = refusal(path, prompt_column="messages", answer_column="messages")
        check_names(said, "q.jsonl line 1: messages", "assistant")


def test_all_bad_rows_are_in_one_error(tmp_path: Path) -> None:
    good = [json.dumps({"prompt": f"{number}?", "answer": number}) for number in range(30)]
    bad = {3: "{", 7: '{"prompt": "a?"}', 9: '{"prompt": "b?"}', 12: "[1]", 20: '{"prompt": "0?", "answer": 5}'}
    lines = [bad.get(number, text) for number, text in enumerate(good, 1)]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError) as caught:
        read(tmp_path / "q.jsonl")
    first, *rest = str(caught.value).split("\n")
    assert first == f"5 rows of {tmp_path}/q.jsonl cannot be used:"
    assert [line.strip().partition(":")[0] for line in rest if "and line" in line] == ["line 7 and line 9"]
    assert [int(number) for line in rest for number in re.findall(r"^  line (\d+)", line)] == [3, 7, 12, 20]


def test_an_error_on_many_bad_rows_is_bounded(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": [n]} for n in range(1500)] + [{"prompt": f"{n}!", "answer": n} for n in "ab"]
    with pytest.raises(UserError) as caught:
        read(write_lines(tmp_path / "q.jsonl", rows))
    first, *rest = str(caught.value).split("\n")
    assert first.startswith("at least 1,000 rows")
    assert len(rest) == 11
    assert rest[-1] == "  and 990 other rows"


@each_row(
    ("rows", "questions"),
    [
        ({"version": "1.1", "data": [DEFAULT]}, [("1 + 1?", "2")]),
        ({"about": "sums", "n": 1, "items": [DEFAULT], "authors": ["a"]}, [("1 + 1?", "2")]),
        ([DEFAULT], [("1 + 1?", "2")]),
        ({"prompt": "1 + 1?", "answer": "2", "turns": [USER]}, [("1 + 1?", "2")]),
    ],
)
def test_the_only_list_in_an_object_is_its_rows(tmp_path: Path, rows: Any, questions: list[tuple[str, str]]) -> None:
    for indent in (None, 1) if "prompt" not in rows else (None,):
        (tmp_path / "q.json").write_text(json.dumps(rows, indent=indent))
        assert pairs(read(tmp_path / "q.json")) == questions


def test_class_numbers_are_read_as_names(tmp_path: Path) -> None:
    """In Parquet files, in saved data sets and in lists, as `datasets` itself spells them."""
    names = ["neg", "pos"]
    label = datasets.ClassLabel(names=names)
    features = {"prompt": datasets.Value("string"), "answer": label, "more": datasets.List(label)}
    rows = {"prompt": ["a?", "b?", "c?"], "answer": [1, 0, 1], "more": [[0, 1], [], [1]]}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(str(tmp_path / "q.parquet"))
    for path in (tmp_path / "saved", tmp_path / "q.parquet"):
        assert [answer for _, answer in pairs(read(path))] == [label.int2str(number) for number in rows["answer"]]
        found = [row.values["more"] for row in read_rows(str(path), None, "train", ["more"])]
        assert found == [[names[number] for number in numbers] for numbers in rows["more"]]


@each_row(
    ("name", "said"),
    [
        ("z.jsonl.gz", "is compressed; unpack it first: gunzip"),
        ("z.csv.zst", "is compressed; unpack it first: unzstd"),
        ("z.txt", "load_dataset(...).to_json('z.jsonl')"),
    ],
)
def test_a_file_in_an_unknown_format_says_what_to_do(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert said in refusal(str(tmp_path / name))


def test_a_pattern_below_a_folder_with_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "dir[v1]"
    (folder / "deep").mkdir(parents=True)
    write_lines(folder / "a.jsonl", [DEFAULT])
    write_lines(folder / "deep" / "b.jsonl", [{**DEFAULT, "prompt": "2?"}])
    assert pairs(read(folder / "*.jsonl")) == [("1 + 1?", "2")]
    assert [question.id for question in read(folder / "**" / "*.jsonl")] == ["s:a.jsonl:1", "s:deep/b.jsonl:1"]
    monkeypatch.chdir(tmp_path)
    assert pairs(read("dir[v1]/*.jsonl")) == [("1 + 1?", "2")]
    assert "no file matches" in refusal("dir[v2]/*.jsonl")


MESSAGES_FORM = '[{"role": "user", "content": "..."}]'
JSON_FORM = '[{"COLUMN": VALUE, ...}, ...]'
JSON_TEXT = ("needs JSON text", "json.dumps")
OTHER_ANSWER = ("p.jsonl line 1", "'2' there, '3' here", "correct one row or delete both")


class TestRefusals:
    @each_row(
        ("row", "settings", "named"),
        [
            # a missing column: its name, the columns there are, and the one that is meant
            ({"question": "?", "solution": "2"}, {},
             ("'prompt'", "columns: question, solution", "prompt_column: question")),
            ({"prompt": "?", "x": 0, "solution": "2"}, {},
             ("'answer'", "columns: prompt, x, solution", "answer_column: solution")),
            ({"prompt": "?", "ground_truth": 1, "Answer": "2"}, {}, ("'answer'", "answer_column: Answer")),
            ({"prompt": "?", "answr": "2", "x": 0}, {}, ("'answer'", "answer_column: answr")),
            ({"prompt": "?", "x": 2}, {}, ("'answer'", "columns: prompt, x", "`answer_column` to one of them")),
            ({}, {}, ("'prompt'", "columns: none", "`prompt_column` to one of them")),
            ({"prompt": "?", "answer": "2", "Id": "b"}, {"id_column": "id"}, ("'id'", "id_column: Id")),
            ({"prompt": "?", "answer": "2"}, {"domain_column": "domain"}, ("'domain'", "`domain_column`")),
            # a missing value
            ({"prompt": None, "answer": "2"}, {}, ("prompt is null", "delete the row")),
            ({"prompt": " \n", "answer": "2"}, {}, ("prompt is empty", "delete the row")),
            ({"prompt": [], "answer": "2"}, {}, ("prompt is an empty list", "delete the row")),
            ({"prompt": "?", "answer": ""}, {}, ("answer is empty", "delete the row")),
            ({"prompt": "?", "answer": None}, {}, ("answer is null", "delete the row")),
            ({"prompt": "?", "answer": float("nan")}, {}, ("answer is nan", "delete the row")),
            ({"prompt": "?", "answer": "2", "domain": 1.0, "id": ""}, {"id_column": "id"}, ("id is empty",)),
            # a value of the wrong type
            ({"prompt": {"text": "?"}, "answer": "2"}, {}, ("prompt is {'text': '?'}, an object", "list of messages")),
            ({"prompt": False, "answer": "2"}, {}, ("prompt is False, of type bool", "list of messages")),
            ({"prompt": "?", "answer": ["2", "two"]}, {}, ("answer is ['2', 'two'], a list", "write one answer")),
            ({"prompt": "?", "answer": {"value": 2}}, {}, ("answer is {'value': 2}, an object",
             "`answer_column: answer.value`")),
            ({"id": [1], "prompt": "?", "answer": "2"}, {"id_column": "id"}, ("id is [1], a list", "a number")),
            ({"prompt": "?", "answer": "2", "domain": {}}, {"domain_column": "domain"}, ("domain is {}", "a verifier")),
            ({"prompt": "?", "answer": {"stdin": {}}}, {"domain": "code"}, ("the domain code", *JSON_TEXT,
             '"answer": "{\\"stdin\\": ...}"')),
            ({"prompt": "?", "answer": {"options": []}, "domain": "science"}, {"domain_column": "domain"},
             ("the domain science", *JSON_TEXT, '"answer": "{\\"options\\": ...}"')),
            ({"prompt": "?", "answer": ["a"], "domain": "ifeval"}, {"domain_column": "domain"},
             ("the domain ifeval", *JSON_TEXT, '"answer": "[...]"')),
            ({"prompt": "?", "answer": ["a"], "domain": ["ifeval"]}, {"domain_column": "domain"},
             ("answer is ['a'], a list",)),
            # messages
            ({"prompt": ["hi"], "answer": "2"}, {}, ("message 1 of prompt is 'hi'", MESSAGES_FORM)),
            ({"prompt": [{"role": "user"}], "answer": "2"}, {}, ("message 1 of prompt", MESSAGES_FORM)),
            ({"prompt": [{"role": "user", "content": ["a"]}], "answer": "2"}, {}, ("message 1 of prompt", "strings")),
            ({"prompt": [{"role": "user", "content": " "}], "answer": "2"}, {},
             ("content of message 1 of prompt is empty", "delete the row")),
            ({"prompt": [{"role": "user", "content": "a", "tool_calls": [1]}], "answer": "2"}, {},
             ("message 1 of prompt", "the key 'tool_calls'", "keep only role and content")),
            ({"prompt": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], "answer": "2"}, {},
             ("last message of prompt", "'tool'", "user's message")),
            ({"prompt": [{"role": "assistant", "content": "b"}], "answer": "2"}, {},
             ("last message of prompt", "'assistant'", "user's message")),
            # a row that is no object, and one that contradicts the first
            (["?", "2"], {}, ("is a list, not an object", '{"COLUMN": VALUE, ...}')),
            ("?", {}, ("is text, not an object", '{"COLUMN": VALUE, ...}')),
            (None, {}, ("is null, not an object", '{"COLUMN": VALUE, ...}')),
            ({"prompt": "1 + 1?", "answer": "3"}, {}, OTHER_ANSWER),
            ({"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": 3}, {}, OTHER_ANSWER),
            ({**DEFAULT, "domain": "code"}, {"domain_column": "domain"},
             ("p.jsonl line 1", "'math' there, 'code' here", "correct one row or delete both")),
            ({"id": "a", "prompt": "?", "answer": "2"}, {"id_column": "id"},
             ("the same id 'a' as ", "p.jsonl line 1", "remove `id_column`")),
        ],
    )  # fmt: skip
    def test_of_a_row(self, tmp_path: Path, row: Any, settings: dict[str, Any], named: tuple[str, ...]) -> None:
        path = write_lines(tmp_path / "p.jsonl", [{**DEFAULT, "id": "a", "domain": "math"}, row])
        check_names(refusal(path, **settings), f"{path} line 2", *named)

    @each_row(
        ("answer", "named"),
        [
            ("so 2", ("no '####' ('so 2')", "remove `answer_after`")),
            ("s" * 99, (f"no '####' ('{'s' * 56}...)", "remove `answer_after`")),
            ("1 #### 2 #### ", ("nothing after the last '####'",)),
        ],
    )
    def test_of_an_answer_without_its_marker(self, tmp_path: Path, answer: str, named: tuple[str, ...]) -> None:
        path = write_lines(tmp_path / "p.jsonl", [{"prompt": "?", "answer": answer}])
        check_names(refusal(path, answer_after="####"), f"{path} line 1: answer", *named)

    @each_row(
        ("raw", "named"),
        [
            (b'{"prompt": "?"', ("not JSON", "at column 15", '{"COLUMN": VALUE, ...}')),
            (b"{'prompt': 1}", ("not JSON", "at column 2", '{"COLUMN": VALUE, ...}')),
            (b"[" * 100_000, ("not JSON", "nested too deeply")),
            (b'{"prompt": "\xe9t\xe9"}', ("byte 0xe9 at 13", "UTF-8")),
            (b'{"prompt": "\\ud800", "answer": "1"}', ("prompt has an unpaired surrogate (\\ud800)",)),
            (b'{"prompt": "?", "answer": 1e999}', ("answer is inf", "delete the row")),
        ],
    )
    def test_of_a_line(self, tmp_path: Path, raw: bytes, named: tuple[str, ...]) -> None:
        path = tmp_path / "p.jsonl"
        path.write_bytes(b'{"prompt": "1 + 1?", "answer": "2"}\n' + raw + b"\n")
        check_names(refusal(str(path)), f"{path} line 2", *named)

    @each_row(
        ("raw", "named"),
        [
            (b"", ("is empty", "`path`")),
            (b"\xef\xbb\xbf \n", ("is empty", "`path`")),
            (b"[\n]", ("is empty", "`path`")),
            (b"3", ("line 1 ", "no list", JSON_FORM)),
            (b"[\n3]", ("row 1 is a number, not an object", '{"COLUMN": VALUE, ...}')),
            (b'[{"prompt": 1, "answer": 2}\n,\n]', ("line 3 ", "Expecting value", JSON_FORM)),
            (b'[{"prompt": 1, "answer": 2}\n{', ("line 2 ", "Expecting ',' delimiter", JSON_FORM)),
            (b'[{"prompt": 1, "answer": 2}\n]\n\n[', ("line 4 ", "Extra data", JSON_FORM)),
            (b'[{"prompt": 1, "answer": 2}', ("line 1 ", "Expecting ',' delimiter", JSON_FORM)),
            (b'[{"prompt": 1, "answer": 2}, {"prompt": 3}]', ("row 2 ", "'answer'", "columns: prompt")),
            (b'{\n "data": []\n}', ("one object with the keys data", JSON_FORM)),
            (b'{\n "train": [{"prompt": 1}], "test": [{"prompt": 2}]\n}', ("several lists", "train, test")),
            ("[]".encode("utf-16"), ("byte 0xff at 1", "UTF-8")),
        ],
    )
    def test_of_a_json_file(self, tmp_path: Path, raw: bytes, named: tuple[str, ...]) -> None:
        path = tmp_path / "p.json"
        path.write_bytes(raw)
        check_names(refusal(str(path)), str(path), *named)

    def test_of_parquet(self, tmp_path: Path) -> None:
        path = tmp_path / "p.parquet"
        parquet.write_table(pa.table({"question": ["a", "b"], "solution": ["1", None]}), path)
        check_names(refusal(str(path)), f"{path} row 1", "'prompt'", "columns: question, solution")
        said = refusal(str(path), prompt_column="question", answer_column="solution")
        check_names(said, f"{path} row 2: solution is null", "delete the row")
        path.write_bytes(b"PAR1 no")
        check_names(refusal(str(path)), f"{path} is not a readable Parquet file")
        parquet.write_table(pa.table({"x": pa.array([], pa.string())}), path)
        check_names(refusal(str(path)), f"{path} is empty", "`path`")

    def test_a_context_is_a_text_or_a_list_of_texts_and_may_be_missing(self, tmp_path: Path) -> None:
        contexts = ["One.", ["One.", "Two."], None, "", [], {"texts": ["Deep."]}]
        rows = [{"prompt": f"{i}?", "answer": i, "about": context} for i, context in enumerate(contexts[:5])]
        path = write_lines(tmp_path / "q.jsonl", rows)
        texts = ["One.\n\n0?", "One.\n\nTwo.\n\n1?", "2?", "3?", "4?"]
        assert [q.text for q in read(path, context_column="about")] == texts
        path = write_lines(tmp_path / "deep.jsonl", [DEFAULT | {"about": contexts[5]}])
        assert [q.text for q in read(path, context_column="about.texts")] == ["Deep.\n\n1 + 1?"]
        check_names(refusal(path, context_column="about"), f"{path} line 1: about", "an object", "a list of texts")
        check_names(refusal(path, context_column="abut"), f"{path} line 1", "'abut'", "context_column: about")

    def test_the_same_question_with_the_same_answer_is_kept_once(
        self, tmp_path: Path, rng: np.random.Generator
    ) -> None:
        rows = some_rows(rng, 20)
        order = [*range(20), *rng.integers(0, 20, 30).tolist()]
        path = write_lines(tmp_path / "q.jsonl", [rows[i] for i in order])
        assert pairs(read(path)) == [(row["prompt"], row["answer"]) for row in rows]
