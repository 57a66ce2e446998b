"""Make the small starting model of the recipe `quickstart`.

In: a seed and sizes. Out: a Hugging Face folder with a character-level tokenizer and a Llama-type model. The training
examples are random arithmetic expressions with a target. The target is the value of the expression in three of ten
examples by default, and random in the others. The model writes well-formed answers with a low pass rate, which
reinforcement learning can improve. The examples contain no solutions of a solver and no numbers of held-out puzzles.

    python scripts/make_quickstart_model.py --output src/brorl/quickstart_model
"""

import argparse
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from brorl.prompts.countdown import (
    CountdownPuzzle,
    countdown_puzzles,
    countdown_questions,
    split_countdown,
)
from brorl.prompts.rendering import render
from brorl.prompts.settings import PromptFormat
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.verification.domains.countdown import CountdownVerifier
from brorl.verification.grade import grade

CHARACTERS = "0123456789+-*/() >:"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
VOCABULARY = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
IGNORED = -100  # label of positions without a loss


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: one token per character, and `<bos>` before every text."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def build_model(vocab_size: int, hidden_size: int, num_layers: int) -> LlamaForCausalLM:
    """Return an untrained model with 4 heads that share 2 key-value heads."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, max_new_tokens=16, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS
    )
    return model


def random_expression(numbers: tuple[int, ...], rng: random.Random) -> tuple[str, int] | None:
    """Join the numbers in random order by random operators; None if the value is not an integer.

    Returns:
        The expression with as few parentheses as its structure needs, and its value.
    """
    terms = [(str(number), number, 1, 3) for number in numbers]
    while len(terms) > 1:
        left, a, b, left_level = terms.pop(rng.randrange(len(terms)))
        right, c, d, right_level = terms.pop(rng.randrange(len(terms)))
        operator = rng.choice("+-*/")
        level = 1 if operator in "+-" else 2
        if left_level < level:
            left = f"({left})"
        if right_level < level or (right_level == level and operator in "-/"):
            right = f"({right})"
        match operator:
            case "+":
                value = a * d + c * b, b * d
            case "-":
                value = a * d - c * b, b * d
            case "*":
                value = a * c, b * d
            case _:
                value = a * d, b * c
        if value[1] == 0:
            return None
        terms.append((f"{left}{operator}{right}", *value, level))
    text, numerator, denominator, _ = terms[0]
    return None if numerator % denominator else (text, numerator // denominator)


def random_batch(
    multisets: list[tuple[int, ...]],
    targets: range,
    wrong_targets: float,
    batch_size: int,
    rng: random.Random,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw puzzles with an expression each; return token ids and labels, both [B, T].

    Only the expression and its end token have labels.
    """
    rows: list[tuple[list[int], int]] = []
    while len(rows) < batch_size:
        numbers = rng.choice(multisets)
        drawn = random_expression(numbers, rng)
        if drawn is None or drawn[1] not in targets:
            continue
        expression, value = drawn
        target = rng.choice(targets) if rng.random() < wrong_targets else value
        question = CountdownPuzzle(numbers, target).text
        tokens = [VOCABULARY[character] for character in question + expression]
        rows.append(([BOS, *tokens, EOS], 1 + len(question)))
    length = max(len(tokens) for tokens, _ in rows)
    ids = torch.tensor([tokens + [PAD] * (length - len(tokens)) for tokens, _ in rows])
    labels = torch.tensor(
        [[IGNORED] * start + tokens[start:] + [IGNORED] * (length - len(tokens)) for tokens, start in rows]
    )
    return ids, labels


def train(
    model: LlamaForCausalLM,
    puzzles: list[CountdownPuzzle],
    targets: range,
    arguments: argparse.Namespace,
) -> None:
    """Train on fresh random expressions over the numbers of the training puzzles."""
    rng = random.Random(arguments.seed)
    multisets = sorted({puzzle.numbers for puzzle in puzzles})
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    start = time.monotonic()
    for step in range(arguments.steps):
        batch = random_batch(multisets, targets, arguments.wrong_targets, arguments.batch_size, rng)
        ids, labels = (tensor.to(model.device) for tensor in batch)
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


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    puzzles: list[CountdownPuzzle],
    num_rollouts: int,
    seed: int,
) -> dict[int, float]:
    """Return pass@k at temperature 1 for k = 1, 16 and N, by the unbiased estimator."""
    prompts = render(countdown_questions(puzzles), PromptFormat(), tokenizer)
    engine = NativeEngine(model, eos_token_id=EOS)
    trees = engine.sample(
        SampleTask(
            [list(prompt.token_ids) for prompt in prompts],
            num_rollouts,
            SamplingParams(max_new_tokens=16),
            seed=seed,
        )
    )
    graded = grade(
        prompts,
        trees,
        {"countdown": CountdownVerifier()},
        lambda _prompt, turns: str(tokenizer.decode(list(turns[-1]), skip_special_tokens=True)),
    )
    num_correct = [
        sum(count for count, verdict in zip(tree.leaf_count.tolist(), verdicts, strict=True) if verdict.correct)
        for tree, verdicts in zip(trees, graded, strict=True)
    ]
    return {
        k: sum(1 - math.comb(num_rollouts - c, k) / math.comb(num_rollouts, k) for c in num_correct) / len(num_correct)
        for k in (1, 16, num_rollouts)
    }


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the folder and check that the Auto classes read the same model.

    Raises:
        RuntimeError: If the model differs after reading.
    """
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    for file in output.iterdir():
        file.chmod(0o644)
    loaded_model = AutoModelForCausalLM.from_pretrained(output)
    loaded_tokenizer = AutoTokenizer.from_pretrained(output)
    for name, weight in model.state_dict().items():
        if not torch.equal(weight, loaded_model.state_dict()[name]):
            raise RuntimeError(f"{output}: the weight {name} did not survive saving")
    ids = loaded_tokenizer.encode(CHARACTERS)
    if ids != tokenizer.encode(CHARACTERS) or (loaded_tokenizer.decode(ids, skip_special_tokens=True) != CHARACTERS):
        raise RuntimeError(f"{output}: the tokenizer did not survive saving")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder to write")
    add("--seed", type=int, default=0, help="seed of weights and examples")
    add("--steps", type=int, default=3500, help="gradient steps")
    add("--batch-size", type=int, default=64, help="expressions per step")
    add("--learning-rate", type=float, default=4e-3, help="peak; falls by a cosine to a twentieth")
    add("--wrong-targets", type=float, default=0.7, help="fraction of examples with a random target")
    add("--hidden-size", type=int, default=64)
    add("--num-layers", type=int, default=3)
    add("--num-numbers", type=int, nargs="+", default=[3], help="numbers in a puzzle; several for a mixture")
    add("--max-number", type=int, default=12, help="largest number")
    add("--max-target", type=int, default=99, help="largest target; the smallest is 1")
    add("--held-out-fraction", type=float, default=0.2, help="fraction of multisets of numbers")
    add("--split-seed", type=int, default=0)
    add("--device", default="cpu", help="training device; affects the last bits of the weights")
    add("--num-threads", type=int, default=1, help="threads; affects the last bits of the weights")
    return parser.parse_args()


def main() -> None:
    """Train, save and measure."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.num_threads)
    torch.manual_seed(arguments.seed)
    targets = range(1, arguments.max_target + 1)
    puzzles = [p for n in arguments.num_numbers for p in countdown_puzzles(n, arguments.max_number, targets)]
    training, held_out = split_countdown(puzzles, arguments.held_out_fraction, arguments.split_seed)
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer), arguments.hidden_size, arguments.num_layers)
    print(
        f"{len(training)} training and {len(held_out)} held-out puzzles, "
        f"{sum(p.numel() for p in model.parameters())} parameters",
        flush=True,
    )
    model.to(arguments.device)
    train(model, training, targets, arguments)
    save(model, tokenizer, arguments.output)
    for k, value in measure(model, tokenizer, held_out[:256], 256, arguments.seed).items():
        print(f"held-out pass@{k}: {value:.3f}")


if __name__ == "__main__":
    main()
