"""From a config to the parts of a run: what cannot work is said before anything runs."""

import json
from collections.abc import Callable, Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from brorl.api.data import describe_data
from brorl.assemble import build_run
from brorl.config.reading import make_config
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.evaluation.questions import build_questions, check_split
from brorl.model.flat_path import FlatForward
from brorl.model.forward import Forward
from brorl.model.logprobs import NextToken
from brorl.model.tree_path import TreeForward, tree_logprobs
from brorl.rollout.chosen_engine import build_engine
from brorl.rollout.engine import Engine, SampleTask
from brorl.runs.run_directory import RunDirectory
from brorl.sampling import SamplingParams
from brorl.training.collector import SyncCollector
from brorl.training.inputs import input_lines, prepare_run
from brorl.training.local_parts import build_forward, build_learner_forward, build_model
from brorl.training.loop import train_run
from brorl.training.policy_logprobs import next_token
from brorl.tree import RolloutTree
from brorl.verification.sandbox.level import choose_level
from run_support import save_tiny_model

SMALL = {
    "data.sources": {"task": "countdown", "max_number": 5},
    "evaluation.num_prompts": 3,
    "sampling.max_new_tokens": 8,
    "engine.threads": 1,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)


def config(model: Path, **overrides: Any) -> TrainConfig:
    return make_config({}, {**SMALL, "model": str(model), **overrides}, "test")


def test_learning_rate_follows_the_square_root_rule_only_if_a_reference_is_given(tiny: Path) -> None:
    plain = {"rollouts_per_prompt": 64, "prompts_per_step": 8, "optimizer.learning_rate": 1e-4}
    assert config(tiny, **plain).scaled_learning_rate == 1e-4
    scaled = config(tiny, **plain, **{"optimizer.reference_batch": 128})
    assert scaled.scaled_learning_rate == pytest.approx(1e-4 * sqrt(64 * 8 / 128))


def test_the_learner_takes_the_distribution_and_the_old_log_probs_of_its_recipe(tiny: Path) -> None:
    given = config(tiny, **{"sampling.temperature": 0.7, "sampling.min_new_tokens": 2, "sampling.top_k": 5})
    assert next_token(given, (0,)) == NextToken(0.7, 2, (0,), top_k=5)
    assert next_token(given, ()) == NextToken(0.7, top_k=5)
    recompute = {"engine": False, "recompute": True}
    for old, recomputes in recompute.items():
        assert config(tiny, **{"optimizer.old_logprobs": old}).recompute_old_logprobs == recomputes
    low = config(tiny, dtype="bfloat16")
    assert low.autocasts
    assert low.recompute_old_logprobs


def test_a_rounded_copy_samples_and_the_learner_corrects_for_it(tiny: Path) -> None:
    """Log-probs of the engine differ from those of the float32 weights, which stay as they are, by rounding alone."""
    rounded = {"engine.dtype": "bfloat16", "importance.correction": "truncate"}
    settings = config(tiny, **rounded)
    inputs = prepare_run(settings, str(tiny))
    model = build_model(settings, inputs)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    forward = build_forward(settings, inputs, model)
    assert settings.recompute_old_logprobs
    assert not settings.autocasts

    def engine(settings: TrainConfig, forward: TreeForward | FlatForward) -> Engine:
        return build_engine(settings, str(tiny), model, inputs.tokenizer, forward, inputs.context)

    (tree,) = engine(settings, forward).sample(SampleTask([(3, 4, 5)], 64, SamplingParams(max_new_tokens=8), seed=0))
    with torch.no_grad():
        (exact,) = tree_logprobs(model, [tree])
    error = np.abs(tree.logprob - exact.double().numpy())
    assert 1e-5 < error.max() < 0.1
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    for other in (TreeForward(), FlatForward("by choice")):
        with pytest.raises(UserError, match=r"engine\.dtype = bfloat16 needs the Llama pass.*set engine\.dtype: auto"):
            engine(settings, other)


def test_the_attention_is_that_of_the_settings(tiny: Path) -> None:
    settings = config(tiny, **{"engine.attention": "tiled"})
    ready = prepare_run(settings, str(tiny))
    model = build_model(settings, ready)
    forward = build_forward(settings, ready, model)
    assert isinstance(forward, TreeForward)
    assert forward.attention == "tiled"


def test_the_learner_has_packed_passes_on_cuda_where_they_can_be(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare_run(config(tiny), str(tiny))
    model, flat, packed = build_model(config(tiny), ready), FlatForward("a window"), TreeForward()
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "brorl.training.local_parts.with_packed_passes", lambda *_, **named: (calls.append(named), packed)[1]
    )
    monkeypatch.setattr("brorl.training.local_parts.choose_flex_options", lambda *inputs: f"options for {inputs[1:3]}")

    def chosen(**settings: str) -> Forward:
        named = {name.replace("__", "."): value for name, value in settings.items()}
        return build_learner_forward(config(tiny, **named), model, flat, lambda _: None)

    assert chosen() is flat  # on a CPU
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert chosen(dtype="bfloat16", importance__correction="truncate") is packed  # the engine keeps the flat path
    (call,) = calls
    assert call["autocast"] is True
    assert call["flex_options"] == f"options for {((), (torch.bfloat16, 16384, config(tiny).longest_response))}"
    assert call["failed_anywhere"](True) is True
    assert chosen(dtype="float64") is flat
    assert chosen(engine__attention="tiled") is flat
    assert chosen(engine__forward="flat") is flat


def test_a_format_reward_is_paid_for_the_format_alone(tiny: Path) -> None:
    settings = config(tiny, **{"rewards.format_pattern": "1.*", "rewards.format_reward": 0.25})
    grader = prepare_run(settings, str(tiny)).grader
    prompt = prepare_run(settings, str(tiny)).prompts.train.take(1)[0]
    ids = AutoTokenizer.from_pretrained(tiny)
    tree = RolloutTree.from_responses(prompt.token_ids, [ids(text)["input_ids"] for text in ("1+1", "2+1")])
    group = grader.rewarded(*grader.verify([prompt], [tree]), step=1)
    texts = grader.texts(group)
    assert not group.correct_L.any()
    assert group.reward_L.tolist() == [0.25 if text.startswith("1") else 0.0 for text in texts]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_dtype_of_the_trained_weights(tiny: Path, dtype: str) -> None:
    settings = config(tiny, dtype=dtype)
    model = build_model(settings, prepare_run(settings, str(tiny)))
    expected = torch.float64 if dtype == "float64" else torch.float32
    assert {p.dtype for p in model.parameters()} == {expected}


def test_training_and_held_out_prompts_share_no_numbers(tiny: Path) -> None:
    ready = prepare_run(config(tiny), str(tiny))
    train = ready.prompts.train.take(ready.prompts.train.num_prompts)
    held_out = ready.prompts.held_out
    numbers = [{p.text.split(" -> ")[0] for p in prompts} for prompts in (train, held_out)]
    assert len(held_out) == 3
    assert not numbers[0] & numbers[1]
    assert len({p.id for p in (*train, *held_out)}) == len(train) + len(held_out)
    assert ready.prompts.longest_tokens == max(len(p.token_ids) for p in (*train, *held_out))
    for prompt in (train[0], held_out[-1]):
        assert ready.tokenizer.decode(prompt.token_ids) == prompt.text


def test_run_has_the_parts_of_its_config(tiny: Path, tmp_path: Path) -> None:
    given = {"steps": 9, "prompts_per_step": 7, "rollouts_per_prompt": 11, "optimizer.mini_batches": 2}
    run, state = build_run(config(tiny, **given), RunDirectory(tmp_path), lambda _: None)
    assert isinstance(run.collector, SyncCollector)
    assert run.collector.config == run.diagnostics.config == run.config == config(tiny, **given)
    assert run.collector.sampler is run.diagnostics.sampler
    assert (state.step, state.collector.carried) == (0, ())
    assert run.held_out is not None
    assert len(run.held_out.prompts) == 3


def test_no_held_out_prompts_no_evaluation(tiny: Path, tmp_path: Path) -> None:
    run, _ = build_run(config(tiny, **{"evaluation.num_prompts": 0}), RunDirectory(tmp_path), lambda _: None)
    assert run.held_out is None


def changed(source: Path, target: Path, **changes: Any) -> Path:
    """Copy a model folder and change its config.json."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    settings = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(settings | changes))
    return target


def message_of(model: Path, tmp_path: Path, **overrides: Any) -> str:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(UserError) as caught:
        build_run(config(model, **overrides), RunDirectory(folder), lambda _: None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_that_cannot_be_used_is_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    damaged = changed(tiny, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:100])
    endless = save_tiny_model(tmp_path / "endless", end_token=False)
    wordless = save_tiny_model(tmp_path / "wordless", characters="0123456789+-*/() ")
    for number, (model, words) in enumerate(
        [
            (tmp_path / "none", ["does not exist"]),
            (Path("./nowhere/at/all"), ["does not exist"]),  # a path is not looked up on the hub
            (tmp_path / "empty", ["no config.json"]),
            (endless, ["no end-of-sequence token", "set sampling.stop"]),
            (wordless, ["cannot encode the prompt '1 1 1 -> ", "it has no token for '->'"]),
            (changed(tiny, tmp_path / "few", vocab_size=20), ["token ':' with id 21, but the model's embedding ha"]),
            (damaged, ["are damaged"]),
        ]
    ):
        (folder := tmp_path / str(number)).mkdir()
        message = message_of(model, folder)
        assert all(word in message for word in words), message


def test_longer_than_the_positions_of_the_model(tiny: Path, tmp_path: Path) -> None:
    message = message_of(tiny, tmp_path, **{"sampling.max_new_tokens": 60})
    assert "64 positions" in message
    assert "max_new_tokens = 60" in message


def test_longest_that_fits_is_accepted(tiny: Path) -> None:
    """The boundary: the longest prompt and its response take all 64 positions."""
    longest = prepare_run(config(tiny), str(tiny)).prompts.longest_tokens
    prepare_run(config(tiny, **{"sampling.max_new_tokens": 64 - longest}), str(tiny))
    with pytest.raises(UserError, match="64 positions"):
        prepare_run(config(tiny, **{"sampling.max_new_tokens": 65 - longest}), str(tiny))


def test_longer_than_a_sliding_window(tiny: Path, tmp_path: Path) -> None:
    longest = prepare_run(config(tiny), str(tiny)).prompts.longest_tokens
    for window, fits in ((longest + 8, True), (longest + 7, False)):
        model = changed(tiny, tmp_path / str(window), sliding_window=window)
        prepare_run(config(model), str(model))
        tree = {"engine.forward": "tree"}
        if fits:
            prepare_run(config(model, **tree), str(model))
        else:
            message = message_of(model, tmp_path, **tree)
            assert f"can have {window + 1} tokens together, but the sliding window of {model} has {window}," in message
            assert "set engine.forward: auto" in message


def gpt_neo(folder: Path, tokenizer: Path) -> None:
    """Save a model that computes its attention itself, and does not ask transformers for it."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "window_size": 64}
    _save(GPTNeoForCausalLM, GPTNeoConfig, folder, tokenizer, **sizes, **tokens)


def mamba(folder: Path, tokenizer: Path) -> None:
    """Save a model without attention."""
    from transformers import MambaConfig, MambaForCausalLM

    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    _save(MambaForCausalLM, MambaConfig, folder, tokenizer, hidden_size=8, num_hidden_layers=1, state_size=4, **tokens)


def _save(model: Any, settings: Any, folder: Path, tokenizer: Path, **sizes: Any) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    model(settings(vocab_size=len(loaded), **sizes)).save_pretrained(folder)
    loaded.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("save", [pytest.param(gpt_neo, marks=pytest.mark.slow), mamba])
def test_a_model_without_a_place_for_hooks_takes_the_flat_path(
    save: Callable[[Path, Path], None], tiny: Path, tmp_path: Path
) -> None:
    """A run of three steps, and one that is resumed after the first: the same weights, bit by bit."""
    model = tmp_path / "model"
    save(model, tiny)
    (tmp_path / "run").mkdir()
    assert "cannot be hooked" in message_of(model, tmp_path / "run", **{"engine.forward": "tree"})
    settings = {"rollouts_per_prompt": 8, "prompts_per_step": 2, "checkpoint_every": 1, "evaluation.num_prompts": 2,
                "dynamic_sampling.enabled": False, "optimizer.mini_batches": 1,
                "loss.entropy_coefficient": 0.1}  # fmt: skip
    found = []
    for folder, parts in ((tmp_path / "whole", (3,)), (tmp_path / "resumed", (1, 3))):
        folder.mkdir()
        for steps in parts:
            said: list[str] = []
            checked = config(model, steps=steps, **settings)
            run, state = build_run(checked, RunDirectory(folder), lambda _: None, said.append)
            (flat,) = [line for line in said if line.startswith("using the flat path, because ")]
            assert flat.endswith("one row per distinct response, with its prompt, and recomputes shared tokens")
            train_run(run, state)
            assert sum("a pass over the responses of this step has" in line for line in said) == 1
            found.append({name: weight.clone() for name, weight in run.learner.weights()})
    assert all(torch.equal(found[0][name], found[2][name]) for name in found[0])
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_more_prompts_a_step_than_there_are_to_train_on_is_a_warning(tiny: Path, tmp_path: Path) -> None:
    there_are = prepare_run(config(tiny), str(tiny)).prompts.train.num_prompts
    for asked, warned in ((there_are, False), (there_are + 1, True)):
        said: list[str] = []
        build_run(config(tiny, prompts_per_step=asked), RunDirectory(tmp_path), lambda _: None, said.append)
        expected = f"prompts_per_step = {asked:,} exceeds the {there_are:,} training prompts"
        assert any(expected in line for line in said) == warned


@pytest.mark.parametrize("number", [1, 2])
def test_lines_about_removed_data_have_the_right_plural(tiny: Path, tmp_path: Path, number: int) -> None:
    """A run and `brorl data` print the same lines."""
    kept, asked = ([f"{start}+{i}" for i in range(number)] for start in (1, 2))
    long = [f"3+{i}+0" for i in range(number)]
    for name, texts in (("train", [*kept, *asked, *long]), ("held_out", asked)):
        rows = [json.dumps({"prompt": text, "answer": "7"}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    settings = {
        "data.sources": {"path": str(tmp_path / "train.jsonl")}, "data.held_out_fraction": 0.0,
        "data.max_prompt_tokens": 3, "evaluation.sources": {"path": str(tmp_path / "held_out.jsonl")},
        "prompts_per_step": number + 1, "optimizer.mini_batches": 1,
    }  # fmt: skip
    checked = config(tiny, **settings)
    plural = "s" if number > 1 else ""
    removed = [
        f"dropped: {number} prompt{plural} of more than 3 tokens (data.max_prompt_tokens)",
        f"removed from training: {number} question{plural} in the evaluation data",
    ]
    *lines, warning, _ = input_lines(prepare_run(checked, str(tiny)), checked)
    assert lines == removed
    assert f"exceeds the {number} training prompt{plural}, so steps repeat prompts" in warning
    assert [note for note in describe_data(checked, 0).notes if note in removed] == removed


def test_settings_of_a_cluster_without_machines_are_named(tiny: Path) -> None:
    def lines(**settings: object) -> list[str]:
        checked = config(tiny, **settings)
        return [line for line in input_lines(prepare_run(checked, str(tiny)), checked) if "cluster" in line]

    assert lines() == lines(**{"cluster.nodes": 2, "cluster.rollout_workers": 3}) == []
    [line] = lines(**{"cluster.rollout_workers": 3})
    assert "cluster.nodes = 0" in line


@pytest.mark.linux
@pytest.mark.parametrize("level", ["auto", "unsafe"])
def test_the_level_of_the_sandbox_is_printed_if_code_runs(tiny: Path, tmp_path: Path, level: str) -> None:
    calls = '{"calls": {"function": "f", "arguments": [[1]], "expected": [1]}}'
    rows = [{"prompt": f"{i}+{i}", "answer": calls} for i in range(20)]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(tmp_path / "code.jsonl"), "domain": "code"}
    settings = {"data.sources": source, "data.held_out_fraction": 0.5, "verification.sandbox": level}
    for run, expected in ((settings, [level]), ({}, [])):
        checked = config(tiny, **run)
        lines = [line for line in input_lines(prepare_run(checked, str(tiny)), checked) if "sandbox" in line]
        if level == "auto":
            assert lines == [f"sandbox for untrusted code (code): {choose_level(level).name}" for _ in expected]
        else:
            starts = [line.startswith("warning: no sandbox: verification.sandbox = unsafe runs") for line in lines]
            assert starts == [True for _ in expected]


def test_no_more_held_out_prompts_than_there_are(tiny: Path) -> None:
    questions = build_questions(config(tiny, **{"evaluation.num_prompts": 100_000}))
    limited = build_questions(config(tiny))
    assert len(limited[0].held_out) == 3
    assert len(questions[0].held_out) > 3
    assert {q.id for q in limited[0].held_out} < {q.id for q in questions[0].held_out}


def test_skipped_held_out_prompts_are_neither_evaluated_nor_trained_on(tiny: Path) -> None:
    whole = build_questions(config(tiny, **{"evaluation.num_prompts": 100_000}))[0]
    skipping = build_questions(config(tiny, **{"evaluation.skip_prompts": 2, "evaluation.num_prompts": 3}))[0]
    assert [q.id for q in skipping.held_out] == [q.id for q in whole.held_out[2:5]]
    assert [q.id for q in skipping.train] == [q.id for q in whole.train]
    none_left = config(tiny, **{"evaluation.skip_prompts": 99_999})
    with pytest.raises(UserError, match=r"lower evaluation\.skip_prompts = 99999"):
        check_split(none_left, build_questions(none_left))


def test_a_question_like_a_skipped_one_is_not_trained_on(tiny: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(20)]
    for name, part in (("train", rows), ("held_out", rows[:8])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    settings = {
        "data.sources": {"path": str(tmp_path / "train.jsonl")}, "data.held_out_fraction": 0.0,
        "evaluation.sources": {"path": str(tmp_path / "held_out.jsonl")}, "evaluation.num_prompts": 3,
        "evaluation.skip_prompts": 5,
    }  # fmt: skip
    train, held_out = build_questions(config(tiny, **settings))
    assert len(held_out.held_out) == 3
    assert {q.text for q in train.train} == {row["prompt"] for row in rows[8:]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device(tiny: Path, tmp_path: Path) -> None:
    assert "torch finds no CUDA device; set device: cpu" in message_of(tiny, tmp_path, device="cuda")


@pytest.mark.slow
def test_no_two_sources_of_neighbouring_seeds_share_a_shuffle(tiny: Path, rng: np.random.Generator) -> None:
    """Three sources with the same puzzles: their orders differ, and differ from those of the next seed."""
    seed = int(rng.integers(1000))
    sources = [{"task": "countdown", "max_number": 5, "name": name} for name in "abc"]
    orders = []
    for s in (seed, seed + 1, seed + 2**32):
        mixture = prepare_run(config(tiny, **{"data.sources": sources, "seed": s}), str(tiny)).prompts.train
        taken = mixture.take(mixture.num_prompts)
        orders += [tuple(p.text for p in taken if p.source == name) for name in "abc"]
    assert len({tuple(sorted(order)) for order in orders}) == 1
    assert len(set(orders)) == 9


def test_large_seeds_reach_the_random_numbers_of_torch(tiny: Path, rng: np.random.Generator) -> None:
    """Torch's generator on a CPU takes 32 bits of a seed; new LoRA adapters come from it."""
    seed = int(rng.integers(1000))
    drawn = set()
    for s in (seed, seed + 1, seed + 2**32, 2**63 - 1):
        prepare_run(config(tiny, seed=s), str(tiny))
        drawn.add(tuple(torch.rand(4).tolist()))
    assert len(drawn) == 4
