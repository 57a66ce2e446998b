"""Builds a workload: a model folder, its prompts, and the numbers that describe both.

In: a setting, and a checkpoint folder for `trained`. Out: a folder that every peer loads. It runs as a separate process
(`python build_workload.py '{...}'`), to keep the scheduler small.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measurement import Workload
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PROMPT_TOKENS = 64
LOW_ENTROPY_NATS = 0.14
CALIBRATION_PROMPTS = 4  # the same for all quantities: one model per setting
CALIBRATION_TOKENS = 64
Prompts = list[dict[str, Any]]


def build(setting: str, folder: str, num_prompts: int, response_tokens: int, model: str | None = None) -> Workload:
    """Make and write the model folder and the prompts; `model` is the checkpoint folder of `trained`."""
    torch.manual_seed(0)
    make = _of_checkpoint if model else _of_random_model
    made, tokenizer, fields = make(model or setting, num_prompts, response_tokens)
    made.generation_config.eos_token_id = int(tokenizer.eos_token_id)
    made.save_pretrained(Path(folder) / "model")
    tokenizer.save_pretrained(Path(folder) / "model")
    workload = workload_of(made, setting, folder=folder, eos_token_id=int(tokenizer.eos_token_id), **fields)
    workload.write()
    return workload


def workload_of(model: PreTrainedModel, setting: str, **fields: Any) -> Workload:
    """Return the workload of a model, with the numbers with which its arithmetic is counted."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Workload(
        setting=setting,
        num_layers=config.num_hidden_layers,
        query_width=config.num_attention_heads * head_dim,
        cache_width=2 * config.num_key_value_heads * head_dim,
        layer_parameters=sum(p.numel() for p in model.get_decoder().layers.parameters() if p.dim() == 2),
        head_parameters=model.get_output_embeddings().weight.numel(),
        **fields,
    )


def _of_random_model(
    setting: str, num_prompts: int, response_tokens: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, dict[str, Any]]:
    """Make a random model; its end token is outside of the vocabulary, so no response ends early."""
    big = setting.startswith("big-")
    model = _random_llama(big, PROMPT_TOKENS + response_tokens)
    vocab_size = model.config.vocab_size
    prompts = [_random_prompt(i, vocab_size) for i in range(max(num_prompts, CALIBRATION_PROMPTS))]
    token_ids = [prompt["token_ids"] for prompt in prompts[:CALIBRATION_PROMPTS]]

    def entropy() -> float:
        return sampled_entropy(model, token_ids, 4 if big else 32, CALIBRATION_TOKENS, vocab_size)

    scale = 1.0
    if setting.endswith("low"):
        scale = scale_to_entropy(model.get_output_embeddings().weight.data, entropy, LOW_ENTROPY_NATS)
    fields = {"domain": "parity", "prompts": prompts, "max_new_tokens": response_tokens, "fixed_length": True}
    return model, _word_tokenizer(vocab_size), fields | {"entropy_nats": entropy(), "head_scale": scale}


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


def _random_prompt(number: int, vocab_size: int) -> dict[str, Any]:
    ids = torch.randint(vocab_size, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(number)).tolist()
    return {"id": f"random-{number}", "text": " ".join(f"t{i}" for i in ids), "token_ids": ids, "reference": ""}


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
def sampled_entropy(
    model: PreTrainedModel, prompts: list[list[int]], rollouts: int, max_new_tokens: int, eos_token_id: int
) -> float:
    """Sample every prompt with transformers, and return the mean entropy of the sampled tokens in a forward pass."""
    torch.manual_seed(0)
    total, count = 0.0, 0
    for prompt in prompts:
        ids = torch.tensor([prompt]).expand(rollouts, -1)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, pad_token_id=0,
        )  # fmt: skip
        sampled = output[:, len(prompt) :]
        ended = (sampled == eos_token_id).long().cumsum(1)
        valid = (ended == 0) | ((sampled == eos_token_id) & (ended == 1))
        logprobs = model(output).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        total += float(-(logprobs.exp() * logprobs).sum(-1)[valid].sum())
        count += int(valid.sum())
    return total / count


def _of_checkpoint(folder: str, num_prompts: int, _: int) -> tuple[PreTrainedModel, Any, dict[str, Any]]:
    """Use a trained model with training puzzles of the recipe quickstart."""
    from brorl.config.reading import make_config, read_recipe
    from brorl.prompts.countdown import countdown_puzzles, countdown_questions, split_countdown
    from brorl.prompts.rendering import render
    from brorl.prompts.settings import PromptFormat
    from brorl.prompts.stream import PromptStream

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = make_config(read_recipe("quickstart"), {}, "quickstart")
    (puzzle,) = config.data.sources
    targets = range(puzzle.min_target, puzzle.max_target + 1)
    puzzles = countdown_puzzles(puzzle.num_numbers, puzzle.max_number, targets)
    train, _ = split_countdown(puzzles, config.data.held_out_fraction, config.data.split_seed)
    prompts = render(countdown_questions(train), PromptFormat(chat="never"), tokenizer)
    entries = [
        {"id": p.id, "text": p.text, "token_ids": list(p.token_ids), "reference": p.reference}
        for p in PromptStream(prompts, 0).take(num_prompts)
    ]
    limit, end = config.sampling.max_new_tokens, int(tokenizer.eos_token_id)
    entropy = sampled_entropy(model, [p["token_ids"] for p in entries], 64, limit, end)
    fields = {"domain": "countdown", "prompts": entries, "max_new_tokens": limit, "fixed_length": False}
    return model, tokenizer, fields | {"entropy_nats": entropy, "head_scale": 1.0}


if __name__ == "__main__":
    torch.set_num_threads(1)
    build(**json.loads(sys.argv[1]))
