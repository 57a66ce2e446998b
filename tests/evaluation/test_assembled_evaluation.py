"""The batches of an evaluation: their size, the fingerprint of weights, and evaluations that do not fit into memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brorl.activity import Echo
from brorl.assemble import build_evaluation
from brorl.config.reading import make_config, read_recipe
from brorl.errors import UserError
from brorl.evaluation import preparation
from brorl.evaluation.datasets import NO_LIMIT, EvaluationRequest, parse_data, read_all_questions, read_datasets
from brorl.evaluation.evaluator import weights_fingerprint
from brorl.evaluation.preparation import prepare_evaluation, prompts_per_batch
from brorl.model.load import load_model
from brorl.model.memory_prediction import MemoryPrediction
from brorl.prompts.public_data import benchmark_source
from brorl.prompts.rendering import TEMPLATES
from brorl.prompts.settings import CountdownSource, FileSource, GymSource
from brorl.rollout.chosen_engine import build_sampling_model
from brorl.rollout.native_engine import NativeEngine
from choice_rows import SCHEMAS
from data_files import write_rows

FEW = {"evaluation.rollouts_per_prompt": 4, "evaluation.ks": [1], "engine.threads": 1}


def request(data: tuple[str, ...] = (), limit: int = 3, **settings: object) -> EvaluationRequest:
    config = make_config(read_recipe("quickstart"), {**FEW, "evaluation.num_prompts": limit, **settings}, "quickstart")
    return EvaluationRequest(config, data, belongs_to_run=True, own_template=False)


def test_batches_are_small_where_responses_may_be_long() -> None:
    assert prompts_per_batch(512, 32_768) == 8
    assert prompts_per_batch(512, 12) == 64
    assert prompts_per_batch(16, 2_048) == 16
    assert all(8 <= prompts_per_batch(n, t) <= 64 for n in (1, 16, 512, 4096) for t in (1, 100, 10_000))


def test_what_a_data_set_means(tmp_path: Path) -> None:
    assert parse_data("aime24") == benchmark_source("aime24")
    assert parse_data("math=some/mirror") == benchmark_source("math", "some/mirror")
    assert parse_data("countdown") == CountdownSource()
    assert parse_data("{task: countdown, num_numbers: 4}") == CountdownSource(num_numbers=4)
    assert parse_data("some/set") == FileSource(path="some/set")
    (tmp_path / "a=b.jsonl").write_text("")
    assert parse_data(str(tmp_path / "a=b.jsonl")) == FileSource(path=str(tmp_path / "a=b.jsonl"))


@pytest.mark.parametrize("name", ["mmlu", "medmcqa_from_1", "opentdb"])
def test_a_file_is_read_with_the_columns_that_init_guesses(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.jsonl"
    write_rows(path, SCHEMAS[name].rows)
    asked = replace(request((str(path),), NO_LIMIT), belongs_to_run=False)
    (found,) = read_datasets(asked)
    assert [q.domain for q in found.held_out] == ["science"] * 5
    assert asked.format_of(found).fill("x", "science") == TEMPLATES["science"].replace("{prompt}", "x")
    every = read_all_questions(str(path), {})[1]
    assert sorted(every, key=lambda q: q.id) == sorted(found.held_out, key=lambda q: q.id)
    column = "answer" if "answer" in SCHEMAS[name].rows[0] else "cop"
    given = f"{{path: {path}, prompt_column: question, answer_column: {column}}}"
    if name != "opentdb":  # what is given is not guessed
        assert [q.domain for q in read_datasets(request((given,), NO_LIMIT))[0].held_out] == ["math"] * 5


def test_a_function_verifies_a_file_that_no_built_in_verifier_reads(tmp_path: Path) -> None:
    path = tmp_path / "cities.jsonl"
    path.write_text('{"question": "The capital of France?", "answer": "Paris"}\n')
    with pytest.raises(UserError, match="do not look like numbers or formulas; give `domain"):
        read_all_questions(str(path), {})
    _, (question,) = read_all_questions(str(path), {"verification.functions": {"cities": "my_checks.py:check"}})
    assert (question.domain, question.reference) == ("cities", "Paris")


def test_puzzles_are_those_kept_out_of_training_and_a_limit_samples_them() -> None:
    (every,) = read_datasets(request(("countdown",), NO_LIMIT))
    (puzzles,) = read_datasets(request(("{task: countdown, num_numbers: 3, max_number: 12}",), NO_LIMIT))
    (held_out,) = read_datasets(request((), NO_LIMIT))
    assert {q.id for q in puzzles.held_out} == {q.id for q in held_out.held_out}  # the recipe's own puzzles
    assert {q.id for q in every.held_out} < {q.id for q in held_out.held_out}  # numbers up to 9: one split for all
    (few,) = read_datasets(request(("countdown",), 5))
    assert len(few.held_out) == 5
    assert {q.id for q in few.held_out} < {q.id for q in every.held_out}
    assert read_datasets(request((), 7))[0].held_out == held_out.held_out[:7]  # as in training


def test_any_other_weight_changes_the_fingerprint(rng: np.random.Generator) -> None:
    model = load_model("quickstart", torch.device("cpu"), torch.float32)
    before = weights_fingerprint(model)
    assert weights_fingerprint(load_model("quickstart", torch.device("cpu"), torch.float32)) == before
    parameters = [p for p in model.parameters() if p.numel() <= 65_536]
    weight = parameters[rng.integers(len(parameters))].detach().reshape(-1)
    place = int(rng.integers(weight.numel()))
    weight[place] = torch.nextafter(weight[place], torch.tensor(torch.inf))
    assert weights_fingerprint(model) != before


@pytest.mark.slow
def test_what_does_not_fit_into_memory_is_refused_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = prepare_evaluation(request())
    assert sum(len(batch.prompts) for batch in ready.batches) == 3
    monkeypatch.setattr("brorl.evaluation.preparation.available_bytes", lambda _: 300_000)
    with pytest.raises(UserError, match=r"needs .* of memory, but 0 MiB are available: .*weights"):
        prepare_evaluation(request())


@pytest.mark.slow
def test_on_a_gpu_the_matrices_that_the_engine_joins_count(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[MemoryPrediction] = []
    monkeypatch.setattr(preparation, "check_prediction", lambda plan, _: plans.append(plan))
    monkeypatch.setattr(preparation, "available_bytes", lambda _: None)
    prepare_evaluation(request())
    monkeypatch.setattr(preparation, "choose_device", lambda _: torch.device("cuda"))
    ready = prepare_evaluation(request())
    model = build_sampling_model(ready.request.config.model_copy(update={"device": "cpu"}), ready.request.config.model)
    joined = sum(
        p.numel()
        for name, p in model.named_parameters()
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    )
    more = plans[1].kept_bytes - plans[0].kept_bytes
    assert more == joined * model.dtype.itemsize > 0


def test_the_engine_of_an_evaluation_speaks_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    made = NativeEngine.__init__

    def speaking(engine: NativeEngine, *args: Any, echo: Echo, **options: Any) -> None:
        echo("no graphs")
        made(engine, *args, echo=echo, **options)

    monkeypatch.setattr(NativeEngine, "__init__", speaking)
    build_evaluation(prepare_evaluation(request()), echo=lines.append)
    assert lines == ["no graphs"]


def test_settings_of_domains_that_are_not_evaluated_are_ignored() -> None:
    weights = {"rewards.domain_weights": {"math": 0.5}, "verification.functions": {"chess": "chess:judge"}}
    ready, plain = prepare_evaluation(request(**weights)), prepare_evaluation(request())
    assert set(ready.verifiers) == {"countdown"}
    assert ready.settings == plain.settings


@pytest.mark.slow
def test_truncated_responses_are_verified_where_the_run_rewards_them() -> None:
    for fraction in (0.0, 0.5):
        ready = prepare_evaluation(request(**{"rewards.stop_properly": fraction}))
        _, evaluator, _ = build_evaluation(ready)
        assert evaluator.grader.shaping.stop_properly == fraction
        assert ready.settings["accept_truncated"] == (fraction > 0)


@pytest.mark.parametrize("belongs_to_run", [False, True])
def test_public_data_gets_the_template_of_its_domain_unless_the_run_has_one(
    belongs_to_run: bool, tmp_path: Path
) -> None:
    """GPQA by a copy of its file, a mixed layout, and mathematics, each with its usual text around a question."""
    gpqa = {"Question": "Which?", "Correct Answer": "red", **{f"Incorrect Answer {i}": f"c{i}" for i in (1, 2, 3)}}
    mixed = [
        {
            "prompt": [
                {
                    "role": "user",
                    "content": f"{kind}: read a whole number from the input, and print it again on one line.",
                }
            ],
            "ability": kind,
            "reward_model": {"ground_truth": truth},
        }
        for kind, truth in (("math", "2"), ("code", '{"inputs": ["1\\n"], "outputs": ["1\\n"]}'), ("art", ""))
    ]
    files = {}
    for name, rows in (("gpqa", [gpqa]), ("mixed", mixed), ("aime", [{"problem": "Sum?", "answer": "70"}])):
        files[name] = tmp_path / f"{name}.jsonl"
        write_rows(files[name], rows)
    data = (f"gpqa_diamond={files['gpqa']}", f"{{path: {files['mixed']}, layout: eurus2}}", f"aime25={files['aime']}")
    config = make_config({"prompt": {"template": "Q: {prompt}"}}, {"evaluation.num_prompts": NO_LIMIT}, "test")
    asked = EvaluationRequest(config, data, belongs_to_run, own_template=False)
    sets = read_datasets(asked)
    assert [(s.name, s.published) for s in sets] == [("gpqa_diamond", True), ("mixed", True), ("aime25", True)]
    assert [dict(source.dropped) for source in sets] == [{}, {"the ability is art": 1}, {}]
    filled = {q.domain: asked.format_of(source).fill("x", q.domain) for source in sets for q in source.held_out}
    if belongs_to_run:
        assert set(filled.values()) == {"Q: x"}
    else:
        assert filled == {domain: TEMPLATES[domain].replace("{prompt}", "x") for domain in ("science", "math", "code")}


@pytest.mark.parametrize(("name", "number"), [("gym", 530), ("gym_ood", 300)])
def test_the_gym_benchmarks_are_fixed_sources_beyond_the_usual_training_indices(name: str, number: int) -> None:
    source = parse_data(name)
    assert isinstance(source, GymSource)
    assert (source.label, source.num_questions, source.first_index, source.seed) == (name, number, 4_000, 0)
    assert source.gym == (("all",) if name == "gym" else ("acre", "boxnet", "game_of_life_halting"))


@pytest.mark.slow
def test_an_evaluation_is_a_different_one_once_the_file_of_its_verifier_has_changed(tmp_path: Path) -> None:
    file, stored = tmp_path / "mine.py", []
    for text in ("", "# changed\n"):
        file.write_text(f"def score(response, reference):\n    return 1.0\n{text}")
        ready = prepare_evaluation(request(**{"verification.functions": {"countdown": f"{file}:score"}}))
        stored.append(ready.settings["verification"]["function_files"])
    assert stored[0] != stored[1]
    assert stored[0].keys() == {"countdown"}
