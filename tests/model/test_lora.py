"""LoRA: adapters beside frozen weights, against the product written out; saved, continued, merged, refused."""

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

import brorl.model.lora as lora_module
from architectures import EXACT, REFUSED, tiny
from brorl.algorithms.groups import Group
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.model.load import load_model, load_tokenizer
from brorl.model.lora import adapter_shapes, add_adapter, put_adapter, read_adapter, target_layers
from brorl.model.settings import LoraSettings
from brorl.model.tree_path import tree_logprobs
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.rollout.vllm_engine import send_adapted
from brorl.sampling import SamplingParams
from brorl.training.learner import TreeLearner
from each_row import each_row
from learner_support import learn
from path_checks import assert_products_written_out
from recipes import recipe
from run_support import save_tiny_model
from small_models import (
    ARCHITECTURES,
    mostly_slow,
    random_tree,
    small_model,
)

CPU = torch.device("cpu")
SETTINGS = LoraSettings(rank=3, alpha=12.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"))


FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    saved_adapter(base, folder, np.random.default_rng(0))
    return folder


@pytest.fixture(scope="module")
def adapted(base: Path, adapter: Path) -> list[nn.Module]:
    """The base with peft's adapters around it, as for a merge, and in it, as for training."""
    outer, inner = (load_model(str(base), CPU, torch.float32) for _ in range(2))
    add_adapter(inner, SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated parts of transformers
        return [peft.PeftModel(outer, read_adapter(adapter)[0]), inner]


def with_adapter(model: PreTrainedModel, rng: np.random.Generator, settings: LoraSettings = SETTINGS) -> None:
    """Add adapters and give them random weights, so that they matter."""
    add_adapter(model, settings)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.from_numpy(0.3 * rng.normal(size=parameter.shape)).to(parameter.dtype)


def saved_adapter(base: Path, folder: Path, rng: np.random.Generator) -> PreTrainedModel:
    model = load_model(str(base), CPU, torch.float32, SETTINGS)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.from_numpy(rng.normal(size=parameter.shape)).float()
    model.save_pretrained(folder)
    load_tokenizer(str(base)).save_pretrained(folder)
    return model


@pytest.mark.parametrize("architecture", mostly_slow(ARCHITECTURES))
def test_log_probs_and_gradients_are_those_of_the_products_written_out(
    architecture: str, rng: np.random.Generator
) -> None:
    seed = int(rng.integers(1 << 30))
    model, plain = small_model(architecture, seed=seed), small_model(architecture, seed=seed)
    with_adapter(model, rng)
    weights = {n: m.base_layer.weight.detach() for n, m in model.named_modules() if hasattr(m, "lora_A")}
    kinds = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.rpartition(".")[2] for name in weights} == kinds
    assert_products_written_out(model, plain, weights, SETTINGS.alpha / SETTINGS.rank, rng, 1e-9)


def test_a_new_adapter_changes_nothing_and_its_size_is_known(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)))
    tree = random_tree(rng)
    with torch.no_grad():
        (before,) = tree_logprobs(model, [tree])
        expected = adapter_shapes(model, SETTINGS)
        add_adapter(model, SETTINGS)
        (after,) = tree_logprobs(model, [tree])
    torch.testing.assert_close(before, after, rtol=1e-12, atol=0)
    assert sorted(tuple(p.shape) for p in model.parameters() if p.requires_grad) == sorted(expected)


def test_targets_are_layers_by_name(rng: np.random.Generator) -> None:
    model = small_model(seed=1)
    with_adapter(model, rng, LoraSettings(rank=2, target_modules=("q_proj", "down_proj")))
    adapted = {name.rpartition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted == {f"model.layers.{i}.{x}" for i in (0, 1) for x in ("self_attn.q_proj", "mlp.down_proj")}
    with pytest.raises(UserError, match=r"names 'c_attn', but no linear layer of LlamaForCausalLM has this"):
        target_layers(small_model(), ("q_proj", "c_attn"))


def test_targets_that_peft_takes_for_others_are_refused() -> None:
    """Names of shared experts, which peft takes for names of experts, and the output of Mamba."""
    deepseek, mamba = tiny("deepseek_v3", EXACT["deepseek_v3"]), tiny("mamba", REFUSED["mamba"][0])
    with pytest.raises(
        UserError, match=r"names 'gate_proj', which peft does not adapt in DeepseekV3ForCausalLM \(it ad"
    ):
        add_adapter(deepseek, LoraSettings(rank=2, target_modules=("gate_proj", "o_proj")))
    with pytest.raises(UserError, match="names 'out_proj', which peft does not adapt in MambaForCausalLM"):
        add_adapter(mamba, LoraSettings(rank=2, target_modules=("out_proj",)))


def test_a_saved_adapter_loads_with_transformers_and_is_continued_bitwise(
    base: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = saved_adapter(base, tmp_path / "adapter", rng)
    ids = torch.arange(9)[None]
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert not (tmp_path / "adapter/model.safetensors").exists()
    for again in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"),
        load_model(str(tmp_path / "adapter"), CPU, torch.float32, SETTINGS),
    ):
        # Two places in memory: matrix products of some processors round by the address.
        torch.testing.assert_close(again.eval()(ids).logits, model.eval()(ids).logits)
    for (name, ours), (theirs_name, theirs) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert name == theirs_name
        assert ours.requires_grad == theirs.requires_grad == (".lora_" in name)
        assert torch.equal(ours, theirs)
    assert again.name_or_path == str(base)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").eos_token == load_tokenizer(str(base)).eos_token
    (tmp_path / "adapter/tokenizer_config.json").unlink()  # the base has one
    assert load_tokenizer(str(tmp_path / "adapter")).eos_token == load_tokenizer(str(base)).eos_token


def test_without_lora_settings_an_adapter_is_merged(base: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    """Into the base in float32; a bfloat16 model is rounded once, after it."""
    adapted = saved_adapter(base, tmp_path, rng)
    before = dict(load_model(str(base), CPU, torch.float32).named_parameters())
    merged = load_model(str(tmp_path), CPU, torch.float32)
    assert [name for name, _ in merged.named_parameters()] == list(before)
    for name, parameter in merged.named_parameters():
        assert parameter.requires_grad
        expected = before[name].detach()
        layer = adapted.get_submodule(name.rpartition(".")[0])
        if hasattr(layer, "lora_A"):
            product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            expected = expected + SETTINGS.alpha / SETTINGS.rank * product.detach()
            assert not torch.allclose(expected, before[name])
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-5)
    low = load_model(str(tmp_path), CPU, torch.bfloat16)
    frequencies = dict(load_model(str(base), CPU, torch.bfloat16).named_buffers())
    assert frequencies
    assert all(torch.equal(buffer, frequencies[name]) for name, buffer in low.named_buffers())
    for ours, exact in zip(low.parameters(), merged.parameters(), strict=True):
        assert torch.equal(ours, exact.to(torch.bfloat16))


@pytest.mark.parametrize("targets", [("lm_head",), ("embed_tokens",), ("q_proj",)])
def test_a_merge_into_tied_embeddings_is_the_adapted_model_also_after_it_is_saved(
    targets: tuple[str, ...], tmp_path: Path, rng: np.random.Generator
) -> None:
    """Against peft's own forward pass; adapters of one of the two tied layers untie them, and others do not."""
    model = small_model(tie_word_embeddings=True, seed=int(rng.integers(1 << 30)), dtype=torch.float64)
    model.save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says what can go wrong, and this is the test that it does not
        adapted = peft.get_peft_model(
            LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64),
            peft.LoraConfig(r=2, target_modules=[*targets]),
        ).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += torch.from_numpy(rng.normal(size=parameter.shape))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merged_model = load_model(str(tmp_path / "adapter"), CPU, torch.float64)
    ids = torch.from_numpy(rng.integers(0, 17, (2, 9)))
    expected = adapted(ids).logits
    torch.testing.assert_close(merged_model(ids).logits, expected, rtol=1e-9, atol=1e-9)
    is_tied = merged_model.get_input_embeddings().weight is merged_model.get_output_embeddings().weight
    assert is_tied == merged_model.config.tie_word_embeddings == (targets == ("q_proj",))
    vllm = Mock()
    if is_tied:
        send_adapted(vllm, merged_model, str(tmp_path / "adapter"))
    else:  # vLLM has one weight for both layers
        with pytest.raises(UserError, match=r"vLLM ties the embedding .* save the merged model"):
            send_adapted(vllm, merged_model, str(tmp_path / "adapter"))
    assert vllm.load_weights.called == is_tied
    TreeLearner(merged_model, recipe(learning_rate=1e-3)).save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(again(ids).logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_of_the_output_layer_are_trained_saved_continued_and_merged(
    tied: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = small_model(tie_word_embeddings=tied, seed=int(rng.integers(1 << 30)), dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    settings = LoraSettings(rank=2, target_modules=("lm_head", "v_proj"))
    model = load_model(str(tmp_path / "base"), CPU, torch.float32, settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.from_numpy(rng.normal(size=parameter.shape)).float()
    TreeLearner(model, recipe(learning_rate=1e-3)).save_pretrained(tmp_path / "adapter")
    ids = torch.from_numpy(rng.integers(0, 17, (2, 9)))
    for lora in (settings, None):
        again = load_model(str(tmp_path / "adapter"), CPU, torch.float32, lora)
        torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-3)


def test_a_merge_that_gives_another_model_is_an_error(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    saved_adapter(base, tmp_path, rng)
    monkeypatch.setattr("peft.tuners.lora.Linear.get_delta_weight", lambda *_: torch.tensor(0.01))
    with pytest.raises(UserError, match=r"merging the adapter in .* into .* changes the model: its logits of 12 tok"):
        load_model(str(tmp_path), CPU, torch.float32)


@pytest.mark.parametrize("lora", [None, SETTINGS])
def test_weights_that_are_saved_wrongly_are_an_error_at_the_first_save(
    base: Path, lora: LoraSettings | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(base), CPU, torch.float32, lora)
    learner = TreeLearner(model, recipe(learning_rate=1e-3))
    save, kind = model.save_pretrained, "model" if lora is None else "adapter"

    def altered(folder: Path, **options: object) -> None:
        save(folder, **options)
        file = folder / ("model.safetensors" if lora is None else "adapter_model.safetensors")
        tensors = load_file(file)
        changed = sorted(tensors)[-1]
        save_file(tensors | {changed: tensors[changed] + 1e-3}, file, metadata={"format": "pt"})

    with monkeypatch.context() as patch:
        patch.setattr(model, "save_pretrained", altered)
        with pytest.raises(UserError, match=rf"the saved {kind} differs from the trained LlamaFor.*1 differences"):
            learner.save_pretrained(tmp_path / "altered")
    learner.save_pretrained(tmp_path / "same")


@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        (LoraSettings(rank=4, alpha=12.0), r"rank 4, alpha 12 and 7 target modules"),
        (LoraSettings(rank=3, alpha=6.5), r"rank 3, alpha 6.5 and 7 target modules"),
        (
            LoraSettings(rank=3, alpha=12.0, target_modules=("q_proj",)),
            r"rank 3, alpha 12 and 1 target modules \(q_proj\)",
        ),
    ],
)
def test_an_adapter_with_other_settings_is_not_continued(
    base: Path, tmp_path: Path, settings: LoraSettings, ours: str, rng: np.random.Generator
) -> None:
    saved_adapter(base, tmp_path, rng)
    with pytest.raises(UserError, match=rf"has rank 3, alpha 12 and 7 target modules .* has {ours}.*lora.rank: 0"):
        load_model(str(tmp_path), CPU, torch.float32, settings)


def test_adapters_that_cannot_be_loaded_are_named(base: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    saved_adapter(base, tmp_path, rng)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())

    def refused(changes: dict, message: str, lora: LoraSettings | None = SETTINGS) -> None:
        file.write_text(json.dumps(config | changes))
        with pytest.raises(UserError, match=message) as refusal:
            load_model(str(tmp_path), CPU, torch.float32, lora)
        assert "\n" not in str(refusal.value)

    refused({"base_model_name_or_path": "/gone"}, "base model of the adapter .* was not found: model folder /gone does")
    refused(
        {"use_dora": True}, r"not a plain LoRA adapter \(use_dora\) and its training cannot continue; set lora.rank: 0"
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"damaged")
    refused({}, "cannot be read")
    refused({}, "cannot be read", None)
    (tmp_path / "adapter_model.safetensors").unlink()
    refused({}, "cannot be read")


LAYER = "base_model.model.model.layers.0.self_attn"
Altered = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def renamed(old: str, new: str) -> Altered:
    return lambda weights: {name.replace(old, new): weight for name, weight in weights.items()}


@each_row(
    ("altered", "problem"),
    [
        (renamed("model.model.layers", "model.transformer.h"), "no layer for 14 weights (transformer.h.0.mlp.down_pro"),
        (renamed("layers.0", "layers.3"), "no layer for 14 weights (model.layers.3.mlp.down_proj.lora_A.weight, ...)"),
        (renamed("lora_B", "lora_C"), "no layer for 7 weights (model.layers.0.mlp.down_proj.lora_C.weight, ...), and "),
        (lambda _: {}, "no weights for 14 weights (model.layers.0.mlp.down_proj.lora_A.weight, ...); set base_mo"),
        (
            lambda weights: {n: w for n, w in weights.items() if n != f"{LAYER}.q_proj.lora_B.weight"},
            "no weights for model.layers.0.self_attn.q_proj.lora_B.weight; set base_model_name_or_path",
        ),
        (
            lambda weights: weights | {f"{LAYER}.q_norm.lora_A.weight": torch.ones(3, 16)},
            "no layer for model.layers.0.self_attn.q_norm.lora_A.weight; set base_model_name_or_path",
        ),
        (
            lambda weights: weights | {f"{LAYER}.q_proj.lora_A.weight": torch.ones(3, 15)},
            "layers.0.self_attn.q_proj.lora_A.default.weight: copying a param with shape torch.Size([3, 15])",
        ),
    ],
)  # fmt: skip
def test_weights_of_an_adapter_without_a_layer_and_layers_without_weights_are_named(
    altered: Altered, problem: str, base: Path, adapter: Path, adapted: list[nn.Module]
) -> None:
    _, saved = read_adapter(adapter)
    for model in adapted:
        with pytest.raises(UserError) as refusal:
            put_adapter(model, adapter, altered(saved))
        assert str(refusal.value).startswith(f"the adapter in {adapter} does not fit its base {base}: ")
        assert problem in str(refusal.value)


@pytest.mark.parametrize("lora", [None, SETTINGS])
def test_an_adapter_of_a_different_base_is_neither_merged_nor_trained(
    lora: LoraSettings | None, adapter: Path, tmp_path: Path
) -> None:
    """It was ignored in silence before, or ended in a KeyError."""
    copy_with(renamed("model.model", "model.decoder"), adapter, tmp_path / "copy")
    with pytest.raises(UserError, match=r"does not fit its base .*: no layer for 14 weights .*, and no weights for 14"):
        load_model(str(tmp_path / "copy"), CPU, torch.float32, lora)


def copy_with(altered: Altered, adapter: Path, folder: Path) -> None:
    shutil.copytree(adapter, folder)
    weights = {name: weight.clone() for name, weight in altered(load_file(adapter / FILE)).items()}
    save_file(weights, folder / FILE, metadata={"format": "pt"})


@each_row(
    "altered",
    [
        renamed(".weight", ".default.weight"),
        renamed(".weight", ".my-adapter.weight"),
        renamed("base_model.model.", ""),
        lambda weights: renamed("lora_A.", "lora_A.x.")(renamed("base_model.model.", "")(weights)),
    ],
)
def test_names_that_other_tools_give_are_read_as_those_of_peft(
    altered: Altered, adapter: Path, adapted: list[nn.Module], tmp_path: Path
) -> None:
    copy = tmp_path / str(len([*tmp_path.iterdir()]))
    copy_with(altered, adapter, copy)
    expected, (_, saved) = load_file(adapter / FILE), read_adapter(copy)
    assert saved.keys() == expected.keys()
    for model, prefix in zip(adapted, ("base_model.model.", ""), strict=True):
        put_adapter(model, copy, saved)
        for name, weight in expected.items():
            place = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
            assert torch.equal(dict(model.named_parameters())[prefix + place], weight)


def test_a_file_with_two_adapters_is_an_error(adapter: Path, tmp_path: Path) -> None:
    both = lambda weights: renamed(".weight", ".a.weight")(weights) | renamed(".weight", ".b.weight")(weights)  # noqa: E731
    copy_with(both, adapter, tmp_path / "two")
    with pytest.raises(UserError, match="several adapters in one file; save only one"):
        read_adapter(tmp_path / "two")


def test_missing_peft_is_named_before_weights_are_read(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("brorl.model.load._load", lambda *_: pytest.fail("read the weights"))
    with pytest.raises(UserError, match=r"LoRA needs the package peft .*; run: pip install 'brorl\[peft\]'"):
        load_model(str(base), CPU, torch.float32, SETTINGS)


def trained_losses(model: PreTrainedModel, settings: TrainConfig) -> list[float]:
    """Sample with the model itself and raise the probability of one token; return its fraction, step by step."""
    engine = NativeEngine(model, 1)
    learner = TreeLearner(model, settings)
    fractions = []
    for step in range(9):
        (tree,) = engine.sample(SampleTask([(3, 4, 5)], 64, SamplingParams(max_new_tokens=3), seed=step))
        wanted = np.array([(np.array(tokens) == 7).mean() for tokens, _ in tree.responses()])
        fractions.append(float((wanted * tree.leaf_count).sum() / tree.num_rollouts))
        group = Group(Prompt("id", "text", (3, 4, 5), "", "domain"), tree, wanted > 0, wanted)
        learn(learner, [group], [wanted - fractions[-1]], seed=0)
        published = dict(learner.weights())
        assert all("lora_" in name for name in published)  # the base is everywhere already
        engine.load_weights(published.items(), version=step + 1)
    return fractions


def test_a_seed_gives_the_same_adapters_again() -> None:
    """What a process has tried on layers of this kind draws no random numbers."""
    lora_module._adapts.cache_clear()

    def adapters() -> list[Tensor]:
        model = small_model("llama", seed=1)
        torch.manual_seed(5)
        add_adapter(model, SETTINGS)
        return [p.detach() for name, p in model.named_parameters() if "lora_A" in name]

    first = adapters()
    assert any(tensor.any() for tensor in first)
    for first_parameter, again in zip(first, adapters(), strict=True):
        assert torch.equal(first_parameter, again)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", mostly_slow(ARCHITECTURES))
def test_a_bfloat16_base_is_sampled_and_trained_through_adapters_alone(architecture: str, tmp_path: Path) -> None:
    """The engine shares the model; the adapters, in float32, take updates that bfloat16 would round away."""
    small_model(architecture, seed=2, dtype=torch.float32).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), CPU, torch.bfloat16, LoraSettings(rank=4), gradient_checkpointing=True)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    dtypes = {p.requires_grad: p.dtype for p in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    fractions = trained_losses(model, recipe(learning_rate=3e-2, old_logprobs="recompute"))
    assert max(fractions) > fractions[0] + 0.2
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def test_adapters_are_planned_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    expected = adapter_shapes(model, SETTINGS)
    monkeypatch.setitem(sys.modules, "peft", None)
    assert adapter_shapes(model, SETTINGS) == expected
    with pytest.raises(UserError, match="needs the package peft"):
        add_adapter(model, SETTINGS)
