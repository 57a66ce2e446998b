"""The vLLM engine with vLLM on the CPU: against the native engine, the learner's log-probs and enumeration."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from pyarrow import parquet
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, PreTrainedModel

from brorl.errors import EngineLostError, UserError
from brorl.model.logprobs import NextToken
from brorl.model.lora import add_adapter
from brorl.model.settings import LoraSettings
from brorl.model.source import find_model
from brorl.model.tree_path import tree_logprobs
from brorl.rollout.engine import SampleTask, prompt_seed
from brorl.rollout.native_engine import NativeEngine
from brorl.rollout.vllm_engine import VllmEngine
from brorl.rollout.vllm_process import Request, VllmProcess, VllmSetup
from brorl.sampling import SamplingParams, StopStrings
from brorl.tree import RolloutTree
from run_support import command
from small_models import small_model, wide_heads
from small_tokenizers import TOKENIZERS
from tree_invariants import check_tree
from turn_checks import assert_transcripts_follow_the_model

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # importing vLLM warns

VOCABULARY, STOP, CONTEXT = 17, 0, 64
LOGPROB_BOUND = 1e-4  # nats; float32
RATIO_BOUND = 1e-3
FALSE_ALARM = 1e-6


class Pair:
    """A model, and vLLM with its weights."""

    def __init__(self, model: PreTrainedModel, folder: Path, separate: bool) -> None:
        model.save_pretrained(folder)
        self.model, self.version = model, 0
        settings = VllmSetup(
            str(folder), "float32", CONTEXT, 64 << 20, max_rows=64, responses_per_request=40, separate=separate
        )
        self.process: VllmProcess | None = None

        def start(given: VllmSetup) -> VllmProcess:
            self.process = VllmProcess(given)
            return self.process

        self.engine = VllmEngine(settings, (STOP,), start=start)
        self.native = NativeEngine(model, STOP)

    def update(self, rng: np.random.Generator) -> None:
        """Give both new random weights."""
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        with torch.no_grad():
            for parameter in self.model.parameters():
                center = 1.0 if parameter.dim() == 1 else 0.0
                parameter.copy_(center + 0.3 * torch.randn(parameter.shape, generator=generator))
        self.publish()

    def publish(self) -> None:
        self.version += 1
        self.engine.load_weights(self.model.named_parameters(), self.version)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Llama in a separate process, and Qwen3 with tied embeddings in this one."""
    shape = {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    separate = request.param == "llama"
    model = small_model(request.param, dtype=torch.float32, tie_word_embeddings=not separate, **shape)
    made = Pair(model, tmp_path_factory.mktemp(request.param), separate)
    yield made
    made.engine.close()


def prompts_of(rng: np.random.Generator, number: int = 3, longest: int = 45) -> list[list[int]]:
    """Random prompts; some are longer than a block of vLLM's cache (32 tokens)."""
    return [rng.integers(1, VOCABULARY, rng.integers(1, longest)).tolist() for _ in range(number)]


def assert_same_greedy(model: PreTrainedModel, got: RolloutTree, expected: RolloutTree) -> None:
    """The responses are equal, up to a token whose two best logits differ by rounding alone."""
    (mine, _), (reference, _) = got.responses()[0], expected.responses()[0]
    if mine == reference:
        return
    same = next(i for i, (a, b) in enumerate(zip(mine, reference, strict=False)) if a != b)
    context = torch.tensor([[*got.prompt_ids, *mine[:same]]])
    best = model(context, use_cache=False).logits[0, -1].topk(2).values
    assert best[0] - best[1] < LOGPROB_BOUND


def test_greedy_equals_the_native_engine_also_after_updates(pair: Pair, rng: np.random.Generator) -> None:
    """A prompt of more than one block is asked again after each update: its old keys and values must not be used."""
    greedy = SamplingParams(temperature=0.0, max_new_tokens=12)
    prompts = [*prompts_of(rng), rng.integers(1, VOCABULARY, 45).tolist()]
    responses = []
    for _ in range(3):
        pair.update(rng)
        got = pair.engine.sample(SampleTask(prompts, 2, greedy, seed=0))
        for tree, expected in zip(got, pair.native.sample(SampleTask(prompts, 2, greedy, seed=0)), strict=True):
            assert_same_greedy(pair.model, tree, expected)
            assert tree.num_rollouts == 2
            assert np.abs(tree.logprob - tree_logprobs(pair.model, [tree])[0].detach().numpy()).max() < LOGPROB_BOUND
        responses.append([tree.responses() for tree in got])
    assert responses[0] != responses[1] != responses[2]  # the updates were seen
    assert pair.engine.version == pair.version


def test_responses_of_several_turns_follow_the_model(pair: Pair, rng: np.random.Generator) -> None:
    pair.update(rng)
    sampling = SamplingParams(2.0, max_new_tokens=2, stop_token_ids=tuple(range(9, VOCABULARY)))
    prompts = [tuple(prompt) for prompt in prompts_of(rng, number=2, longest=6)]
    seed, calling = int(rng.integers(2**60)), range(1, 9)
    assert_transcripts_follow_the_model(
        pair.engine, pair.model, prompts, sampling, 2000, seed, LOGPROB_BOUND, max_turns=2, calling=calling
    )


def test_a_request_under_way_at_an_update_continues_with_the_new_weights(pair: Pair, rng: np.random.Generator) -> None:
    if pair.engine._setup.separate:
        pytest.skip("needs an engine whose steps can be counted")
    assert pair.process is not None
    pair.update(rng)
    engine, prompt = pair.process._llm.llm_engine, rng.integers(1, VOCABULARY, 40).tolist()
    greedy = pair.process._parameters(Request(tuple(prompt), 1, 0), SamplingParams(0.0, max_new_tokens=12), ())
    engine.add_request("1000000", {"prompt_token_ids": prompt}, greedy)
    for _ in range(4):
        assert not engine.step()
    pair.update(rng)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    tokens = list(outputs[0].outputs[0].token_ids)
    assert len(tokens) == 12
    assert is_greedy(pair.model, prompt, tokens, first=4)  # at most one token for each step before the update


def is_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int], first: int) -> bool:
    """Whether the tokens from `first` on are the most likely ones, up to rounding."""
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((logits.max(1).values - chosen)[first:].max() < LOGPROB_BOUND)


@pytest.mark.parametrize(
    ("temperature", "min_new_tokens", "kept"),
    [
        (1.0, 0, {}),
        (0.6, 0, {}),
        (1.4, 3, {}),
        (1.0, 0, {"top_p": 0.95, "top_k": 5}),
        (1.4, 3, {"top_p": 0.8}),
        (0.8, 0, {"top_k": 3}),
    ],
)
def test_logprobs_are_those_of_the_learner(
    pair: Pair, rng: np.random.Generator, temperature: float, min_new_tokens: int, kept: dict[str, float]
) -> None:
    """A token on the border of the kept ones may be kept by one of the two alone."""
    pair.update(rng)
    sampling = SamplingParams(temperature, max_new_tokens=8, min_new_tokens=min_new_tokens, **kept)  # type: ignore[arg-type]
    prompts, counts = prompts_of(rng), [1, 50, 97]
    trees = pair.engine.sample(SampleTask(prompts, counts, sampling, seed=int(rng.integers(2**63))))
    next_token = NextToken(temperature, min_new_tokens, (STOP,), **kept)  # type: ignore[arg-type]
    for tree, prompt, count, expected in zip(
        trees, prompts, counts, tree_logprobs(pair.model, trees, next_token=next_token), strict=True
    ):
        check_tree(tree)
        assert (tree.prompt_ids, tree.num_rollouts) == (tuple(prompt), count)
        error_M = np.abs(tree.logprob - expected.detach().numpy())
        assert np.mean(error_M > LOGPROB_BOUND) <= (0.01 if kept else 0)
        for (tokens, _), finished in zip(tree.responses(), tree.finished, strict=True):
            assert STOP not in tokens[:-1]
            assert finished == (tokens[-1] == STOP)
            assert len(tokens) > min_new_tokens or tokens[-1] != STOP
            assert finished or len(tokens) == 8


@pytest.mark.parametrize("kept", [{}, {"top_p": 0.9, "top_k": 7}])
def test_samples_have_the_distribution_of_the_model(
    pair: Pair, rng: np.random.Generator, kept: dict[str, float]
) -> None:
    """Chi-square of all responses of at most 2 tokens against enumeration; one false alarm in a million."""
    pair.update(rng)
    (prompt,), temperature, number = prompts_of(rng, 1), 0.8, 3000
    pairs = [(a, b) for a, b in product(range(VOCABULARY), repeat=2) if a != STOP]
    responses: list[tuple[int, ...]] = [(STOP,), *pairs]
    sampling = SamplingParams(temperature, max_new_tokens=2, **kept)  # type: ignore[arg-type]
    first_V = kept_masses(pair.model, prompt, sampling)
    second = {a: kept_masses(pair.model, [*prompt, a], sampling) for a in range(VOCABULARY) if a != STOP}
    expected = number * np.array([first_V[STOP], *(first_V[a] * second[a][b] for a, b in pairs)])
    (tree,) = pair.engine.sample(SampleTask([prompt], number, sampling, seed=int(rng.integers(2**63))))
    counts = dict(tree.responses())
    observed = np.array([counts.get(response, 0) for response in responses])
    assert observed[expected > 0].sum() == number
    common = expected >= 5
    observed, expected = (np.append(x[common], x[~common].sum()) for x in (observed, expected))
    if expected[-1] < 5:  # merge the rare rest into the smallest of the others
        smallest = int(expected[:-1].argmin())
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    assert chisquare(observed, expected * number / expected.sum()).pvalue > FALSE_ALARM


def kept_masses(model: PreTrainedModel, ids: list[int], sampling: SamplingParams) -> np.ndarray:
    """Return the probabilities of the next token, from a loop over the tokens from the most likely one on."""
    with torch.no_grad():
        logits_V = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
    mass_V = (logits_V / sampling.temperature).softmax(0).numpy()
    order = np.argsort(-mass_V)[: sampling.top_k or None]
    kept_V, total = np.zeros_like(mass_V), mass_V[order].sum()
    for token in order:
        if kept_V.sum() < sampling.top_p * total:
            kept_V[token] = mass_V[token]
    return kept_V / kept_V.sum()


def test_draws_depend_on_the_seed_and_the_number_of_the_prompt(pair: Pair, rng: np.random.Generator) -> None:
    """Of 60 rollouts of 6 tokens at most a few may differ: a draw on the border between two tokens."""
    sampling, prompts, seed = SamplingParams(max_new_tokens=6), prompts_of(rng), int(rng.integers(2**63))
    whole = pair.engine.sample(SampleTask(prompts, 60, sampling, seed))
    seeds = [prompt_seed(seed, number) for number in range(len(prompts))]
    parts = [
        tree
        for part in (slice(1), slice(1, None))
        for tree in pair.engine.sample(SampleTask(prompts[part], 60, sampling, seeds[part]))
    ]
    other = pair.engine.sample(SampleTask(prompts, 60, sampling, seed + 1))
    for one, part, differs in zip(whole, parts, other, strict=True):
        assert shared(one, part) >= 55
        assert shared(one, differs) < 55


def shared(one: RolloutTree, other: RolloutTree) -> int:
    """Return the number of rollouts that two trees have in common."""
    counts = dict(other.responses())
    return sum(min(count, counts.get(tokens, 0)) for tokens, count in one.responses())


def kill_engines() -> None:
    for child in psutil.Process().children(recursive=True):
        if "EngineCor" in child.name() and child.status() != psutil.STATUS_ZOMBIE:  # Linux cuts names
            os.kill(child.pid, signal.SIGKILL)


@pytest.mark.parametrize("at", ["sampling", "update"])
def test_an_engine_that_dies_is_an_error(at: str, tmp_path: Path) -> None:
    """Without `_watch` vLLM would wait for the answer forever."""
    shape = {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = small_model("llama", dtype=torch.float32, **shape)
    model.save_pretrained(tmp_path)
    engine = VllmEngine(VllmSetup(str(tmp_path), "float32", CONTEXT, 64 << 20, max_rows=8), (STOP,))
    try:
        kill_engines()
        work = {
            "sampling": partial(engine.sample, SampleTask([[3, 4]], 2, SamplingParams(max_new_tokens=8), seed=0)),
            "update": partial(engine.load_weights, model.named_parameters(), 1),
        }
        with pytest.raises(EngineLostError, match="the vLLM process died"):
            work[at]()
    finally:
        engine.close()


OWNER = """
import psutil, time
from brorl.rollout.vllm_process import VllmProcess, VllmSetup

if __name__ == "__main__":
    engine = VllmProcess(VllmSetup({folder!r}, "float32", 64, 64 << 20, max_rows=8, responses_per_request=8))
    print("processes", *[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    time.sleep(600)
"""


def test_no_process_of_an_engine_outlives_its_killed_owner(tmp_path: Path) -> None:
    shape = {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    small_model("llama", dtype=torch.float32, **shape).save_pretrained(tmp_path / "model")
    (tmp_path / "owner.py").write_text(OWNER.format(folder=str(tmp_path / "model")))
    with subprocess.Popen([sys.executable, tmp_path / "owner.py"], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        line = next(line for line in owner.stdout if line.startswith("processes"))
        children = [psutil.Process(int(number)) for number in line.split()[1:]]
        owner.kill()
    assert children
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


@pytest.mark.parametrize("separate", [False, True])
def test_adapters_are_followed_from_update_to_update(separate: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    """Log-probs against the learner's with adapters, and against weights that are merged by hand, all in float32.

    The same long prompt is asked after each update.
    """
    shape = {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    lora = LoraSettings(rank=5, alpha=7.0)
    if separate:  # a rank that vLLM has memory for, and few layers
        lora = LoraSettings(rank=16, alpha=20.0, target_modules=("q_proj", "down_proj"))
    model = small_model(
        "llama" if separate else "qwen3", dtype=torch.float32, tie_word_embeddings=not separate, **shape
    )
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    add_adapter(model, lora)
    settings = VllmSetup(str(tmp_path), "float32", CONTEXT, 64 << 20, max_rows=64, separate=separate, lora=lora)
    engine = VllmEngine(settings, (STOP,))
    prompts, merged = [*prompts_of(rng, 2), rng.integers(1, VOCABULARY, 45).tolist()], copy.deepcopy(plain)
    try:
        for number in range(1, 4):
            generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.requires_grad:
                        assert "lora_" in name
                        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
                for name, layer in model.named_modules():
                    if hasattr(layer, "lora_A"):
                        change = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
                        weight = merged.get_submodule(name).weight
                        weight.copy_(plain.get_submodule(name).weight + lora.alpha / lora.rank * change)
            engine.load_weights(model.named_parameters(), number)
            trees = engine.sample(
                SampleTask(prompts, 40, SamplingParams(max_new_tokens=8), seed=int(rng.integers(2**60)))
            )
            references = [tree_logprobs(one, trees) for one in (model, merged, plain)]
            errors = [
                max(np.abs(tree.logprob - mine.detach().numpy()).max() for tree, mine in zip(trees, one, strict=True))
                for one in references
            ]
            assert max(errors[:2]) < LOGPROB_BOUND
            assert errors[2] > 100 * LOGPROB_BOUND  # the base alone
            assert engine.version == number
        if not separate:  # layers that vLLM does not have
            renamed = [(name.replace("q_proj", "other"), tensor) for name, tensor in model.named_parameters()]
            with pytest.raises(UserError, match=r"cannot use the adapters: .*set engine\.kind: native"):
                engine.load_weights(renamed, 4)
    finally:
        engine.close()


def save_wide_quickstart(folder: Path) -> None:
    """Save the shipped model, with heads of the size that vLLM has on a CPU: the same function of the tokens."""
    shipped = Path(find_model("quickstart").path)
    model = AutoModelForCausalLM.from_pretrained(shipped)
    wide = wide_heads(model)
    tokens = torch.randint(3, 23, (2, 20))
    assert (wide(tokens).logits - model(tokens).logits).abs().max() < 1e-4
    wide.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped / name, folder / name)


def test_a_run_of_adapters_resumes_and_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy evaluations of the base and of the adapters, with vLLM and with the native engine, which merges them."""
    monkeypatch.chdir(tmp_path)
    save_wide_quickstart(tmp_path / "model")
    vllm = ("--engine.kind=vllm", "--engine.memory_gib=0.25", "--engine.threads=1")
    done = command(
        *("train", "--model=model", "--output_dir=run", "--steps=2", "--report=false", *vllm),
        *("--rollouts_per_prompt=32", "--prompts_per_step=8", "--evaluation.num_prompts=0"),
        *("--lora.rank=8", "--optimizer.learning_rate=0.003", "--optimizer.mini_batches=2"),
    )
    assert done.code == 0, done.said
    done = command("resume", "run", "--steps=3", "--report=false")
    assert done.code == 0, done.said
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [record["update"] for record in records if record["step"]]
    assert len(updates) == 3
    for update in updates:  # the third is sampled by an engine that got the adapters of the checkpoint
        assert abs(update["mismatch_mean"] - 1) < RATIO_BOUND
        assert abs(update["mismatch_max"] - 1) < RATIO_BOUND
    responses = {}
    for name, options in (("adapters", vllm), ("merged", ("--engine.threads=1",)), ("base", ("--engine.threads=1",))):
        done = command(
            *("eval", "model" if name == "base" else "run", f"--output-dir={name}", "--data=countdown", *options),
            *("--evaluation.num_prompts=20", "--samples=1", "--temperature=0", "--top-p=1", "--max-new-tokens=16"),
        )
        assert done.code == 0, done.said
        rows = [row for file in tmp_path.glob(f"{name}/responses/*") for row in parquet.read_table(file).to_pylist()]
        responses[name] = sorted((row["prompt_id"], row["token_ids"]) for row in rows)
    same = sum(a == b for a, b in zip(responses["adapters"], responses["merged"], strict=True))
    assert same >= len(responses["merged"]) - 1  # a tie of two logits
    assert responses["adapters"] != responses["base"]


def test_a_training_run_learns(tmp_path: Path) -> None:
    save_wide_quickstart(tmp_path / "model")
    done = command(
        *("train", f"--model={tmp_path / 'model'}", "--engine.kind=vllm", "--engine.memory_gib=0.25"),
        *(f"--output_dir={tmp_path / 'run'}", "--steps=10", "--rollouts_per_prompt=64", "--prompts_per_step=8"),
        *("--evaluation.num_prompts=40", "--evaluation.rollouts_per_prompt=32", "--evaluation.every=10"),
        *("--evaluation.ks=[1, 4]", "--optimizer.mini_batches=2", "--engine.threads=1", "--report=false"),
        *("--sampling.top_p=0.95", "--sampling.top_k=8"),
    )
    assert done.code == 0, done.said
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [record["update"] for record in records if record["step"]]
    assert len(updates) == 10
    assert all("coverage" in record for record in records if record["step"])
    for update in updates:  # the probability of a token under the learner over that under vLLM
        assert abs(update["mismatch_mean"] - 1) < RATIO_BOUND
        assert abs(update["mismatch_max"] - 1) < 0.2  # one of the two alone may keep a token on the border
    before, after = (records[i]["evaluation"]["pass_at"]["1"]["value"] for i in (0, -1))
    assert after > before


def test_stop_strings_end_responses_as_in_the_native_engine(tmp_path: Path, rng: np.random.Generator) -> None:
    """Greedy responses equal the native engine's; all end with the token that completes a stop string, or are cut."""
    tokenizer = TOKENIZERS["byte_level"]()
    shape = {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = small_model("llama", dtype=torch.float32, vocab_size=len(tokenizer), **shape)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    stop = StopStrings(tokenizer, ["\n\n", "Question:", "é", "漢", "a", "n "])
    settings = VllmSetup(str(tmp_path), "float32", CONTEXT, 64 << 20, max_rows=64, separate=False)
    whole = [
        token for token in range(2, len(tokenizer)) if "\N{REPLACEMENT CHARACTER}" not in tokenizer.decode([token])
    ]
    prompts = [rng.choice(whole, 5).tolist() for _ in range(12)]  # vLLM completes the last character of a prompt
    engine = VllmEngine(settings, (STOP,), stop=stop)
    try:
        greedy = SamplingParams(temperature=0.0, max_new_tokens=20)
        expected = NativeEngine(model, STOP, stop=stop).sample(SampleTask(prompts, 1, greedy, seed=0))
        for tree, other in zip(engine.sample(SampleTask(prompts, 1, greedy, seed=0)), expected, strict=True):
            assert_same_greedy(model, tree, other)
            if tree.responses() == other.responses():
                assert tree.finished.tolist() == other.finished.tolist()
        for minimum in (0, 3):
            sampling = SamplingParams(max_new_tokens=20, min_new_tokens=minimum)
            (tree,) = engine.sample(SampleTask(prompts[:1], 200, sampling, seed=int(rng.integers(2**60))))
            for (tokens, _), finished in zip(tree.responses(), tree.finished, strict=True):
                ends = [n for n in range(minimum + 1, len(tokens) + 1) if stop.end_with(tokens[:n])]
                assert ends in ([], [len(tokens)])
                assert finished >= (bool(ends) or tokens[-1] == STOP)
                assert minimum or not finished or ends or tokens[-1] == STOP
            assert tree.finished.mean() > 0.2
    finally:
        engine.close()
