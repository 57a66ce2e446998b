"""`brorl data`: counts against plain counting over the rows, the checks of training, and safe text."""

import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from brorl.api.data import DataResult, data
from brorl.errors import UserError
from brorl.model.load import load_tokenizer
from brorl.prompts.question import Question
from brorl.prompts.source_questions import split_held_out
from data_files import write_rows
from each_row import each_row
from run_support import command, save_tiny_model

EVERY_CHARACTER = "".join(map(chr, range(32, 127))) + "\n"


def printed(result: DataResult) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(result, soft_wrap=True)
    return capture.get()


@pytest.fixture
def recipe(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two weighted sources, one with a domain per row and one in a layout that drops rows."""
    monkeypatch.chdir(tmp_path)
    Path("own_rules.py").write_text("def check(response, reference):\n    return response == reference\n")
    own = [
        {"prompt": f"{i}{'x' * int(rng.integers(0, 40))}", "answer": str(i), "kind": ("math", "rules")[i % 3 == 0]}
        for i in range(60)
    ]
    public = [{"problem": f"What is {i}?", "answer": str(i) if i % 4 else ""} for i in range(40)]
    public += public[1:3]
    return {
        "model": str(save_tiny_model(tmp_path / "tiny", characters=EVERY_CHARACTER, max_positions=256)),
        "data": {
            "sources": [
                {"path": write_rows(tmp_path / "own.jsonl", own), "domain_column": "kind", "weight": 3},
                {"path": write_rows(tmp_path / "public.jsonl", public), "layout": "deepscaler", "weight": 1},
            ],
            "held_out_fraction": 0.25,
        },
        "prompt": {"template": "{prompt}", "domain_templates": {"math": "{prompt} Box it."}},
        "verification": {"functions": {"rules": "own_rules.py:check"}},
        "evaluation": {"num_prompts": 2},
    }


@pytest.mark.slow
def test_counts_and_lengths_against_plain_loops(recipe: dict[str, Any]) -> None:
    result = data(recipe, show=7)
    own, public = result.sources
    rows = [json.loads(line) for line in Path("own.jsonl").read_text().splitlines()]
    questions = [Question(f"own:{i}", row["prompt"], row["answer"], row["kind"]) for i, row in enumerate(rows, 1)]
    train, held_out = split_held_out(questions, 0.25, 0)
    assert (own.kind, own.num_rows, own.num_train, own.num_held_out) == ("columns", 60, len(train), len(held_out))
    assert own.domains == Counter(question.domain for question in train)
    tokenizer = load_tokenizer(recipe["model"])
    texts = [q.text + (" Box it." if q.domain == "math" else "") for q in train]
    lengths = sorted(len(tokenizer(text)["input_ids"]) for text in texts)
    below = [length for length in lengths if length <= own.lengths.p95]
    assert own.lengths.median == median(lengths)
    assert own.lengths.longest == lengths[-1]
    assert own.lengths.p95 in lengths
    assert len(below) >= 0.95 * len(lengths)
    assert sum(length < own.lengths.p95 for length in lengths) < 0.95 * len(lengths)
    assert (public.kind, public.num_rows, public.num_repeated) == ("deepscaler", 42, 2)
    assert public.dropped == {"no answer": 10}
    assert public.num_train + public.num_held_out == 30
    assert (own.fraction, public.fraction) == (0.75, 0.25)
    assert result.unit == "tokens"
    assert [prompt.id.partition(":")[0] for prompt in result.prompts] == ["own"] * 4 + ["public"] * 3
    assert all(prompt.text.endswith(" Box it.") == (prompt.domain == "math") for prompt in result.prompts)
    (table,) = (table for table in result.tables if table.title == "domains")
    fractions = {row[0]: float(row[2].rstrip("%")) / 100 for row in table.rows}
    assert fractions["rules"] == pytest.approx(0.75 * own.domains["rules"] / own.num_train, abs=6e-4)
    assert sum(fractions.values()) == pytest.approx(1, abs=2e-3)


def test_without_a_tokenizer_lengths_are_in_characters(recipe: dict[str, Any]) -> None:
    result = data({**recipe, "model": "missing/"}, show=1)
    assert result.unit == "characters"
    assert "not checked: whether the model can read the prompts; lengths are in characters" in result.notes[0]
    (prompt,) = result.prompts
    assert len(prompt.token_ids) == len(prompt.text)
    assert result.sources[0].num_too_long == 0


@pytest.mark.slow
def test_long_prompts_are_counted(recipe: dict[str, Any]) -> None:
    lengths = data(recipe).sources[0].lengths
    recipe["data"]["max_prompt_tokens"] = lengths.longest - 1
    assert data(recipe).sources[0].num_too_long >= 1
    assert f"of more than {lengths.longest - 1} tokens (data.max_prompt_tokens)" in printed(data(recipe))


def test_a_prompt_is_shown_with_its_control_characters_written_out(recipe: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": "\x1b[2J 数学 \u202e" + "y" * 3000, "answer": "7" * 300}, {"prompt": "b", "answer": "2"}]
    recipe["data"] = {"sources": write_rows(tmp_path / "odd.jsonl", rows), "held_out_fraction": 0.0}
    recipe["evaluation"]["num_prompts"] = 0
    text = printed(data({**recipe, "model": "missing/", "prompt": {}, "verification": {}}, show=2))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"\x1b[2J 数学 \u202e" in text
    assert "(300 characters)" in text
    assert f"... {len(rows[0]['prompt']) - 2000:,} more characters" in text


@pytest.mark.slow
def test_the_command_writes_nothing_and_rejects_bad_options(recipe: dict[str, Any], tmp_path: Path) -> None:
    Path("mine.yaml").write_text(json.dumps(recipe))
    before = sorted(tmp_path.rglob("*"))
    outcome = command("data", "mine.yaml", "--show=3", "--data.max_prompt_tokens=100", "--sampling.max_new_tokens=8")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert "no answer" in outcome.out
    assert outcome.out.count(", reference: ") == 3
    assert sorted(tmp_path.rglob("*")) == before
    assert "`show`: expected a number of at least 0, not -1" in command("data", "mine.yaml", "--show=-1").err
    with pytest.raises(UserError, match=r"layout: 'deepscale'.* is not a layout; did you mean deepscaler"):
        data({**recipe, "data": {"sources": {"path": "public.jsonl", "layout": "deepscale"}}})


GOOD = {
    "code": '{"calls": {"function": "f", "arguments": [[1]], "expected": [1]}}',
    "countdown": "1 2 -> 3",
    "ifeval": '{"instructions": [{"kind": "punctuation:no_comma"}]}',
    "math": "7",
    "science": '{"options": ["He", "Ne"], "answer": "A"}',
}
BAD = {
    "code": '{"tests": []}',
    "countdown": "three",
    "ifeval": '{"instructions": [{"kind": "no_comma"}]}',
    "math": r"\frac{1}{",
    "science": '{"options": ["He"], "answer": "A"}',
}


def rows_of(domain: str, number: int, bad: int) -> list[dict[str, Any]]:
    """Return rows of which one has a reference that its verifier cannot read."""
    return [{"prompt": f"Row {i}", "answer": (BAD if i == bad else GOOD)[domain]} for i in range(1, number + 1)]


def bare(model: str, source: str, domain: str, **overrides: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": {"sources": {"path": source, "domain": domain}, "held_out_fraction": 0.3},
        "sampling": {"max_new_tokens": 8},
        "evaluation": {"num_prompts": 100},
        **overrides,
    }


@pytest.mark.parametrize("domain", [pytest.param("code", marks=pytest.mark.linux), *sorted(set(BAD) - {"code"})])
def test_a_malformed_reference_is_the_error_of_training(
    recipe: dict[str, Any], tmp_path: Path, rng: np.random.Generator, domain: str
) -> None:
    bad = int(rng.integers(1, 21))
    path = write_rows(tmp_path / "rows.jsonl", rows_of(domain, 20, bad))
    Path("mine.yaml").write_text(json.dumps(bare(recipe["model"], path, domain)))
    said = command("data", "mine.yaml").err
    assert f"question rows:{bad} ({path} line {bad}) has the reference answer" in said
    assert command("check", "mine.yaml", "--no-timing").err == said


def test_nothing_left_to_evaluate_on_is_the_error_of_training(recipe: dict[str, Any], tmp_path: Path) -> None:
    few = bare(recipe["model"], write_rows(tmp_path / "rows.jsonl", rows_of("math", 3, bad=0)), "math")
    few["data"]["held_out_fraction"] = 0.0
    with pytest.raises(UserError, match="there are no held-out questions for evaluation"):
        data(few)


def test_a_domain_without_a_verifier_is_rejected(recipe: dict[str, Any], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows_of("math", 20, bad=0))
    with pytest.raises(UserError, match="in the domain 'chess', which has no verifier"):
        data(bare(recipe["model"], path, "chess"))


def test_a_prompt_that_training_rejects_is_the_error_of_training(
    recipe: dict[str, Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    """A character out of the vocabulary, or too little room for a response."""
    odd, long = (rng.permutation(40)[:12] < 30), int(rng.integers(240, 250))
    texts = [f"Row {i}{'é' * bool(is_odd)}" for i, is_odd in enumerate(odd)] + ["x" * long, "y" * 30]
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": text, "answer": "7"} for text in texts])
    settings = bare(recipe["model"], path, "math", evaluation={"num_prompts": 0})
    settings["data"]["held_out_fraction"] = 0.0
    found = data(settings, show=0)
    assert (found.problem is not None) == any("é" in text or len(text) + 8 > 256 for text in texts)
    if found.problem is not None:
        assert found.notes[-1] == f"a run would stop with an error: {found.problem}"
        Path("mine.yaml").write_text(json.dumps(settings))
        assert command("check", "mine.yaml", "--no-timing").err == f"brorl: {found.problem}\n"


@pytest.mark.parametrize("long_part", ["training", "held-out"])
def test_prompts_that_are_all_too_long_are_the_error_of_training(
    recipe: dict[str, Any], tmp_path: Path, rng: np.random.Generator, long_part: str
) -> None:
    """The counts follow from the lengths of the texts, since the tokenizer has one token per character."""
    most = int(rng.integers(10, 20))
    number = dict(zip(("training", "held-out"), map(int, rng.integers(1, 6, 2)), strict=True))
    for part, count in number.items():
        texts = [f"{part[0]}{i}" + "x" * (most if part == long_part else 0) for i in range(count)]
        write_rows(tmp_path / f"{part}.jsonl", [{"prompt": text, "answer": "7"} for text in texts])
    settings = bare(recipe["model"], str(tmp_path / "training.jsonl"), "math")
    settings["data"] |= {"held_out_fraction": 0.0, "max_prompt_tokens": most}
    settings["evaluation"] = {"num_prompts": 100, "sources": str(tmp_path / "held-out.jsonl")}
    Path("mine.yaml").write_text(json.dumps(settings))
    found = data("mine.yaml", progress=False)
    trained, evaluated = (0 if part == long_part else count for part, count in number.items())
    assert [one.num_train for one in found.sources] == [trained, 0]
    assert sum(found.sources[0].domains.values()) == trained
    assert any(table.title == "domains" for table in found.tables) == bool(trained)
    assert [one.num_too_long for one in found.sources] == [
        number["training"] - trained,
        number["held-out"] - evaluated,
    ]
    assert any(note.startswith(f"evaluated on: {evaluated} ") for note in found.notes) == bool(evaluated)
    assert found.notes[-1] == f"a run would stop with an error: {found.problem}"
    said = command("data", "mine.yaml")
    assert said.code == 2
    assert f"every {'held-out prompt' if evaluated == 0 else 'prompt of training'} has more than" in said.out
    assert command("check", "mine.yaml", "--no-timing").err == f"brorl: {found.problem}\n"


@pytest.mark.parametrize(
    ("tokens", "limit", "response", "fix"),
    [
        (100, 50, 100, "raise it to 100 or more, the length of the shortest one"),
        (
            200,
            128,
            128,
            "256 positions for a prompt and sampling.max_new_tokens = 128: lower sampling.max_new_tokens to 56",
        ),
        (300, 128, 128, "256 positions for a prompt and its response: choose a model with more positions, or shorten"),
    ],
)
def test_the_fix_of_long_prompts_is_one_that_helps(
    recipe: dict[str, Any], tmp_path: Path, tokens: int, limit: int, response: int, fix: str
) -> None:
    settings = bare(
        recipe["model"], write_rows(tmp_path / "long.jsonl", [{"prompt": "x" * tokens, "answer": "7"}]), "math"
    )
    settings["data"] |= {"held_out_fraction": 0.0, "max_prompt_tokens": limit}
    settings["sampling"] = {"max_new_tokens": response}
    settings["evaluation"] = {"num_prompts": 0}
    problem = data(settings, progress=False).problem
    assert problem is not None
    assert fix in problem


def test_without_a_sandbox_the_other_domains_are_checked(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_level(wish: str) -> None:
        raise UserError(f"no sandbox for {wish}")

    monkeypatch.setattr("brorl.api.data.choose_level", no_level)
    monkeypatch.setattr("brorl.verification.sandbox.pool.choose_level", no_level)
    rows = [{"prompt": f"{d} {i}", "answer": GOOD[d], "kind": d} for d in ("code", "math") for i in range(10)]
    settings = bare(recipe["model"], write_rows(tmp_path / "rows.jsonl", rows), "math")
    settings["data"]["sources"] = {"path": str(tmp_path / "rows.jsonl"), "domain_column": "kind"}
    settings["rewards"] = {"domain_weights": {"code": 2.0}}
    assert "not checked: the reference answers of code: no sandbox for auto" in data(settings).notes
    rows[-1]["answer"] = BAD["math"]
    write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=r"question rows:20 .* has the reference answer"):
        data(settings)


@pytest.mark.slow
def test_a_run_and_a_recipe_in_json_are_recipes(recipe: dict[str, Any]) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text(json.dumps(recipe))
    Path("mine.json").write_text(json.dumps(recipe))
    assert [one.name for one in data("run").sources] == [one.name for one in data("mine.json").sources]


@each_row(
    ("name", "content", "said"),
    [
        ("nope.jsonl", None, "recipe 'nope.jsonl' is neither a file nor a built-in recipe"),
        ("rows.jsonl", '{"ask": "a", "answer": "1"}', "contains questions, not a recipe; write"),
        ("rows.json", '{"prompt": "a"}\n{"prompt": "b"}', "one question per line, rename it to .jsonl"),
        ("limit.yaml", "data: {sources: {path: none.jsonl, limit: 1000000000000000000000000}}",
         "there is no file or folder none.jsonl"),
        ("empty.yaml", "", "empty.yaml has no settings; write lines like `steps: 100`"),
        ("rows.txt", "prompt,answer\n1,2\n", "if it contains questions, run: brorl init rows.txt"),
        ("list.yaml", '[{"prompt": "a"}]', "if it contains questions, run: brorl init list.yaml"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("recipe")
def test_errors_name_the_fix(name: str, content: str | None, said: str) -> None:
    if content is not None:
        Path(name).write_text(content)
    outcome = command("data", name)
    assert outcome.code == 2
    assert said in outcome.err
    assert "brorl train" not in outcome.err
    assert outcome.err.count("\n") == 1
