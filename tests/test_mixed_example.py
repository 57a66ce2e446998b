"""The mixed example: its rows are right, its model never trains on them, and a run learns from all domains."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random
from types import ModuleType

import numpy as np
import pytest
import torch

from brorl.algorithms.settings import RewardShaping
from brorl.config.reading import make_config, read_recipe
from brorl.evaluation.questions import all_questions, build_questions
from brorl.prompts.code_tests import CallCases, CodeTests
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import Question
from brorl.prompts.science import read_science_reference
from brorl.verification.domains.verifiers import make_verifiers
from brorl.verification.sandbox.pool import Workers
from brorl.verification.settings import VerificationSettings

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "mixed"
DOMAINS = ("math", "code", "science", "ifeval")


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("make_data", "make_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # of another example
    return importlib.import_module("make_data")


@pytest.fixture
def maker(data: ModuleType) -> ModuleType:
    assert data.__file__ == str(FOLDER / "make_data.py")
    return importlib.import_module("make_model")


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """Return the questions of the recipe."""
    monkeypatch.chdir(ROOT)
    path = str(FOLDER / "recipe.yaml")
    return all_questions(build_questions(make_config(read_recipe(path), {"evaluation.num_prompts": 300}, path)))


def rows(domain: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / f"{domain}.jsonl").read_text("utf-8").splitlines()]


def test_the_files_are_what_their_script_writes(
    data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["make_data.py", "--out", str(tmp_path)])
    data.main()
    for domain in DOMAINS:
        committed = (FOLDER / f"{domain}.jsonl").read_bytes()
        assert (tmp_path / f"{domain}.jsonl").read_bytes() == committed
        assert len(committed) < 150_000
        assert len({data.same_words(domain, row) for row in rows(domain)}) == 300


def test_the_answers_of_arithmetic_are_right() -> None:
    for row in rows("math"):
        numbers = [int(number) for number in re.findall(r"\d+", row["prompt"])]
        kinds = {r"\+|Add|sum|plus": sum, r" - |minus|less|down": lambda n: n[0] - n[1]}
        kinds |= {r"\*|Multiply|times|product": lambda n: n[0] * n[1]}
        (solve,) = (solve for kind, solve in kinds.items() if re.search(kind, row["prompt"]))
        assert int(row["answer"]) == solve(numbers), row


def test_no_case_of_a_function_is_met_by_a_constant() -> None:
    for row in rows("code"):
        tests = CodeTests.from_text(row["answer"])
        assert isinstance(tests.tests, CallCases)
        assert len(set(tests.tests.expected)) > 1, row
        assert tests.solution is not None
        numbers = {int(number) for number in re.findall(r"\d+", row["prompt"])}
        assert numbers == {int(number) for number in re.findall(r"\d+", tests.solution)} - ({0} - numbers)


def test_the_prompts_of_the_model_are_those_of_the_recipe(maker: ModuleType, questions: list[Question]) -> None:
    of_the_script = {maker.text_of(domain, row) for domain in DOMAINS for row in rows(domain)}
    assert {f"{question.text}\n" for question in questions} == of_the_script
    assert len(questions) == 1200


@pytest.mark.slow
def test_training_never_sees_a_question_of_the_files(maker: ModuleType, questions: list[Question]) -> None:
    asked = {question.text for question in questions}
    for question in questions:
        if question.domain == "science":  # in no order of the options
            head = question.text.partition("\n")[0]
            asked.add("\n".join((head, *sorted(read_science_reference(question.reference).options))))
    for prompt, _ in islice(maker.fresh_examples(1), 8_000):
        head, *options = prompt.strip().split("\n")
        assert prompt.strip() not in asked
        assert "\n".join((head, *sorted(option.partition(". ")[2] for option in options[1:]))) not in asked or (
            not options
        )


@pytest.mark.slow
@pytest.mark.linux
def test_right_and_wrong_responses_are_verified_as_such(
    maker: ModuleType, questions: list[Question], rng: np.random.Generator
) -> None:
    draw = Random(int(rng.integers(2**32)))
    row_of = {f"{maker.text_of(d, row)}": row for d in DOMAINS for row in rows(d)}
    with Workers() as workers:
        verifiers = make_verifiers(DOMAINS, VerificationSettings(), RewardShaping(), workers)
        for domain in DOMAINS:
            chosen = draw.sample([question for question in questions if question.domain == domain], 20)
            for right in (True, False):
                items = []
                for question in chosen:
                    text = f"{question.text}\n"
                    response = maker.RESPONSES[domain](row_of[text], text, right, draw)
                    items.append((Prompt(question.id, text, (1,), question.reference, domain), response))
                correct = [verdict.correct for verdict in verifiers[domain].verify_all(items)]
                if right:
                    assert all(correct), items
                elif domain in ("math", "science"):
                    assert not any(correct), items
                else:  # another number can give the same function, and instructions are followed by chance
                    assert sum(correct) < 18


@pytest.mark.slow
def test_the_untrained_model_reads_every_prompt(maker: ModuleType, questions: list[Question]) -> None:
    tokenizer = maker.make_tokenizer(list(islice(maker.fresh_examples(1), 2_000)))
    model = maker.make_model(tokenizer, seed=1)
    assert 300_000 < model.num_parameters() < 1_000_000
    assert max(len(tokenizer(question.text)["input_ids"]) for question in questions) < 100
    assert tokenizer.decode(tokenizer("Ünïcode {x}\n 42 ☃")["input_ids"]) == "Ünïcode {x}\n 42 ☃"


@pytest.mark.slow
def test_the_loss_is_that_of_the_responses_alone(maker: ModuleType) -> None:
    """The loss of a domain, against log-probs of each response from a row of its own."""
    examples = list(islice(maker.fresh_examples(3), 8))[2::4]
    tokenizer = maker.make_tokenizer(list(islice(maker.fresh_examples(1), 1_000)))
    model = maker.make_model(tokenizer, seed=3)
    total, count = 0.0, 0
    for prompt, response in examples:
        question, answer = (tokenizer(text)["input_ids"] for text in (prompt, response + maker.END))
        with torch.no_grad():
            logprob = model(torch.tensor([question + answer])).logits[0].log_softmax(-1)[len(question) - 1 : -1]
        total -= float(logprob.gather(1, torch.tensor(answer)[:, None]).sum())
        count += len(answer)
    assert maker.response_loss(model, tokenizer, examples).item() == pytest.approx(total / count, rel=1e-4)


@pytest.mark.example
@pytest.mark.linux
def test_a_short_run_learns_from_all_four_domains(tmp_path: Path) -> None:
    """The commands of the page, with a barely trained model, fewer steps and fewer rollouts."""
    shutil.copytree(FOLDER, tmp_path / "examples" / "mixed")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"

    run("python", "examples/mixed/make_model.py", "runs/mixed_model", "--steps", "60")
    run(
        "brorl", "train", "examples/mixed/recipe.yaml", "--output_dir", "runs/mixed", "--steps", "4",
        "--rollouts_per_prompt", "128", "--evaluation.num_prompts", "8", "--evaluation.rollouts_per_prompt", "16",
        "--evaluation.ks", "[1,16]", "--evaluation.every", "4",
    )  # fmt: skip
    records = [json.loads(line) for line in (tmp_path / "runs/mixed/metrics.jsonl").read_text().splitlines()]
    assert all({*r["evaluation"]["by_source"]} == {*DOMAINS} for r in records if "evaluation" in r)
    steps = records[1:]
    assert len(steps) == 4
    assert sum(r["kept"]["groups"] for r in steps) > 0
    assert sum(r["sampling"]["verifier_failures"] for r in steps) == 0
