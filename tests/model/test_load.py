"""Loading models and tokenizers: what was saved comes back, without dropout, and what is missing is said plainly."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from brorl.errors import UserError
from brorl.model.load import choose_device, end_tokens, load_model, load_tokenizer
from small_models import small_model

CPU = torch.device("cpu")
VOCABULARY = {"<end>": 0, "a": 1, "b": 2, "<other>": 3}


def save_tokenizer(folder: Path, eos_token: str | None) -> None:
    backend = Tokenizer(WordLevel(VOCABULARY, unk_token="<other>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos_token, unk_token="<other>").save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = small_model("qwen3", seed=3, attention_dropout=0.5, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, "<end>")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_saved_model_comes_back_in_the_dtype_asked_for(folder: Path, dtype: torch.dtype) -> None:
    saved = small_model("qwen3", seed=3, dtype=torch.float32)
    loaded = load_model(str(folder), CPU, dtype)
    for (name, a), b in zip(loaded.named_parameters(), saved.parameters(), strict=True):
        assert a.dtype == dtype, name
        assert torch.equal(a, b.to(dtype)), name


@pytest.mark.parametrize(
    ("name", "config", "settings"),
    [
        ("Qwen3ForCausalLM", "Qwen3Config", {"attention_dropout": 0.5, "head_dim": 8, "num_key_value_heads": 2}),
        ("GPT2LMHeadModel", "GPT2Config", {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("OPTForCausalLM", "OPTConfig", {"dropout": 0.5, "attention_dropout": 0.5, "word_embed_proj_dim": 32}),
        ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"attention_dropout": 0.5, "hidden_dropout": 0.5}),
        ("BloomForCausalLM", "BloomConfig", {"attention_dropout": 0.5, "hidden_dropout": 0.5}),
    ],
)
def test_dropout_is_off_in_training_mode(
    name: str, config: str, settings: dict, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Ratios of new to old log-probs must not contain dropout: in training mode the logits are those of eval mode."""
    sizes = {"vocab_size": 17, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    getattr(transformers, name)(getattr(transformers, config)(**sizes, **ids, **settings)).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), CPU, torch.float32)
    tokens = torch.from_numpy(rng.integers(0, 17, (2, 9)))
    with torch.no_grad():
        expected = model.eval()(input_ids=tokens).logits
        torch.testing.assert_close(model.train()(input_ids=tokens).logits, expected)


def test_the_shipped_model_loads_with_its_tokenizer() -> None:
    model, tokenizer = load_model("quickstart", CPU, torch.float32), load_tokenizer("quickstart")
    assert model.config.vocab_size >= len(tokenizer)
    text = "(3 + 5) * 2"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True).replace(" ", "") == text.replace(" ", "")
    assert tokenizer.eos_token_id in end_tokens(model, tokenizer)


@pytest.mark.parametrize(
    ("configured", "expected"), [(None, (0,)), (0, (0,)), (2, (0, 2)), ([3, 1], (0, 1, 3)), ([0], (0,))]
)
def test_end_tokens_are_those_of_tokenizer_and_generation_config(
    folder: Path, configured: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    model = small_model()
    model.generation_config.eos_token_id = configured
    assert end_tokens(model, load_tokenizer(str(folder))) == expected


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, None)
    small_model().config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no end-of-sequence token.*set eos_token in its tokenizer_config.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("load", [lambda name: load_model(name, CPU, torch.float32), load_tokenizer])
def test_folders_that_cannot_be_loaded_are_named(load: object, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(UserError, match=rf"model folder {missing} does not exist; set model to"):
        load(missing)
    with pytest.raises(UserError, match=r"has no config.json; it must be a Hugging Face model folder"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(UserError, match=f"could not load the (model|tokenizer) of '{tmp_path}'"):
        load(str(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    small_model().config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="could not load the model"):
        load_model(str(tmp_path), CPU, torch.float32)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match=r"cuda:1 was asked for.*set device: cpu"):
        choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda", 1)
