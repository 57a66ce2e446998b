"""Train a tiny model that sometimes solves the tasks of the mixed example.

    python examples/mixed/make_model.py runs/mixed_model       # a few minutes on one core

This writes a Hugging Face folder: a Llama of 0.7 million parameters and a byte-level tokenizer made for it. It learns
from fresh rows, none of which is in the committed files. In most steps all responses are right. In the last ones only a
fraction is (`RIGHT`), so the model also writes wrong responses, which leaves room for reinforcement learning in each
domain. The same seed and steps give the same weights on the same machine.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import make_data
import torch
from make_data import Row
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from brorl.prompts.code_tests import CodeTests
from brorl.prompts.public_data import LAYOUTS

END, PAD = SPECIAL = ("<|end|>", "<|pad|>")
BATCH = 64
RIGHT = {"math": 0.4, "code": 0.35, "science": 0.45, "ifeval": 0.4}  # fraction of right responses in the last steps
LAST = 0.2  # fraction of these steps
IGNORED = -100  # label of tokens that are not part of the response

Example = tuple[str, str]  # a prompt and a response


def math_response(row: Row, _text: str, right: bool, rng: Random) -> str:
    """Box the answer, or a number near it."""
    answer = int(row["answer"])
    return f"\\boxed{{{answer if right else max(0, answer + rng.choice((-10, -2, -1, 1, 2, 10)))}}}"


def code_response(row: Row, _text: str, right: bool, rng: Random) -> str:
    """Write the function, or one with a different number or operator."""
    program = CodeTests.from_text(row["answer"]).solution
    head, _, body = program.partition("return ")
    if not right:
        signs = "+-*%" if rng.random() < 0.3 else "123456789"
        place = rng.choice([i for i, character in enumerate(body) if character in signs])
        other = rng.choice(signs.replace(body[place], ""))
        body = body[:place] + other + body[place + 1 :]
    return f"```python\n{head}return {body}\n```"


def science_response(row: Row, text: str, right: bool, rng: Random) -> str:
    """Name an option and box its letter."""
    answer = row["Correct Answer"] if right else row[f"Incorrect Answer {rng.randint(1, 3)}"]
    letter = text.partition(f". {answer}\n")[0][-1:]
    return f"{answer} \\boxed{{{letter}}}"


def ifeval_response(row: Row, _text: str, right: bool, rng: Random) -> str:
    """Write sentences that follow the instructions, or follow them only by chance."""
    asked = dict(zip(row["instruction_id_list"], row["kwargs"], strict=True)) if right else {}
    words = asked.get("length_constraints:number_words", {})
    at_least, most = words.get("relation") == "at least", 99
    least = words["num_words"] if at_least else 0
    if words and not at_least:
        most = words["num_words"] - 1
    number = asked.get("length_constraints:number_sentences", {}).get("num_sentences", 1)
    topic = row["prompt"].split()[3].strip(".")
    while True:
        text = " ".join(_sentence(topic, rng) for _ in range(max(number, rng.choice((1, 1, 2)))))
        text = _formed(text, topic, asked, rng)
        found = re.findall(r"\w+", text.lower())
        wanted = {*asked.get("keywords:existence", {}).get("keywords", ())}
        forbidden = {*asked.get("keywords:forbidden_words", {}).get("forbidden_words", ())}
        if least <= len(found) <= most and wanted <= {*found} and not forbidden & {*found}:
            return text


def _sentence(topic: str, rng: Random) -> str:
    """Return a sentence of 4 to 10 words."""
    one, two = rng.sample(make_data.ADJECTIVES, 2)
    first, article = rng.choice(("The", "A", "My")), rng.choice(("the", "a", "my"))
    subject = rng.choice((f"{first} {topic}", f"{first} {one} {topic}", f"{first} {one}, {two} {topic}"))
    thing = rng.choice((f"{article} {rng.choice(make_data.TOPICS)}", "us"))
    more = rng.choice(("", "", f" and {rng.choice(make_data.VERBS)} it"))
    return f"{subject} {rng.choice(make_data.VERBS)} {thing}{more}."


def _formed(text: str, topic: str, asked: dict[str, Any], rng: Random) -> str:
    """Return a text with the forms that are asked for, and sometimes with others."""
    if "punctuation:no_comma" in asked or rng.random() < 0.2:
        text = text.replace(",", "")
    if "startend:end_checker" in asked or rng.random() < 0.1:
        text = f"{text} {asked.get('startend:end_checker', {}).get('end_phrase', rng.choice(make_data.ENDINGS))}"
    if "startend:quotation" in asked or ("detectable_format:title" not in asked and rng.random() < 0.1):
        return f'"{text}"'
    return f"<<The {topic}>> {text}" if "detectable_format:title" in asked or rng.random() < 0.1 else text


LAYOUT_OF = {"science": LAYOUTS["gpqa"], "ifeval": LAYOUTS["ifeval"]}
"""Layouts of the files that have none of brorl's own columns, as in the recipe."""
RESPONSES: dict[str, Callable[[Row, str, bool, Random], str]] = {
    "math": math_response, "code": code_response, "science": science_response, "ifeval": ifeval_response,
}  # fmt: skip
"""Function that writes a response to a row, its text, whether it is right, and random numbers, by domain."""


def text_of(domain: str, row: Row) -> str:
    """Return the prompt of a row, as the recipe renders it."""
    fields = LAYOUT_OF[domain].read(row, 0) if domain in LAYOUT_OF else None
    return f"{row['prompt'] if fields is None else fields.text}\n"


def fresh_examples(seed: int, num_right: int = 0) -> Iterator[Example]:
    """Yield prompts and responses of all domains in turn, endlessly; none repeats a question of the files.

    The first `num_right` responses are right, then the fractions of `RIGHT`.
    """
    rng = Random(1_000_000 + seed)
    streams = {domain: make_data.draw_rows(domain, 1_000_000 + seed) for domain in RESPONSES}
    kept_out = {
        domain: {make_data.same_words(domain, row) for row in make_data.file_rows(domain, 300, 0)}
        for domain in RESPONSES
    }
    for number in count():
        domain = list(RESPONSES)[number % len(RESPONSES)]
        row = next(row for row in streams[domain] if make_data.same_words(domain, row) not in kept_out[domain])
        text = text_of(domain, row)
        right = number < num_right or rng.random() < RIGHT[domain]
        yield text, RESPONSES[domain](row, text, right, rng)


def make_tokenizer(examples: list[Example], size: int = 1024) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE in which frequent words and numbers are single tokens; it encodes any text."""
    tokenizer = Tokenizer(models.BPE())
    numbers = pre_tokenizers.Digits(individual_digits=False)  # a number is the same token after a space and elsewhere
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([numbers, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prompt + response for prompt, response in examples], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=192,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return the untrained model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Iterator[Example], steps: int
) -> list[float]:
    """Train on batches of fresh examples; return the loss of each batch, which weights every domain equally."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1, pct_start=0.1)
    started, losses = perf_counter(), []
    for step in range(steps):
        batch = list(islice(examples, BATCH))
        parts = [batch[i :: len(RESPONSES)] for i in range(len(RESPONSES))]  # of one domain, so little is padded
        optimizer.zero_grad()
        loss = torch.stack([response_loss(model, tokenizer, part) for part in parts]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step + 1} of {steps}, loss {losses[-1]:.3f}, {perf_counter() - started:.0f} s", flush=True)
    return losses


def response_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> torch.Tensor:
    """Return the mean loss over the tokens of the responses."""
    rows = [(tokenizer(prompt)["input_ids"], tokenizer(response + END)["input_ids"]) for prompt, response in examples]
    width = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.full((len(rows), width), int(tokenizer.pad_token_id))
    labels = torch.full((len(rows), width), IGNORED)
    for i, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[i, :end] = torch.tensor(prompt + response)
        labels[i, len(prompt) : end] = torch.tensor(response)
    return model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=800, help="batches of 64 fresh examples")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    tokenizer = make_tokenizer(list(islice(fresh_examples(options.seed), 4000)))
    model = make_model(tokenizer, options.seed)
    examples = fresh_examples(options.seed, num_right=round((1 - LAST) * options.steps) * BATCH)
    train(model, tokenizer, examples, options.steps)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    print(f"wrote a model of {model.num_parameters():,} parameters to {options.folder}")


if __name__ == "__main__":
    main()
