"""The data and the recipe of `examples/real_model`."""

import importlib.util
import json
import re
from math import prod
from pathlib import Path

import pytest

from brorl.config.reading import make_config, read_recipe

FOLDER = Path(__file__).parents[1] / "examples" / "real_model"
FILES = ("train", "held_out", "hard_train", "hard_held_out")


def made(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, str]]]:
    spec = importlib.util.spec_from_file_location("make_sums", FOLDER / "make_sums.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("sys.argv", ["make_sums.py", str(folder), "--seed", str(seed)])
    module.main()
    return {name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in FILES}


def value(expression: str) -> int:
    """Compute by hand: products first, then from left to right."""
    terms = re.findall(r"([+-] )?(\d+(?: \* \d+)*)", expression)
    return sum((-1 if sign == "- " else 1) * prod(map(int, factors.split("*"))) for sign, factors in terms)


@pytest.mark.slow
def test_the_questions_are_distinct_and_their_answers_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = made(tmp_path / "a", 3, monkeypatch)
    assert {name: len(of) for name, of in rows.items()} == dict(zip(FILES, (4000, 512, 4000, 512), strict=True))
    questions = [row["question"] for of in rows.values() for row in of]
    assert len(set(questions)) == len(questions)
    for row in (row for of in rows.values() for row in of):
        expression = row["question"].removeprefix("What is ").removesuffix("?")
        assert row["answer"] == str(value(expression)), row
        assert 2 <= len(re.findall(r"\d+", expression)) <= 4
    assert all(re.fullmatch(r"What is [\d +]+\?", row["question"]) for row in rows["train"] + rows["held_out"])
    assert rows == made(tmp_path / "b", 3, monkeypatch) != made(tmp_path / "c", 4, monkeypatch)
    assert capsys.readouterr().out.count("wrote 4000 training and 512 held-out questions") == 3


@pytest.mark.parametrize("name", ["recipe.yaml", "plateau.yaml"])
def test_the_recipes_read_these_columns(name: str) -> None:
    config = make_config(read_recipe(FOLDER / name), {}, name)
    sources = (*config.data.sources, *config.evaluation.sources)
    held_out = {"recipe.yaml": ["held_out"], "plateau.yaml": ["held_out", "hard_held_out"]}[name]
    assert [(Path(s.path).name, s.prompt_column, s.answer_column) for s in sources] == [  # type: ignore[union-attr]
        (f"{name}.jsonl", "question", "answer") for name in ("train", *held_out)
    ]
