r"""Make what the recipe `calculator` ships: a small starting model, and the products that it is asked for.

In: a seed and sizes. Out: a Hugging Face folder with a character-level tokenizer, a chat template that shows tools and
a Llama-type model, and a file of questions. Shown the calculator, the model calls it in three of ten responses and
copies the result, whatever the factors are; else it answers at once, as it always does without the calculator. It has
seen the products of digits often enough to know them by heart, and can only guess those of longer numbers. So there is
something to learn: when to call.

    python scripts/make_calculator_model.py --output src/brorl/calculator_model \
        --products src/brorl/prompts/products.jsonl    # a few minutes on one core
"""

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<unk>", "<|tools|>", "<|user|>", "<|tool|>", "<|assistant|>")
PAD, END = range(2)
CALL, CALL_END = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'
LONG_TEXTS = (CALL, CALL_END, "calculator")  # one token each, as is every character
VOCABULARY = {text: i for i, text in enumerate((*SPECIAL_TOKENS, *LONG_TEXTS, *"0123456789*"))}
CHAT_TEMPLATE = """\
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{%- if message.role == 'assistant' %}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
IGNORED = -100  # label of positions without a loss
MAX_LENGTH = 3  # digits of a factor


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: one token per character, and one for the text on either side of a call's expression."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    pattern = "|".join((*map(re.escape, LONG_TEXTS), r"[\s\S]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def build_model(hidden_size: int, num_layers: int) -> LlamaForCausalLM:
    """Return an untrained model with 4 heads that share 2 key-value heads."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, max_new_tokens=16, pad_token_id=PAD, eos_token_id=END)
    return model


def random_factors(rng: random.Random, digits: tuple[int, int]) -> tuple[int, int]:
    """Draw two factors with so many digits; a factor of one digit can be 0."""
    first, second = (rng.randrange(10 ** (d - 1) if d > 1 else 0, 10**d) for d in digits)
    return first, second


def conversation(factors: tuple[int, int], shown: bool, calls: bool) -> tuple[str, ...]:
    """Return the text of a question, of the model's turn, and if it calls of the reply and the model's last turn."""
    question, answer = f"{factors[0]}*{factors[1]}", f"{factors[0] * factors[1]}"
    prompt = f"{'<|tools|>calculator' if shown else ''}<|user|>{question}<|assistant|>"
    call = (f"{CALL}{question}{CALL_END}<|end|>", f"<|tool|>{answer}<|assistant|>") if calls else ()
    return (prompt, *call, f"{answer}<|end|>")


def random_batch(
    tokenizer: PreTrainedTokenizerFast, batch_size: int, calls: float, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw conversations; return token ids and labels, both [B, T]. Only the model's turns have labels.

    Half of the products are those of two digits. One in ten conversations does not show the calculator.
    """
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(batch_size):
        digits = (1, 1) if rng.random() < 0.5 else (rng.randint(1, MAX_LENGTH), rng.randint(1, MAX_LENGTH))
        shown = rng.random() < 0.9
        texts = conversation(random_factors(rng, digits), shown, shown and rng.random() < calls)
        ids, labels = list[int](), list[int]()
        for i, piece in enumerate(tokenizer(list(texts), add_special_tokens=False)["input_ids"]):
            ids += piece
            labels += piece if i % 2 else [IGNORED] * len(piece)
        rows.append((ids, labels))
    length = max(len(ids) for ids, _ in rows)
    padded = [(ids + [PAD] * (length - len(ids)), labels + [IGNORED] * (length - len(labels))) for ids, labels in rows]
    return torch.tensor([ids for ids, _ in padded]), torch.tensor([labels for _, labels in padded])


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, arguments: argparse.Namespace) -> None:
    """Train on fresh random conversations."""
    rng = random.Random(arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    start = time.monotonic()
    for step in range(arguments.steps):
        ids, labels = random_batch(tokenizer, arguments.batch_size, arguments.calls, rng)
        cosine = 0.525 + 0.475 * math.cos(math.pi * step / arguments.steps)
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * cosine * min(1.0, (step + 1) / 30)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            seconds = time.monotonic() - start
            print(f"step {step + 1:5d}  loss {loss.item():.3f}  {seconds:4.0f} s", flush=True)


@torch.no_grad()
def turn_probability(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, before: str, turn: str) -> float:
    """Return the probability with which the model writes a turn after a text."""
    start, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, turn))
    logprobs = model(torch.tensor([start + ids])).logits[0].log_softmax(-1)
    return math.exp(sum(float(logprobs[len(start) - 1 + i, token]) for i, token in enumerate(ids)))


def measured(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[str]:
    """Yield a line for each size: how often the model calls, and is right in each case, on 200 random products."""
    for digits in range(1, MAX_LENGTH + 1):
        calls, alone, copies = 0.0, 0.0, 0.0
        for _ in range(200):
            factors = random_factors(rng, (digits, digits))
            prompt, call, reply, answer = conversation(factors, shown=True, calls=True)
            rate = turn_probability(model, tokenizer, prompt, CALL)
            calls += rate / 200
            alone += turn_probability(model, tokenizer, prompt, answer) / (1 - rate) / 200
            copies += turn_probability(model, tokenizer, prompt + call + reply, answer) / 200
        yield f"{digits} digits: calls {calls:.2f}, right without a call {alone:.3f}, after one {copies:.3f}"


def question_lines(number: int, rng: random.Random) -> Iterator[str]:
    """Yield different products of two factors with the same number of digits, as many of each size, as JSON Lines."""
    for digits in range(1, MAX_LENGTH + 1):
        chosen: set[tuple[int, int]] = set()
        while len(chosen) < number:
            chosen.add(random_factors(rng, (digits, digits)))
        for first, second in sorted(chosen):
            yield json.dumps({"prompt": f"{first}*{second}", "answer": str(first * second)}) + "\n"


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the folder and check that the Auto classes read the same model.

    Raises:
        RuntimeError: If the model differs after reading, or the chat template writes a conversation differently.
    """
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    for file in output.iterdir():
        file.chmod(0o644)
    loaded_model, loaded = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    for name, weight in model.state_dict().items():
        if not torch.equal(weight, loaded_model.state_dict()[name]):
            raise RuntimeError(f"{output}: the weight {name} did not survive saving")
    function = {"name": "calculator", "arguments": {"expression": "12*345"}}
    messages = [
        {"role": "user", "content": "12*345"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "calculator", "content": "4140"},
        {"role": "assistant", "content": "4140"},
    ]
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    texts = conversation((12, 345), shown=True, calls=True)
    pieces = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    if loaded.apply_chat_template(messages, tools=tools)["input_ids"] != [token for piece in pieces for token in piece]:
        raise RuntimeError(f"{output}: the chat template does not write what the model was trained on")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of the model to write")
    add("--products", type=Path, required=True, help="file of questions to write")
    add("--seed", type=int, default=0, help="seed of weights, conversations and questions")
    add("--steps", type=int, default=2500, help="gradient steps")
    add("--batch-size", type=int, default=64, help="conversations per step")
    add("--learning-rate", type=float, default=5e-3, help="peak; falls by a cosine to a twentieth")
    add("--calls", type=float, default=0.3, help="fraction of the conversations with a call, where the tool is shown")
    add("--hidden-size", type=int, default=48)
    add("--num-layers", type=int, default=2)
    add("--number", type=int, default=100, help="products of each size in the file")
    return parser.parse_args()


def main() -> None:
    """Train, save and measure."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    tokenizer, model = build_tokenizer(), build_model(arguments.hidden_size, arguments.num_layers)
    print(f"{model.num_parameters():,} parameters", flush=True)
    train(model, tokenizer, arguments)
    save(model, tokenizer, arguments.output)
    rng = random.Random(arguments.seed)
    lines = "".join(question_lines(arguments.number, rng))
    arguments.products.write_text(lines, "utf-8", newline="\n")
    for line in measured(model, tokenizer, rng):
        print(line)


if __name__ == "__main__":
    main()
