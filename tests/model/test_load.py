"""Loading models and tokenizers: what was saved comes back, without dropout, and what is missing is said plainly."""

import json
import shutil
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from brorl.errors import UserError
from brorl.model import source
from brorl.model.load import check_vocabulary, choose_device, end_tokens, load_model, load_tokenizer
from brorl.model.settings import LoraSettings
from brorl.model.sharding import save_whole
from brorl.model.source import ModelSource, find_model
from error_names import check_names
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


@pytest.mark.slow
def test_the_place_of_the_weights_in_their_file_changes_no_bit(folder: Path) -> None:
    """Matrix products of some processors round by the address of a matrix; a resumed run reads another file."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    found = []
    for shift in range(0, 64, 8):
        save_file(weights, path, {"format": "pt", "shift": "x" * shift})
        model = load_model(str(folder), CPU, torch.float32)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in (*model.parameters(), *model.buffers()))
        with torch.no_grad():
            found.append(model(torch.tensor([[5]])).logits)  # one row: a product of a matrix and a vector
    assert all(torch.equal(logits, found[0]) for logits in found)


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
    """Ratios of new to old log-probs must not contain dropout: both modes have the same logits."""
    sizes = {"vocab_size": 17, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    getattr(transformers, name)(getattr(transformers, config)(**sizes, **ids, **settings)).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), CPU, torch.float32)
    tokens = torch.from_numpy(rng.integers(0, 17, (2, 9)))
    with torch.no_grad():
        expected = model.eval()(input_ids=tokens).logits
        torch.testing.assert_close(model.train()(input_ids=tokens).logits, expected)


@pytest.mark.parametrize("name", ["quickstart", "plateau"])
def test_a_shipped_model_loads_with_its_tokenizer(name: str) -> None:
    model, tokenizer = load_model(name, CPU, torch.float32), load_tokenizer(name)
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
    model, tokenizer = small_model(), load_tokenizer(str(folder))
    model.generation_config.eos_token_id = configured
    assert end_tokens(model, tokenizer) == expected
    model.generation_config.save_pretrained(folder)
    assert end_tokens(str(folder), tokenizer) == expected
    (folder / "generation_config.json").unlink()
    model.config.eos_token_id = configured
    model.config.save_pretrained(folder)
    assert end_tokens(str(folder), tokenizer) == expected


def test_a_tokenizer_without_an_end_token_needs_texts_that_end_a_response(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, None)
    small_model().config.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"has no end-of-sequence token.*set sampling.stop to texts.*tokenizer_config.json"
    ):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer(str(tmp_path), ["b"]).eos_token_id is None
    with_special = load_tokenizer(str(tmp_path), ["b", "<other>"])
    assert with_special.eos_token_id == VOCABULARY["<other>"]
    model = small_model()
    model.generation_config.eos_token_id = None
    assert end_tokens(model, with_special, ["b", "<other>"]) == (VOCABULARY["<other>"],)
    with pytest.raises(UserError, match=r"sampling.stop has '<stop>', which no response of .* can contain"):
        load_tokenizer(str(tmp_path), ["<stop>"])


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match=rf"model folder {folder} has no tokenizer \(tokenizer.json\)"):
        load_tokenizer(str(folder))


def test_weights_that_are_not_used_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_config(folder, num_hidden_layers=1, layer_types=None)
    load_model(str(folder), CPU, torch.float32)
    assert "contains weights that Qwen3ForCausalLM does not use (model.layers.1.input_layernorm.weight" in caplog.text


def test_the_vocabulary_must_fit_the_embedding(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    check_vocabulary("name", LlamaConfig(vocab_size=4), tokenizer)
    with pytest.raises(UserError, match=r"tokenizer of name has token '<other>' with id 3, .* embedding has 3 rows"):
        check_vocabulary("name", LlamaConfig(vocab_size=3), tokenizer)


@pytest.mark.parametrize("load", [lambda name: load_model(name, CPU, torch.float32), load_tokenizer])
def test_folders_that_cannot_be_loaded_are_named(load: Callable[[str], object], tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(UserError, match=rf"model folder {missing} does not exist; set model to"):
        load(missing)
    with pytest.raises(UserError, match=r"has no config.json; it must be a Hugging Face model folder"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("{not json")
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(UserError, match=f"could not load the (config|tokenizer) of '{tmp_path}'"):
        load(str(tmp_path))
    with pytest.raises(UserError, match="is a file; set model to the Hugging Face folder"):
        load(str(tmp_path / "config.json"))


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\), and quantized weights cannot be"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, r"needs its own code \(trust_remote_code"),
        ({"model_type": "qwen99"}, r"model_type 'qwen99', which the installed transformers does not support"),
        ({"model_type": "t5"}, r"is a t5, which is not a causal language model"),
        ({"model_type": "vit"}, r"is a vit, which is not a causal language model"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, r"is a Qwen3ForSequenceClassification, which does not"),
        ({"vocab_size": 64}, r"do not fit its config.json: lm_head.weight has shape \(17, 32\), .* needs \(64, 32\)"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"is missing weights \(model.layers.2"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(folder: Path, changes: dict, message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(UserError, match=message) as refusal:
        load_model(str(folder), CPU, torch.float32)
    assert "\n" not in str(refusal.value)


def test_weights_that_are_missing_or_damaged_are_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content, message in [
        (whole[: len(whole) // 2], "are damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer, not the weights"),
    ]:
        weights.write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_model(str(folder), CPU, torch.float32)
    weights.unlink()
    with pytest.raises(UserError, match=r"has a config but no weights \(model.safetensors\)"):
        load_model(str(folder), CPU, torch.float32)
    model = small_model("qwen3", seed=3, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="10KB")
    shards = sorted(folder.glob("model-0*.safetensors"))
    assert len(shards) > 2
    load_model(str(folder), CPU, torch.float32)
    shards[1].unlink()
    with pytest.raises(UserError, match=rf"is missing 1 of {len(shards)} weight files \({shards[1].name}"):
        load_model(str(folder), CPU, torch.float32)


def test_a_link_and_a_home_folder_are_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checkpoint of adapters names as its base must outlive the link."""
    (folder.parent / "best").symlink_to(folder.name)
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in (str(folder.parent / "best"), "~/best"):
        assert load_model(name, CPU, torch.float32).name_or_path == str(folder)


ANSWERS = {  # of the hub by a part of the path: a status and the kind of its error
    "failing": (503, ""), "gated": (403, "GatedRepo"), "adapter": (404, "EntryNotFound"),
    "/resolve/none/": (404, "RevisionNotFound"), "present": (200, ""), "": (404, "RepoNotFound"),
}  # fmt: skip


class FakeHub(BaseHTTPRequestHandler):
    """Answers as the hub does for files of repositories that are missing, gated, incomplete or there."""

    def do_HEAD(self) -> None:
        status, kind = next(answer for part, answer in ANSWERS.items() if part in self.path)
        self.send_response(status)
        self.send_header(*(("X-Error-Code", kind) if kind else ("ETag", "1")))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    for name, value in (("ENDPOINT", f"http://127.0.0.1:{server.server_port}"), ("HF_HUB_OFFLINE", False)):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    )
    source._is_offline.cache_clear()
    yield server
    source._is_offline.cache_clear()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("me/gated", ("'me/gated'", "gated", "/me/gated", "hf auth login")),
        ("me/missing", ("'me/missing'", "no model")),
        ("me/adapter", ("'me/adapter'", "config.json", "hf download me/adapter")),
        ("me/failing", ("'me/failing'", "HTTP 503")),
        ("me/a name", ("'me/a name'", "hub id")),
        ("me/old@none", ("'me/old'", "revision 'none'")),
    ],
)
@pytest.mark.usefixtures("hub")
def test_models_that_the_hub_does_not_give_are_named(name: str, names: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refusal:
        load_model(name, CPU, torch.float32)
    check_names(refusal.value, *names)


def test_the_hub_is_asked_once_and_without_it_the_downloaded_model_is_used(
    hub: ThreadingHTTPServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not find_model("me/present").local_only
    assert find_model("me/present@brorl").revision == "brorl"
    hub.shutdown()
    assert not find_model("me/present").local_only  # nobody answers any more
    revision = "0" * 40
    repository = tmp_path / "cache" / "models--me--failing"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(revision)
    shutil.copytree(folder, repository / "snapshots" / revision, ignore=shutil.ignore_patterns("cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert find_model("me/failing").local_only
    loaded, expected = (load_model(name, CPU, torch.float32) for name in ("me/failing", str(folder)))
    assert loaded.name_or_path == "me/failing"
    for ours, theirs in zip(loaded.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert load_tokenizer("me/failing").eos_token_id == 0


@pytest.fixture
def downloaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, PreTrainedModel]]:
    """Two revisions of a model in the cache of an offline machine, by the name of the revision."""
    repository = tmp_path / "cache" / "models--nvidia--Nemotron-1.5B"
    models: dict[str, PreTrainedModel] = {}
    for number, name in enumerate(("main", "brorl")):
        commit = str(number) * 40
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(commit)
        snapshot = repository / "snapshots" / commit
        shutil.copytree(folder, snapshot, ignore=shutil.ignore_patterns("cache"))
        models[name] = small_model(seed=number, dtype=torch.float32)
        models[name].save_pretrained(snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    source._is_offline.cache_clear()
    yield models
    source._is_offline.cache_clear()


HUB_ID = "nvidia/Nemotron-1.5B"


@pytest.mark.parametrize(
    ("name", "revision"),
    [(HUB_ID, "main"), (f"{HUB_ID}@main", "main"), (f"{HUB_ID}@brorl", "brorl"), (f"{HUB_ID}@{'1' * 40}", "brorl")],
)
def test_a_revision_of_a_model_is_loaded(name: str, revision: str, downloaded: dict[str, PreTrainedModel]) -> None:
    loaded = load_model(name, CPU, torch.float32)
    assert loaded.name_or_path == HUB_ID
    for ours, theirs in zip(loaded.parameters(), downloaded[revision].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert load_tokenizer(name).eos_token_id == 0
    assert source.commit_of(find_model(name)) == ("0" if revision == "main" else "1") * 40


@pytest.mark.usefixtures("downloaded")
def test_a_revision_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="its revision 'v3' was not downloaded before"):
        find_model(f"{HUB_ID}@v3")


@pytest.mark.usefixtures("downloaded")
def test_a_revision_reaches_every_loader_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for loader in (AutoModelForCausalLM, AutoTokenizer, AutoConfig, GenerationConfig):
        real = loader.from_pretrained

        def recorded(path: str, *args: object, real: Callable = real, **options: object) -> object:
            asked.append((path, options["revision"]))
            return real(path, *args, **options)

        monkeypatch.setattr(loader, "from_pretrained", recorded)
    tokenizer = load_tokenizer(f"{HUB_ID}@brorl")
    load_model(f"{HUB_ID}@brorl", CPU, torch.float32)
    end_tokens(f"{HUB_ID}@brorl", tokenizer)
    assert len(asked) >= 4
    assert {*asked} == {(HUB_ID, "brorl")}


@pytest.mark.slow
def test_an_adapter_names_the_commit_of_its_base(downloaded: dict[str, PreTrainedModel], tmp_path: Path) -> None:
    lora = LoraSettings(rank=2)
    save_whole(load_model(f"{HUB_ID}@brorl", CPU, torch.float32, lora), tmp_path / "adapter", writes=True)
    found = find_model(str(tmp_path / "adapter"))
    assert (found.path, found.revision) == (HUB_ID, "1" * 40)
    merged = load_model(str(tmp_path / "adapter"), CPU, torch.float32)  # a new adapter changes nothing
    for ours, theirs in zip(merged.parameters(), downloaded["brorl"].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_folder_may_have_an_at_sign_in_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "mine" / "model@home", ignore=shutil.ignore_patterns("mine"))
    monkeypatch.chdir(tmp_path)
    for name in ("mine/model@home", str(tmp_path / "mine/model@home")):
        assert find_model(name) == ModelSource(name, str(tmp_path / "mine/model@home"), local_only=True)
    with pytest.raises(UserError, match=r"model folder \./mine/model@work does not exist"):
        find_model("./mine/model@work")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match=r"cuda:1 needs CUDA, .*set device: cpu"):
        choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"cuda:2 needs 3 CUDA devices, but torch finds 2; set device: cuda"):
        choose_device("cuda:2")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_named(value: float, folder: Path, rng: np.random.Generator) -> None:
    weights = load_file(folder / "model.safetensors")
    name = str(rng.choice(sorted(weights)))
    flat = weights[name].view(-1)
    flat[rng.choice(flat.numel(), 2, replace=False)] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"2 of {flat.numel():,} numbers of {name} in the model .* are not finite;"):
        load_model(str(folder), CPU, torch.float32)


def test_models_that_load_in_two_threads_leave_transformers_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thread leaves while the second is inside: without a lock, no model's weights are tied any more."""
    small_model(tie_word_embeddings=True, dtype=torch.float32).save_pretrained(tmp_path)
    tie, initialize = PreTrainedModel.tie_weights, LlamaForCausalLM.__init__
    is_inside, is_left, loaded = [Event(), Event()], Event(), []

    def enter(model: LlamaForCausalLM, *args: Any, **options: Any) -> None:
        number = int(is_inside[0].is_set())
        is_inside[number].set()
        if number:
            is_left.wait(10)
        else:
            is_inside[1].wait(0.1)  # it never comes if there is a lock
        initialize(model, *args, **options)

    def load() -> None:
        loaded.append(load_model(str(tmp_path), CPU, torch.float32))
        is_left.set()

    monkeypatch.setattr(PreTrainedModel, "tie_weights", tie)  # restored if the test fails
    monkeypatch.setattr(LlamaForCausalLM, "__init__", enter)
    threads = [Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
        is_inside[0].wait(10)
    for thread in threads:
        thread.join()
    assert PreTrainedModel.tie_weights is tie
    assert len(loaded) == 2
    assert all(model.lm_head.weight is model.model.embed_tokens.weight for model in loaded)
