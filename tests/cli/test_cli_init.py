"""`brorl init`: what it guesses of a data file, and that the recipe it writes is one that `brorl check` takes."""

import csv
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from brorl.config.reading import make_config, parse_yaml
from brorl.config.settings import TrainConfig
from brorl.prompts.file_questions import read_source
from brorl.prompts.settings import FileSource
from choice_rows import SCHEMAS
from data_files import write_rows
from each_row import each_row
from run_support import command, refused, save_tiny_model

EVERY_CHARACTER = "".join(map(chr, range(32, 127))) + "\n"


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
refusal = partial(refused, "init")


def sums(rng: np.random.Generator, number: int, question: str, answer: str, form: str = "{}") -> list[dict[str, Any]]:
    pairs = {(int(a), int(b)) for a, b in rng.integers(0, 1000, (number, 2))}
    return [{question: f"What is {a} + {b}?", answer: form.format(a + b), "note": "easy"} for a, b in pairs]


def config_in(recipe: str | Path = "mine.yaml") -> TrainConfig:
    return make_config(parse_yaml(Path(recipe).read_text(), str(recipe)), {}, str(recipe))


def source_of(recipe: str) -> FileSource:
    (source,) = config_in(recipe).data.sources
    assert isinstance(source, FileSource)
    return source


@pytest.mark.parametrize(
    ("file", "question", "answer", "form", "after"),
    [
        ("a.jsonl", "prompt", "answer", "{}", None),
        ("a.json", "question", "ground_truth", "${}$", None),
        ("a.csv", "question", "answer", "{}", None),
        ("a.parquet", "Problem", "Solution", "First add.\n#### {}", "####"),
        ("a.jsonl", "instruction", "target", "\\boxed{{{}}}", None),
    ],
)
def test_columns_and_domain_are_guessed(
    rng: np.random.Generator, file: str, question: str, answer: str, form: str, after: str | None
) -> None:
    rows = sums(rng, 300, question, answer, form)
    outcome = command("init", write_rows(file, rows))
    assert outcome.code == 0, outcome
    source = source_of("mine.yaml")
    assert (source.prompt_column, source.answer_column, source.answer_after) == (question, answer, after)
    assert (source.domain, Path(source.path).name) == ("math", file)
    columns = (f"prompt_column: {question}", f"answer_column: {answer}")
    for said in (f"{len(rows)} questions", *columns, "domain: math", "wrote mine.yaml"):
        assert said in outcome.said


def test_conversations_and_answers_inside_a_column(rng: np.random.Generator) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a} times 2?"}],
            "reward_model": {"style": "rule", "ground_truth": 2 * a},
        }
        for a in rng.permutation(1000)[:50].tolist()
    ]
    assert command("init", write_rows("verl.parquet", rows)).code == 0
    source = source_of("mine.yaml")
    assert (source.prompt_column, source.answer_column) == ("prompt", "reward_model.ground_truth")


def test_the_folder_of_a_model_is_checked_first(tmp_path: Path, rng: np.random.Generator) -> None:
    data = write_rows("a.jsonl", sums(rng, 40, "question", "answer"))
    checkpoint = Path("runs/first/checkpoints/step-2")
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    for model, said in (
        ("runs/typo", "there is no folder runs/typo, and runs is a folder here; fix the name"),
        ("runs/fist", "did you mean runs/first?"),
        ("runs/first", f"has no config.json, so it is not a model; give `model={checkpoint}`"),
        (str(tmp_path / "none"), "does not exist"),
    ):
        assert said in refusal(data, "--model", model)
    for number, model in enumerate(("Qwen/Qwen2.5-0.5B-Instruct", "runs/typo@main", str(checkpoint), "quickstart")):
        assert command("init", data, "--model", model, f"--output={number}.yaml").code == 0


SYSTEM = {"role": "system", "content": "Reply with the number only."}


@each_row(
    ("rows", "said"),
    [
        ([{"q": f"{n} mal 0,7?", "answer": f"{7 * n / 10}".replace(".", ",")} for n in range(1, 30)],
         "are read as decimal commas: '2,1' is 2.1"),
        ([{"q": f"{n}?", "answer": f"{n},{n + 2}"} for n in range(1, 30)], "can be decimal commas or separate two"),
        ([{"q": f"{n}?", "answer": f"{n},{n + 2}" if n % 2 else "1, 2, 3"} for n in range(1, 30)],
         "are read as list separators: '1,3' is 1, 3"),
        ([{"messages": [SYSTEM, {"role": "user", "content": f"{n}+1?"}], "answer": n + 1} for n in range(30)],
         "the questions ask for the answer alone, so prompt.template adds no other form"),
        ([{"messages": [SYSTEM, {"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": f"{n + 1}"}]}
          for n in range(30)], "answer_column: messages"),
        ([{"q": f"{n}+1?", "answer": {"aliases": ["x"], "value": str(n)}} for n in range(30)],
         "answer_column: answer.value"),
    ],
)  # fmt: skip
def test_a_guess_about_the_answers_is_said(rows: list[dict[str, Any]], said: str) -> None:
    Path("mine.yaml").unlink(missing_ok=True)
    question = [] if "messages" in rows[0] else ["--prompt-column=q"]
    outcome = command("init", write_rows("a.jsonl", rows), *question)
    assert outcome.code == 0, outcome
    assert said in outcome.said
    if "alone" in said:
        assert config_in().prompt.template == "{prompt}"


def test_short_texts_are_for_science() -> None:
    cities = [{"question": f"{n}?", "answer": ["Paris", "Rome", "New York"][n % 3]} for n in range(30)]
    assert "`domain: science` to compare short texts" in refusal(write_rows("a.jsonl", cities))
    long = [{**row, "answer": "It is the city that everyone has heard of, I think."} for row in cities]
    assert "`domain: science`" not in refusal(write_rows("b.jsonl", long))
    aliases = [{**row, "answer": {"value": row["answer"], "aliases": ["The City"]}} for row in cities]
    file = write_rows("c.jsonl", aliases)
    assert "column 'answer.value', such as 'Paris'" in refusal(file)
    assert command("init", file, "--domain=science").code == 0
    assert source_of("mine.yaml").answer_column == "answer"
    reference = read_source(source_of("mine.yaml")).questions[0].reference
    assert json.loads(reference) == {"value": "Paris", "tolerance": 0.0, "aliases": ["The City"]}


def test_every_setting_has_a_comment(rng: np.random.Generator) -> None:
    assert command("init", write_rows("a.jsonl", sums(rng, 40, "prompt", "answer"))).code == 0
    lines = Path("mine.yaml").read_text().splitlines()
    settings = [
        (before, line) for before, line in zip(["", *lines], lines, strict=False) if ": " in line.split(" #")[0]
    ]
    settings = [(before, line) for before, line in settings if not line.lstrip().startswith("#")]
    assert len(settings) > 15
    for before, line in settings:
        assert " # " in line or before.lstrip().startswith("# "), line
    assert max(map(len, lines)) <= 120
    config = config_in()
    assert config.rollouts_per_prompt == 16
    assert "512" in next(line for line in lines if line.startswith("rollouts_per_prompt"))


def test_what_it_writes_is_checked_and_trained(rng: np.random.Generator, tmp_path: Path) -> None:
    """A random model solves nothing, so training makes no step, and says so."""
    model = save_tiny_model(tmp_path / "tiny", characters=EVERY_CHARACTER, max_positions=256)
    data = write_rows("sums.jsonl", sums(rng, 12, "question", "answer"))
    assert command("init", data, "--model", model, "--output", "recipes/first.yaml").code == 0
    short = ("--sampling.max_new_tokens=4", "--engine.threads=1", "--verification.workers=1")
    outcome = command("check", "recipes/first.yaml", *short)
    assert outcome.code == 0, outcome
    assert "seconds per step: about" in outcome.said
    few = ("--evaluation.num_prompts=1", "--dynamic_sampling.max_tries=1", "--output_dir=run")
    outcome = command("train", "recipes/first.yaml", *short, *few)
    assert outcome.code == 1
    assert "no group was mixed (correct and incorrect rollouts)" in outcome.said


@pytest.mark.slow
def test_puzzles_are_for_the_shipped_model() -> None:
    rows = [{"prompt": f"1 2 {i} -> {3 + i}:", "answer": f"1 2 {i} -> {3 + i}"} for i in range(2, 40)]
    assert command("init", write_rows("puzzles.jsonl", rows)).code == 0
    config = config_in()
    assert config.model == "quickstart"
    assert config.prompt.template == "{prompt}"
    assert source_of("mine.yaml").domain == "countdown"
    assert command("check", "mine.yaml", "--no-timing").code == 0


def test_a_domain_of_ones_own() -> None:
    write_rows("cities.jsonl", [{"q": f"Capital of {i}?", "a": f"City {chr(97 + i)}"} for i in range(20)])
    said = refusal("cities.jsonl")
    assert "no column is clearly the question (columns: q, a); name it with `prompt_column`" in said
    said = refusal("cities.jsonl", "--prompt-column=q")
    assert "no column is clearly the reference answer (columns: q, a); name it with `answer_column`" in said
    said = refusal("cities.jsonl", "--prompt-column=q", "--answer-column=a")
    assert "such as 'City a', do not look like numbers or formulas; give `domain: math` if they are" in said
    outcome = command("init", "cities.jsonl", "--prompt-column=q", "--answer-column=a", "--domain=cities")
    assert outcome.code == 0
    assert "write the verifier first" in outcome.said
    config = config_in()
    assert list(config.verification.functions) == ["cities"]
    Path("my_checks.py").write_text("def check(response, reference):\n    return response == reference\n")
    outcome = command("check", "mine.yaml", "--no-timing", "--model=quickstart")
    assert "cannot encode the prompt" in outcome.err  # the function was found; the shipped model knows no letters


def test_what_cannot_work_is_refused(rng: np.random.Generator) -> None:
    data = write_rows("a.jsonl", sums(rng, 30, "prompt", "answer"))
    assert "has no column 'x' (columns: prompt, answer, note); name one of them with `answer_column`" in refusal(
        data, "--answer-column=x"
    )
    said = refusal("none.jsonl")
    assert "there is no file or folder none.jsonl" in said
    assert "fix `path`" in said
    Path("mine.yaml").write_text("precious")
    assert "mine.yaml already exists; choose a different name with `output`" in refusal(data)
    Path("empty.jsonl").write_text("")
    assert "empty.jsonl is empty" in refusal("empty.jsonl", "--output=b.yaml")
    long = "Let us think. " * 30
    write_rows("solved.jsonl", [{"prompt": f"{i}?", "solution": f"{long}\\boxed{{{i}}}"} for i in range(5)])
    assert "contains whole solutions with the answer in \\boxed{}" in refusal("solved.jsonl", "--output=b.yaml")
    write_rows("twice.jsonl", [{"prompt": "1?", "answer": "1"}, {"prompt": "1?", "answer": "2"}])
    assert "twice.jsonl line 1 with a different answer" in refusal("twice.jsonl", "--output=b.yaml")
    assert "DATA_FILE" in refusal("--output=b.yaml")


def test_rows_that_repeat_a_question_are_counted(rng: np.random.Generator) -> None:
    rows = sums(rng, 40, "question", "answer")
    assert f"a.jsonl: {len(rows)} questions prompt_column:" in command("init", write_rows("a.jsonl", rows)).said
    path = write_rows("b.jsonl", [*rows, *rows[:7]])
    said = command("init", path, "--output=b.yaml").said
    assert f"b.jsonl: {len(rows)} questions in {len(rows) + 7} rows: 7 rows repeat a question" in said


def test_a_folder_that_datasets_saved_is_read(rng: np.random.Generator) -> None:
    rows = sums(rng, 30, "question", "answer")
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk("one")
    datasets.DatasetDict(train=table, test=table.select(range(2))).save_to_disk("two")
    for name in ("one", "two"):
        outcome = command("init", name, f"--output={name}.yaml")
        assert outcome.code == 0, outcome
        assert f"{name}: {len(rows)} questions" in outcome.said
        assert source_of(f"{name}.yaml").prompt_column == "question"
        assert command("data", f"{name}.yaml", "--show=0").code == 0
    datasets.DatasetDict(test=table).save_to_disk("three")
    assert "three has no split 'train' (splits: test); set `split`, or `path: " in refusal("three")


@pytest.mark.parametrize(
    ("words", "named"),
    [(("Yes", "no"), "yes or no"), ((True, False), "true or false"), (("True", "False"), "true or false")],
)
def test_answers_of_two_words_have_a_verifier_and_are_asked_for(words: tuple[Any, Any], named: str) -> None:
    write_rows("q.jsonl", [{"question": f"Is {i} even?", "answer": words[i % 2]} for i in range(20)])
    outcome = command("init", "q.jsonl")
    assert outcome.code == 0, outcome
    assert f"domain: math, which compares {named.replace('or', 'and')} as words" in outcome.said
    config = config_in()
    assert f"put your final answer ({named}) within \\boxed{{}}" in config.prompt.template


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("Put the answer into \\boxed{}.", "in \\boxed{}"),
        ("Give the final number after ####.", "after ####"),
        ("Write the result between <answer> and </answer>.", "in <answer> tags"),
    ],
)
def test_no_second_form_of_the_answer_is_added(asked: str, said: str) -> None:
    write_rows("q.jsonl", [{"question": f"{i} + 1? {asked}", "answer": str(i + 1)} for i in range(20)])
    outcome = command("init", "q.jsonl")
    assert f"the questions ask for the answer {said}, so prompt.template adds no other form" in outcome.said
    config = config_in()
    assert config.prompt.template == "{prompt}"


@pytest.mark.slow
def test_the_options_of_multiple_choice_are_found_and_checked(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", characters=EVERY_CHARACTER, max_positions=600)
    for name, answer in (
        ("mmlu", "answer first_option: 0 first answer: '1', which is 'carbon dioxide'"),
        ("medmcqa_from_1", "cop first_option: 1 first answer: '2', which is 'carbon dioxide'"),
        ("ceval", "answer first answer: 'B', which is 'carbon dioxide'"),
    ):
        outcome = command("init", write_rows(f"{name}.jsonl", SCHEMAS[name].rows), f"--output={name}.yaml")
        assert outcome.code == 0, outcome
        assert f"answer_column: {answer}" in outcome.said
        assert "domain: science, multiple choice" in outcome.said
        checked = command("check", f"{name}.yaml", "--no-timing", f"--model={model}", "--verification.workers=1")
        assert checked.code == 0, checked
        right = re.search(r"\| ([A-D])\. carbon dioxide\n", checked.out)
        assert right is not None
        assert f"reference answer, as the response `\\boxed{{{right[1]}}}`: correct" in checked.out
        assert re.search(r"a different answer, as the response `\\boxed\{[A-D]\}`: incorrect", checked.out)
        assert "reference answers of 5 questions: 5 accepted" in checked.out
        assert "can only be options" not in checked.out
        assert "name an option" not in checked.out


def test_options_without_an_answer_are_refused_with_the_options_of_the_command() -> None:
    write_rows("q.jsonl", [{"question": f"{i}?", "choices": ["red", "blue"], "kind": "x"} for i in range(3)])
    assert "no column names the right one (columns: question, choices, kind); give `answer_column`" in refusal(
        "q.jsonl"
    )
    write_rows(
        "p.jsonl", [{"question": f"{i}?", "choices": ["red", "blue", "pink"], "answer": 1 + i % 2} for i in range(9)]
    )
    said = refusal("p.jsonl")
    assert "give `first_option`, the index of the first option: 0 or 1" in said
    assert command("init", "p.jsonl", "--first-option=1").code == 0
    assert source_of("mine.yaml").first_option == 1
    options = ("--options-column=x", "--options-column=y", "--answer-column=right", "--output=b.yaml")
    write_rows("r.jsonl", [{"question": f"{i}?", "x": "red", "y": "blue", "right": "red"} for i in range(3)])
    assert command("init", "r.jsonl", *options).code == 0
    assert source_of("b.yaml").options_column == ("x", "y")


@pytest.mark.parametrize(
    ("passage", "question"),
    [("article", "question"), ("Context", "query"), ("Body", "Question"), ("input", "instruction")],
)
def test_a_passage_is_put_before_the_question(passage: str, question: str, rng: np.random.Generator) -> None:
    """Also of multiple choice; a column of another name is listed, because it could hold anything."""
    rows = [
        {passage: f"Ann has {row['answer']} eggs.", "hint": "Add."} | row for row in sums(rng, 30, question, "answer")
    ]
    rows[0][passage] = None
    for choices in (False, True):
        options = {"options": ["a", "b"], "answer": "B"} if choices else {}
        write_rows("rows.jsonl", [row | options for row in rows])
        outcome = command("init", "rows.jsonl", f"--output={choices}.yaml")
        assert f"context_column: {passage}" in outcome.said
        assert "not in the prompt: 2 columns of text, hint and note" in outcome.said
        source = source_of(f"{choices}.yaml")
        asked = [
            one.text.removesuffix("\n\nA. a\nB. b").removesuffix("\n\nA. b\nB. a")
            for one in read_source(source).questions
        ]
        assert asked[0] == rows[0][question]
        assert asked[1:] == [f"{row[passage]}\n\n{row[question]}" for row in rows[1:]]


def test_long_columns_that_are_not_in_the_prompt_are_a_warning(rng: np.random.Generator) -> None:
    """Also lists and objects; a solution is no part of a question, however long."""
    long = {"before": ["The firm"] * 9, "code": "x = 1\n" * 9, "cells": {"a": "1" * 60}, "solution": "Add. " * 90}
    rows = [row | long | {"kind": "x"} for row in sums(rng, 30, "question", "answer")]
    said = command("init", write_rows("rows.jsonl", rows)).said
    assert (
        "warning: not in the prompt, although longer than the question: before, code and cells; if a question is about "
        "it, name it in the recipe with context_column" in said
    )
    assert "not in the prompt: 3 columns of text, note, solution and kind" in said
    short = [row | {"kind": "x"} for row in rows]
    for row in short:
        del row["before"], row["code"], row["cells"]
    assert "warning" not in command("init", write_rows("short.jsonl", short), "--output=b.yaml").said


def test_numbers_of_classes_are_no_answers(rng: np.random.Generator) -> None:
    rows = [
        {"sentence": f"Film {i} is good.", "label": int(label)} for i, label in enumerate(rng.permutation([0, 1] * 20))
    ]
    said = refusal(write_rows("films.jsonl", rows))
    assert "column 'label' contains only 0, 1, which look like class indices; write the class names" in said
    assert command("init", "films.jsonl", "--domain=math").code == 0
    numbers = [{"sentence": f"Number {i}", "label": i} for i in range(40)]
    assert command("init", write_rows("numbers.jsonl", numbers), "--output=b.yaml").code == 0


@pytest.mark.parametrize(
    ("column", "answer", "said"),
    [("answer", "<think>I add {0} and 1.</think> The answer is {0}", "do not look like numbers or formulas"),
     ("ground_truth", '["{0}"]', "do not look like numbers or formulas"),
     ("answer", "2024-01-{0:02}", "do not look like numbers or formulas"),
     ("answer", "{0}/1/2024", "do not look like numbers or formulas"),
     ("answer", "We add, so it is $\\boxed{{{0}}}$.", "contains whole solutions with the answer in \\boxed{}")],
)  # fmt: skip
def test_texts_around_an_answer_are_no_references(column: str, answer: str, said: str) -> None:
    """Though `problem` and `answer` are the columns of a layout."""
    rows = [{"problem": f"What is {i} + 1?", column: answer.format(i + 1)} for i in range(30)]
    assert said in refusal(write_rows("rows.jsonl", rows))


def test_countdown_puzzles_in_columns_have_their_verifier(rng: np.random.Generator) -> None:
    """The target alone would be a right answer of mathematics."""
    rows = [{"nums": [int(n) for n in rng.integers(1, 60, 3)]} for _ in range(30)]
    rows = [row | {"target": abs(sum(row["nums"]) - 2 * row["nums"][0])} for row in rows]
    outcome = command("init", write_rows("puzzles.jsonl", rows))
    assert "layout: countdown domain: countdown" in outcome.said
    assert config_in().model != "quickstart"  # which reads no sentences
    asked = [rows[i] | {"prompt": f"Number {i}: make it."} for i in range(30)]
    assert command("init", write_rows("asked.jsonl", asked), "--output=b.yaml").code == 0
    with Path("table.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["nums", "target"])
        table.writeheader()
        table.writerows(rows)
    assert command("init", "table.csv", "--output=c.yaml").code == 0
    for name, texts in (("mine", None), ("b", [row["prompt"] for row in asked]), ("c", None)):
        questions = read_source(source_of(f"{name}.yaml")).questions
        assert [one.domain for one in questions] == ["countdown"] * 30
        assert [one.reference for one in questions] == [
            f"{' '.join(map(str, sorted(row['nums'])))} -> {row['target']}" for row in rows
        ]
        if texts:
            assert [one.text for one in questions] == texts
        else:
            assert all(
                all(str(n) in one.text for n in (*row["nums"], row["target"]))
                for row, one in zip(rows, questions, strict=True)
            )


def test_one_question_is_trained_on_and_not_evaluated() -> None:
    assert command("init", write_rows("one.jsonl", [{"prompt": "1 + 1?", "answer": 2}])).code == 0
    config = config_in()
    assert (config.evaluation.num_prompts, config.data.held_out_fraction) == (0, 0)


HUMAN_EVAL = {
    "prompt": 'def one():\n    """Return 1."""\n', "canonical_solution": "    return 1\n", "entry_point": "one",
    "test": "def check(candidate):\n    assert candidate() == 1\n", "task_id": "x",
}  # fmt: skip
CASES = json.dumps({"inputs": ["1\n"], "outputs": ["1\n"]})
APPS = {"question": "Read a number and print the same number again.", "input_output": CASES, "starter_code": ""}
MBPP = {
    "task_id": 1, "text": "Write a function to add two numbers.", "code": "def add(a, b):\r\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
}  # fmt: skip
IFEVAL = {"key": 1, "prompt": "Use no comma.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
SCIQ = {"question": "What?", "correct_answer": "a", "distractor1": "b", "distractor2": "c", "distractor3": "d"}
SOLVED = {"problem": "2+2?", "solution": "Let us think. " * 30 + "\\boxed{4}", "level": "Level 1"}


@pytest.mark.parametrize(
    ("layout", "domain", "row"),
    [
        ("humaneval", "code", HUMAN_EVAL),
        ("apps", "code", APPS),
        ("taco", "code", {**APPS, "time_limit": "2.0 seconds"}),  # the more columns, the more likely
        ("mbpp_original", "code", MBPP),
        ("mbpp_sanitized", "code", {**{n: v for n, v in MBPP.items() if n != "text"}, "prompt": MBPP["text"]}),
        ("ifeval", "ifeval", IFEVAL),
        ("sciq", "science", SCIQ),
        ("math", "math", SOLVED),  # its column of answers contains whole solutions
    ],
)
def test_the_layout_of_a_public_data_set_is_found(layout: str, domain: str, row: dict[str, Any]) -> None:
    outcome = command("init", write_rows("rows.jsonl", [row]))
    assert outcome.code == 0, outcome
    assert f"layout: {layout} domain: {domain}" in outcome.said
    assert source_of("mine.yaml").layout == layout
    config = config_in()
    assert ("step by step" in config.prompt.template) == (domain in ("science", "math"))


def test_rows_that_only_look_like_a_layout_are_read_by_their_columns() -> None:
    write_rows("rows.jsonl", [{"messages": "1 + 1?", "ground_truth": "2"}])  # the columns of rlvr_ifeval
    assert command("init", "rows.jsonl").code == 0
    assert (source_of("mine.yaml").layout, source_of("mine.yaml").prompt_column) == (None, "messages")


@pytest.mark.parametrize(
    ("positions", "response", "prompt"),
    [(600, 256, 344), *(pytest.param(*v, marks=pytest.mark.slow) for v in ((64, 32, 32), (1024, 256, 768)))],
)
def test_lengths_fit_into_the_model(tmp_path: Path, positions: int, response: int, prompt: int) -> None:
    model = save_tiny_model(tmp_path / "tiny", characters=EVERY_CHARACTER, max_positions=positions)
    write_rows("a.jsonl", [{"prompt": "1?" * length, "answer": "1"} for length in range(1, positions, 7)])
    assert command("init", "a.jsonl", "--model", model).code == 0
    config = config_in()
    assert (config.sampling.max_new_tokens, config.data.max_prompt_tokens) == (response, prompt)
    template = ("--prompt.template={prompt}", "--evaluation.num_prompts=0", "--no-timing")
    assert command("check", "mine.yaml", *template).code == 0


TOOLS = """
def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.

    Args:
        a: The first.
        b: The second.
    \"\"\"
    return a + b

def bare(a: int) -> int:
    return a

def untyped(a):
    \"\"\"Return it.

    Args:
        a: A number.
    \"\"\"

def _private(a: int) -> int: ...
"""


def test_the_functions_of_a_file_become_tools(rng: np.random.Generator, tmp_path: Path) -> None:
    data = write_rows("a.jsonl", sums(rng, 300, "question", "answer"))
    Path("tools.py").write_text(TOOLS)
    outcome = command("init", data, "--tools=tools.py")
    assert outcome.code == 0, outcome
    lines = outcome.out.splitlines()
    assert lines[0] == "tools: add"
    assert lines[1].startswith("  skipped: bare, which cannot be a tool: ")
    assert lines[1].endswith("no docstring")
    assert lines[2].startswith("  skipped: untyped, which cannot be a tool: ")
    assert "type hint" in lines[2]
    assert "_private" not in outcome.out
    assert config_in().tools.functions == {"add": f"{Path('tools.py').absolute()}:add"}
    assert "tools.max_tokens" not in outcome.out
    (tmp_path / "model").mkdir()
    for positions in (1024, 128):
        (tmp_path / "model/config.json").write_text(f'{{"max_position_embeddings": {positions}}}')
        small = f"small-{positions}.yaml"
        assert command("init", data, "--tools=tools.py", f"--model={tmp_path}/model", f"--output={small}").code == 0
        config = config_in(small)
        response = config.tools.total_tokens(config.sampling.max_new_tokens)
        assert config.data.max_prompt_tokens + response == positions
        assert response >= 2 * config.sampling.max_new_tokens  # a call, and a turn after it
    assert config_in().data.max_prompt_tokens == 0


@each_row(
    ("code", "said"),
    [
        (None, "No such file"),
        ("x = (", "never closed"),
        ("import a_package_of_nobody\ndef f(): ...", "No module named 'a_package_of_nobody'"),
        ("def f(x): ...", "no function can be a tool; f: "),
        ("x = 1", "no function can be a tool; a tool needs type hints"),
    ],
)
def test_a_file_without_tools_is_refused(code: str | None, said: str, rng: np.random.Generator) -> None:
    data = write_rows("a.jsonl", sums(rng, 30, "question", "answer"))
    Path("tools.py").unlink(missing_ok=True)
    if code is not None:
        Path("tools.py").write_text(code)
    message = refusal(data, "--tools=tools.py")
    assert said in message
    assert "`tools=tools.py`" in message
    assert not Path("mine.yaml").exists()
