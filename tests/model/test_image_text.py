"""Models of images and text: their text part is sampled, trained and saved in the layout that they came in."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

from brorl.errors import UserError
from brorl.model.flat_path import CacheError
from brorl.model.forward import Forward, choose_forward
from brorl.model.load import Blueprint, load_model
from brorl.model.memory_prediction import predict_memory
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.model.settings import LoraSettings
from brorl.model.source import auto_class
from brorl.model.tree_path import TreeForward
from brorl.rollout.vllm_engine import publish
from brorl.training.learner import TreeLearner
from image_text_models import IMAGE_TEXT, save_image_text, train_on_ranks
from learner_support import batch_of, learn
from path_checks import assert_exact, assert_greedy_equals_generate
from rank_processes import RankProcesses
from recipes import recipe
from run_support import SMALL, assert_same_run, command, save_tiny_model
from small_models import mostly_slow

CPU = torch.device("cpu")
TRAINED = [kind for kind in IMAGE_TEXT if kind != "paligemma"]
FLAT = ("qwen3_5",)
IMAGES = ("vision", "visual", "multi_modal")  # in the names of weights that read images
LORA = LoraSettings(rank=2, alpha=4.0)


def trained_steps(model: PreTrainedModel, forward: Forward, rng: np.random.Generator) -> TreeLearner:
    """Train a model for two steps."""
    learner = TreeLearner(model, recipe(learning_rate=1e-2, weight_decay=0.1), forward=forward)
    for seed in range(2):
        learn(learner, *batch_of(rng, 2), seed=seed)
    return learner


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(TRAINED))
def test_the_text_is_trained_and_the_source_is_saved_again_with_it(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """The file has the names of the source, its weights for images bit by bit, and the trained ones of text."""
    source = save_image_text(kind, tmp_path / "source", seed=int(rng.integers(1 << 30)))
    model = load_model(str(tmp_path / "source"), CPU, torch.float32)
    assert type(model) is type(source)
    forward = choose_forward(model, context=16)
    assert isinstance(forward, TreeForward) == (kind not in FLAT)
    learner = trained_steps(model, forward, rng)
    learner.save_pretrained(tmp_path / "saved")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "saved"))
    assert before.keys() == after.keys()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    images = {name for name in before if any(piece in name for piece in IMAGES)}
    assert images
    assert changed
    assert not changed & images
    # A layer without rotations or experts that no token takes has no gradient; weight decay leaves it, too.
    assert before.keys() - images - changed <= {name for name in before if "experts" in name or "norm" in name}
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert type(again) is type(source)
    ours = dict(model.named_parameters())
    assert all(torch.equal(weight, ours[name]) for name, weight in again.named_parameters())
    of_source = dict(source.named_parameters())
    sent = dict(learner.weights())
    assert {n for n in ours if n not in sent} == {n for n, p in model.named_parameters() if not p.requires_grad}
    assert all(torch.equal(ours[name], of_source[name]) for name in ours if name not in sent)
    assert json.loads((tmp_path / "saved/config.json").read_text())["model_type"] == kind
    name = "preprocessor_config.json"
    assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


@pytest.mark.parametrize("kind", mostly_slow(TRAINED))
def test_text_is_sampled_and_differentiated_exactly(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """On both paths, against the flattened batch through the class of the source, as transformers loads it."""
    plain = save_image_text(kind, tmp_path, seed=int(rng.integers(1 << 30))).double()
    model = load_model(str(tmp_path), CPU, torch.float64)
    for one in (plain, model):
        if any(name.endswith("experts") for name, _ in one.named_modules()):
            one.set_experts_implementation("eager")  # the others have no float64
    for choice in ("flat", "auto"):
        assert_exact(model, choose_forward(model, choice, context=16), rng, 2e-3 if kind in FLAT else 1e-4, plain)


@pytest.mark.parametrize("kind", mostly_slow(TRAINED))
def test_greedy_text_equals_generate(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    plain = save_image_text(kind, tmp_path, seed=int(rng.integers(1 << 30)))
    model = load_model(str(tmp_path), CPU, torch.float32)
    prompts = [rng.integers(1, 16, n).tolist() for n in (6, 12)]
    assert_greedy_equals_generate(model, choose_forward(model, context=22), prompts, plain)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(TRAINED))
def test_adapters_are_of_the_text_and_load_on_the_class_of_the_source(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    source = save_image_text(kind, tmp_path / "source", seed=int(rng.integers(1 << 30)))
    model = load_model(str(tmp_path / "source"), CPU, torch.float32, LORA)
    adapted = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted
    assert all(name.startswith(("language_model.", "model.language_model.")) for name in adapted)
    trained_steps(model, choose_forward(model, context=16), rng).save_pretrained(tmp_path / "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated parts of transformers
        peft = PeftModel.from_pretrained(source, str(tmp_path / "saved")).eval()
    merged = load_model(str(tmp_path / "saved"), CPU, torch.float32)
    ids = torch.from_numpy(rng.integers(1, 16, (2, 7)))
    expected = model.eval()(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(peft(input_ids=ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged(input_ids=ids, use_cache=False).logits, expected, rtol=1e-3, atol=1e-3)
    assert any(not p.requires_grad for p in merged.parameters())  # of images


def test_vllm_gets_the_names_of_the_whole_model(tmp_path: Path) -> None:
    """Its classes of these models map `model.language_model.` and `lm_head.`, as new checkpoints have them."""
    save_image_text("qwen3_5", tmp_path, seed=0)
    model = load_model(str(tmp_path), CPU, torch.float32)
    learner = TreeLearner(model, recipe(learning_rate=0.1), forward=choose_forward(model))
    folder = publish(learner.weights(), torch.float32)
    names = load_file(folder.path / "model.safetensors").keys()
    assert names == {name for name in load_file(tmp_path / "model.safetensors") if ".visual." not in name}
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in names)


def test_a_rank_builds_the_class_of_the_source(tmp_path: Path) -> None:
    save_image_text("qwen3_5", tmp_path, seed=0)
    model = load_model(str(tmp_path), CPU, torch.float32)
    built = Blueprint.of(model).build()
    assert type(built) is type(model)
    trained = [{name for name, p in one.named_parameters() if p.requires_grad} for one in (model, built)]
    assert trained[0] == trained[1]
    assert len(trained[0]) < len(dict(model.named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_two_ranks_train_and_save_what_one_does(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    save_image_text(kind, tmp_path / "source", seed=int(rng.integers(1 << 30)))
    model = load_model(str(tmp_path / "source"), CPU, torch.float32)
    settings, forward = recipe(learning_rate=1e-3), choose_forward(model, context=16)
    steps = [batch_of(rng, 2) for _ in range(2)]
    processes = RankProcesses(2)
    try:
        for size, name in ((1, "one"), (2, "two")):
            processes.run(size, train_on_ranks, tmp_path / "source", tmp_path / name, steps, settings, forward)
    finally:
        processes.close()
    source, one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "one", "two"))
    assert source.keys() == one.keys() == two.keys()
    for name, tensor in two.items():
        torch.testing.assert_close(tensor, one[name], rtol=1e-3, atol=1e-4)
        if any(piece in name for piece in IMAGES):
            assert torch.equal(tensor, source[name])
    assert (tmp_path / "two/preprocessor_config.json").exists()


def test_memory_is_planned_for_the_weights_that_are_trained(tmp_path: Path) -> None:
    save_image_text("gemma3", tmp_path, seed=0)
    model = load_model(str(tmp_path), CPU, torch.float32)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in model.parameters())
    plan = predict_memory(model.config, MemorySettings("float32", 1 << 30), Workload())
    kept = {line.name: line.num_bytes for line in plan.kept}
    assert (kept["weights"], kept["gradients"], kept["AdamW"]) == (4 * whole, 4 * trained, 8 * trained)


def test_a_model_that_reads_prompts_in_both_directions_is_refused(tmp_path: Path) -> None:
    save_image_text("paligemma", tmp_path, seed=0)
    model = load_model(str(tmp_path), CPU, torch.float32)
    with pytest.raises(CacheError, match="PaliGemmaForConditionalGeneration cannot take the flat path: its logits"):
        choose_forward(model)


def test_a_text_part_that_was_saved_alone_stays_alone(tmp_path: Path) -> None:
    """A config of images and text with the name of the class of its text."""
    config = save_image_text("qwen3_5", tmp_path, seed=0).config
    config.architectures = ["Qwen3_5ForCausalLM"]
    assert auto_class(config).__name__ == "AutoModelForCausalLM"
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    assert auto_class(config) is AutoModelForImageTextToText


def test_models_of_sound_are_refused_before_their_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_audio"}))
    with pytest.raises(UserError, match="is a qwen2_audio, which is not a causal language model"):
        load_model(str(tmp_path), CPU, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_a_run_is_checked_resumed_and_evaluated(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """A run of two steps, and one that is resumed after the first: the same, bit by bit."""
    monkeypatch.chdir(tmp_path)
    save_image_text(kind, tmp_path / "model", seed=int(rng.integers(1 << 30)))
    AutoTokenizer.from_pretrained(save_tiny_model(tmp_path / "tiny")).save_pretrained(tmp_path / "model")
    settings = [
        *SMALL,
        "--model=model",
        "--dynamic_sampling.enabled=false",
        "--checkpoint_every=1",
        "--evaluation.every=1",
    ]
    checked = command("check", *settings)
    assert checked.code == 0, checked
    assert ("using the flat path, because" in checked.said) == (kind in FLAT)
    assert ("carry a state from token to token" in checked.said) == (kind in FLAT)
    assert command("train", "--output_dir=whole", "--steps=2", *settings).code == 0
    assert command("train", "--output_dir=parts", "--steps=1", *settings).code == 0
    assert command("resume", "parts", "--steps=2").code == 0
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1+1", "answer": "2"}\n')
    evaluated = command(
        "eval", "whole/checkpoints/step-000002", "--data=data.jsonl", "--samples=4", "--ks=1", "--max-new-tokens=4"
    )
    assert evaluated.code == 0, evaluated
