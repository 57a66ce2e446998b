"""Builds a workload: a model folder, its prompts, and the numbers that describe both.

In: a name, and a checkpoint folder for the trained models. Out: a folder that every peer loads. It
runs as a separate process (`python build_workload.py '{...}'`), to keep the scheduler small.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.modeling_utils import PreTrainedModel
from workload import Workload

PROMPT_TOKENS = 64
LOW_ENTROPY_NATS = 0.14
CALIBRATION_PROMPTS = 4  # the same for all quantities: one model per setting
CALIBRATION_TOKENS = 64


@dataclass(frozen=True)
class Spec:
    """The workload to build.

    Attributes:
        setting: `full`, `low`, `big-full`, `big-low`, `shipped` or `trained`.
        folder: Empty folder for the result.
        num_prompts: Prompts to choose, one per turn.
        response_tokens: Length of the random models' responses.
        model: Checkpoint folder, for `shipped` and `trained`.
        recipe: Built-in name or file of the recipe whose puzzles are the prompts of the trained models.
        balanced: Whether to take only puzzles with 1/8 to 7/8 of the trial responses correct.
        seed: Seed of weights, prompts and trial samples.
    """

    setting: str
    folder: str
    num_prompts: int
    response_tokens: int
    model: str | None = None
    recipe: str = "quickstart"
    balanced: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Task:
    """The prompts and their reward; `Workload` documents the fields."""

    domain: str
    prompts: list[dict[str, Any]]
    max_new_tokens: int
    fixed_length: bool


@dataclass(frozen=True)
class Trial:
    """Sampled responses and the entropy of their tokens.

    Attributes:
        response_ids: Tokens up to the end token, per prompt and rollout.
        entropy_nats: Mean entropy of all sampled tokens.
    """

    response_ids: list[list[list[int]]]
    entropy_nats: float


def build(spec: Spec) -> Workload:
    """Make and write the model folder and the prompts, and print a summary."""
    torch.manual_seed(spec.seed)
    workload = _of_checkpoint(spec) if spec.model else _of_random_model(spec)
    workload.write()
    parameters = workload.layer_parameters + workload.head_parameters
    print(
        f"workload {workload.name}: {parameters:,} matmul parameters, entropy {workload.entropy_nats:.3f} nats/token "
        f"(head scale {workload.head_scale:.4g}), "
        f"{len(workload.prompts)} prompts of {len(workload.prompts[0]['token_ids'])} tokens, "
        f"responses of at most {workload.max_new_tokens}",
        file=sys.stderr,
    )
    return workload


def _of_random_model(spec: Spec) -> Workload:
    """Make a random model; its end token is outside of the vocabulary, so no response ends early."""
    big = spec.setting.startswith("big-")
    model = _random_llama(big, PROMPT_TOKENS + spec.response_tokens)
    vocab_size = model.config.vocab_size
    tokenizer = _word_tokenizer(vocab_size)
    num_prompts = max(spec.num_prompts, CALIBRATION_PROMPTS)
    prompts = [_random_prompt(i, vocab_size, spec.seed) for i in range(num_prompts)]
    token_ids = [prompt["token_ids"] for prompt in prompts[:CALIBRATION_PROMPTS]]
    rollouts = 4 if big else 32
    scale = 1.0
    if spec.setting.endswith("low"):
        scale = _scale_for(model, token_ids, vocab_size, LOW_ENTROPY_NATS, rollouts)
    trial = _sample(model, token_ids, rollouts, CALIBRATION_TOKENS, vocab_size)
    task = Task("parity", prompts, spec.response_tokens, fixed_length=True)
    return _write_model(spec, model, tokenizer, task, trial, scale)


def _random_llama(big: bool, max_tokens: int) -> PreTrainedModel:
    vocab_size = 8192 if big else 256
    config = LlamaConfig(
        hidden_size=512 if big else 128,
        num_hidden_layers=8 if big else 4,
        num_attention_heads=8 if big else 4,
        num_key_value_heads=4 if big else 2,
        intermediate_size=1376 if big else 344,
        max_position_embeddings=max(2048, max_tokens),
        vocab_size=vocab_size,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=vocab_size,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one word per token id; the end token comes last."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {f"t{i}": i for i in range(vocab_size)} | {"<eos>": vocab_size}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", padding_side="left"
    )


def _random_prompt(number: int, vocab_size: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * seed + number)
    ids = torch.randint(vocab_size, (PROMPT_TOKENS,), generator=generator).tolist()
    text = " ".join(f"t{i}" for i in ids)
    return {"id": f"random-{number}", "text": text, "token_ids": ids, "reference": ""}


def _scale_for(
    model: PreTrainedModel,
    prompts: list[list[int]],
    eos_token_id: int,
    target_nats: float,
    rollouts: int,
) -> float:
    """Scale the head in place until sampled tokens have the given entropy; return the factor."""
    head = model.get_output_embeddings().weight.data

    def measure() -> float:
        return _sample(model, prompts, rollouts, CALIBRATION_TOKENS, eos_token_id).entropy_nats

    return scale_to_entropy(head, measure, target_nats)


def scale_to_entropy(weight: Tensor, measure: Callable[[], float], target_nats: float) -> float:
    """Scale a weight in place until sampled tokens have the given entropy; return the factor.

    Bisection on the logarithm of the factor, between 1 (near uniform) and 10,000 (near greedy).

    Args:
        weight: The weight that scales the logits.
        measure: Returns the entropy of sampled tokens in nats.
        target_nats: The entropy.
    """
    original = weight.clone()
    low, high = 0.0, math.log(1e4)
    for _ in range(14):
        middle = (low + high) / 2
        weight.copy_(original * math.exp(middle))
        entropy = measure()
        print(f"  head scale {math.exp(middle):.4g}: {entropy:.4f} nats/token", file=sys.stderr)
        if abs(entropy - target_nats) < 0.03 * target_nats:
            break
        low, high = (middle, high) if entropy > target_nats else (low, middle)
    return math.exp(middle)


@torch.no_grad()
def _sample(
    model: PreTrainedModel,
    prompts: list[list[int]],
    rollouts: int,
    max_new_tokens: int,
    eos_token_id: int,
    seed: int = 0,
) -> Trial:
    """Sample every prompt with transformers, and measure the entropy in a forward pass."""
    torch.manual_seed(seed)
    responses: list[list[list[int]]] = []
    total, count = 0.0, 0
    for prompt in prompts:
        ids = torch.tensor([prompt]).expand(rollouts, -1)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            pad_token_id=0,
        )
        sampled = output[:, len(prompt) :]
        ended = (sampled == eos_token_id).long().cumsum(1)
        valid = (ended == 0) | ((sampled == eos_token_id) & (ended == 1))
        logprobs = model(output).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        total += float(entropy[valid].sum())
        count += int(valid.sum())
        responses.append([row[keep].tolist() for row, keep in zip(sampled, valid, strict=True)])
    return Trial(responses, total / count)


def _of_checkpoint(spec: Spec) -> Workload:
    """Use a trained model with the training puzzles of its recipe."""
    assert spec.model is not None
    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(spec.model)
    max_new_tokens, prompts = _puzzles(tokenizer, spec)
    eos = int(tokenizer.eos_token_id)
    if spec.balanced:
        prompts = _balanced(model, tokenizer, prompts, max_new_tokens, spec.num_prompts)
    prompts = prompts[: spec.num_prompts]
    trial = _sample(model, [p["token_ids"] for p in prompts], 64, max_new_tokens, eos)
    rows = zip(prompts, trial.response_ids, strict=True)
    fractions = [_accuracy(tokenizer, prompt, responses, eos) for prompt, responses in rows]
    listed = ", ".join(f"{fraction:.2f}" for fraction in fractions[:32])
    print(f"  share correct on the (first) prompts: {listed}", file=sys.stderr)
    task = Task("countdown", prompts, max_new_tokens, fixed_length=False)
    return _write_model(spec, model, tokenizer, task, trial, head_scale=1.0)


def _puzzles(tokenizer: Any, spec: Spec) -> tuple[int, list[dict[str, Any]]]:
    """Return the response limit of a recipe and its first training prompts."""
    from brorl.config.reading import make_config, read_recipe
    from brorl.prompts.countdown import countdown_puzzles, countdown_questions, split_countdown
    from brorl.prompts.rendering import render
    from brorl.prompts.settings import PromptFormat
    from brorl.prompts.stream import PromptStream

    config = make_config(read_recipe(spec.recipe), {}, spec.recipe)
    (puzzle,) = config.data.sources
    targets = range(puzzle.min_target, puzzle.max_target + 1)
    puzzles = countdown_puzzles(puzzle.num_numbers, puzzle.max_number, targets)
    train = split_countdown(puzzles, config.data.held_out_fraction, config.data.split_seed).train
    prompts = render(countdown_questions(train), PromptFormat(chat="never"), tokenizer)
    taken = PromptStream(prompts, spec.seed).take(min(len(prompts), 16 * spec.num_prompts))
    fields = ("id", "text", "token_ids", "reference")
    entries = [{name: getattr(prompt, name) for name in fields} for prompt in taken]
    entries = [entry | {"token_ids": list(entry["token_ids"])} for entry in entries]
    return config.sampling.max_new_tokens, entries


def _balanced(
    model: PreTrainedModel,
    tokenizer: Any,
    candidates: list[dict[str, Any]],
    max_new_tokens: int,
    num_prompts: int,
) -> list[dict[str, Any]]:
    """Keep the first prompts with between 1/8 and 7/8 of 64 responses correct.

    Groups with nearly equal outcomes share more prefixes. If too few prompts are in this range, the prompts closest to
    one half are added.
    """
    eos = int(tokenizer.eos_token_id)
    kept: list[tuple[float, dict[str, Any]]] = []
    others: list[tuple[float, dict[str, Any]]] = []
    for candidate in candidates:
        trial = _sample(model, [candidate["token_ids"]], 64, max_new_tokens, eos, seed=1)
        fraction = _accuracy(tokenizer, candidate, trial.response_ids[0], eos)
        (kept if 1 / 8 <= fraction <= 7 / 8 else others).append((fraction, candidate))
        if len(kept) == num_prompts:
            break
    others.sort(key=lambda entry: abs(entry[0] - 0.5))
    kept += others[: num_prompts - len(kept)]
    return [prompt for _, prompt in kept]


def _accuracy(
    tokenizer: Any,
    entry: dict[str, Any],
    responses: list[list[int]],
    eos: int,
) -> float:
    from brorl.prompts.prompt import Prompt
    from brorl.verification.domains.countdown import CountdownVerifier

    verifier = CountdownVerifier()
    prompt = Prompt(**(entry | {"token_ids": tuple(entry["token_ids"]), "domain": "countdown"}))
    texts = [tokenizer.decode(r, skip_special_tokens=True) for r in responses if r[-1] == eos]
    return sum(verifier.verify(prompt, text).correct for text in texts) / len(responses)


def _write_model(
    spec: Spec,
    model: PreTrainedModel,
    tokenizer: Any,
    task: Task,
    trial: Trial,
    head_scale: float,
) -> Workload:
    eos_token_id = int(tokenizer.eos_token_id)
    model.generation_config.eos_token_id = eos_token_id
    model_dir = Path(spec.folder) / "model"
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = model.get_decoder().layers
    return Workload(
        setting=spec.setting,
        folder=spec.folder,
        domain=task.domain,
        prompts=task.prompts,
        max_new_tokens=task.max_new_tokens,
        eos_token_id=eos_token_id,
        fixed_length=task.fixed_length,
        entropy_nats=trial.entropy_nats,
        head_scale=head_scale,
        num_layers=config.num_hidden_layers,
        query_width=config.num_attention_heads * head_dim,
        layer_parameters=sum(p.numel() for p in layers.parameters() if p.dim() == 2),
        head_parameters=model.get_output_embeddings().weight.numel(),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    build(Spec(**json.loads(sys.argv[1])))
