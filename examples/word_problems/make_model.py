"""Train a tiny chat model that sometimes solves such word problems: a stand-in for your own model.

    python examples/word_problems/make_model.py runs/word_model            # under a minute on one core
    python examples/word_problems/make_model.py runs/word_model --random   # untrained, in seconds

This writes a Hugging Face folder: a Llama of 0.6 million parameters, a byte-level tokenizer made for it, and a chat
template. It is weak on purpose: right in about one of eight attempts, while 64 attempts solve nearly every problem.
The rest is left for reinforcement learning. It trains on fresh problems, none of which has the text of one in
`problems.jsonl`. The same seed and steps give the same weights on the same machine.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch
from make_problems import PROBLEMS, Problem, draw_problems
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

END, PAD, SYSTEM, USER, ASSISTANT = SPECIAL = ("<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BATCH = 64
IGNORED = -100  # label of tokens that are not part of the answer


def fresh_problems(seed: int) -> Iterator[Problem]:
    """Yield training problems endlessly; none has the text of one in the file."""
    kept_out = {json.loads(line)["question"] for line in PROBLEMS.read_text("utf-8").splitlines()}
    return (p for p in draw_problems(1_000_000 + seed) if p.question not in kept_out)


def make_tokenizer(problems: list[Problem]) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE in which the words and numbers of the problems are single tokens; it encodes any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{p.question} {response(p)}" for p in problems], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return the untrained model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def response(problem: Problem) -> str:
    r"""Return what the model should say: `12 + 10 = 22, so \boxed{22}`."""
    return f"{problem.reasoning}, so \\boxed{{{problem.answer}}}"


def encode(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt as the chat template gives it, and of the response with its end token."""
    messages = [{"role": "user", "content": problem.question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response(problem) + END)]
    return encoded[0], encoded[1]


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], seconds: float
) -> list[float]:
    """Train on each problem once, in order, for at most `seconds`; return the loss of each batch."""
    rows = [encode(tokenizer, p) for p in problems]
    steps = len(rows) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1, pct_start=0.1)
    started, losses = perf_counter(), []
    for step in range(steps):
        batch = rows[step * BATCH : (step + 1) * BATCH]
        width = max(len(prompt) + len(answer) for prompt, answer in batch)
        ids = torch.full((BATCH, width), int(tokenizer.pad_token_id))
        labels = torch.full((BATCH, width), IGNORED)
        for i, (prompt, answer) in enumerate(batch):
            end = len(prompt) + len(answer)
            ids[i, :end] = torch.tensor(prompt + answer)
            labels[i, len(prompt) : end] = torch.tensor(answer)
        loss = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if perf_counter() - started > seconds:
            break
        if step % 50 == 0:
            print(f"step {step + 1} of {steps}, loss {losses[-1]:.3f}, {perf_counter() - started:.0f} s", flush=True)
    return losses


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200, help="batches of 64 fresh problems")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="stop training after this long, even before --steps"
    )
    parser.add_argument("--random", action="store_true", help="leave the model untrained")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    fresh = fresh_problems(options.seed)
    tokenizer = make_tokenizer(list(islice(fresh, 2000)))
    model = make_model(tokenizer, options.seed)
    if not options.random:
        train(model, tokenizer, list(islice(fresh, options.steps * BATCH)), options.seconds)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    print(f"wrote a model of {model.num_parameters():,} parameters to {options.folder}")


if __name__ == "__main__":
    main()
