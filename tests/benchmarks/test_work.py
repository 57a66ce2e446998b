"""What is counted as arithmetic, against torch's own counter of operations and against enumeration."""

import numpy as np
import torch
from build_workload import workload_of as built_workload
from measurement import Cell, Job, Run, Work, Workload, flat_work, num_distinct_prefixes
from ours import tree_work
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from brorl.tree import RolloutTree
from small_models import random_tree, small_model


def workload_of(model: PreTrainedModel) -> Workload:
    return built_workload(
        model, "full", folder="", domain="parity", prompts=[], max_new_tokens=8, eos_token_id=model.config.vocab_size,
        fixed_length=True, entropy_nats=1.0, head_scale=1.0,
    )  # fmt: skip


def counted_flops(model: PreTrainedModel, response: list[int], prompt: list[int]) -> int:
    """Feed a prompt and then a response but its last token, token by token, each attending to what is before it."""
    cache, total = None, 0
    for token in (*prompt, *response[:-1]):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            cache = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).past_key_values
        total += counter.get_total_flops()
    # Sampling needs the head at the last token of the prompt, and at none before it.
    return total - 2 * model.get_output_embeddings().weight.numel() * (len(prompt) - 1)


def test_sampling_is_the_products_of_a_token_by_token_forward_pass(rng: np.random.Generator) -> None:
    model = small_model(vocab_size=17)
    model.set_attn_implementation("eager")
    prompt = rng.integers(17, size=rng.integers(1, 6)).tolist()
    response = rng.integers(17, size=rng.integers(1, 9)).tolist()
    work = flat_work(len(prompt), [len(response)])
    assert workload_of(model).flops(work) == counted_flops(model, response, prompt)


def test_learning_is_three_forward_passes_of_products(rng: np.random.Generator) -> None:
    model = small_model(vocab_size=17)
    model.set_attn_implementation("eager")
    length = int(rng.integers(2, 9))
    tokens = torch.from_numpy(rng.integers(17, size=(1, length)))
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    # Eager attention multiplies the masked half too, so every token attends to all positions here.
    work = Work(length, length * length, length)
    run = Run(1.0, 1.0, sampled_tokens=length, work=work, parts={"generation": 2.0, "training": 0.5})
    cell = Cell(Job("ours", "step", "", 1, 1, 1, 1), [run], [], 0, 0)
    workload = workload_of(model)
    assert np.isclose(cell.gflops_per_s(workload, "training") * 0.5e9, counter.get_total_flops())
    assert np.isclose(cell.gflops_per_s(workload, "generation") * 2e9 * 3, counter.get_total_flops())


def test_flat_work_is_the_sum_over_every_fed_token(rng: np.random.Generator) -> None:
    num_prompt, lengths = int(rng.integers(1, 6)), rng.integers(1, 9, size=rng.integers(1, 7)).tolist()
    fed, attended, predictions = 0, 0, 0
    for position in range(num_prompt):
        fed, attended = fed + 1, attended + position + 1
    for length in lengths:
        for depth in range(length - 1):
            fed, attended, predictions = fed + 1, attended + num_prompt + depth + 1, predictions + 1
    assert flat_work(num_prompt, lengths) == Work(fed, attended, predictions + 1)


def test_tree_work_feeds_every_distinct_proper_prefix_once(rng: np.random.Generator) -> None:
    tree = random_tree(rng)
    num_prompt = len(tree.prompt_ids)
    prefixes = {tuple(response[:end]) for response in responses_of(tree) for end in range(1, len(response))}
    attended = num_prompt * (num_prompt + 1) // 2 + sum(num_prompt + len(prefix) for prefix in prefixes)
    longest = max(map(len, prefixes), default=0)
    cached = num_prompt * longest + sum(map(len, prefixes))
    assert tree_work(tree) == Work(num_prompt + len(prefixes), attended, 1 + len(prefixes), 1 + longest, cached)


def test_the_least_time_is_that_of_products_and_of_reading_weights_and_cache() -> None:
    model = small_model(vocab_size=17)
    work, workload = Work(5, 11, 3, positions=2, cached=7), workload_of(model)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    per_token = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim
    read = 4 * (2 * weights + 7 * per_token) / 3e9
    for quantity, passes in (("generation", 1), ("step", 4)):
        expected = passes * workload.flops(work) / 2e9 + read
        assert np.isclose(workload.least_seconds(work, quantity, 2.0, 3.0), expected, rtol=1e-12)


def responses_of(tree: RolloutTree) -> list[list[int]]:
    return [tree.token[tree.path(int(leaf))].tolist() for leaf in tree.leaf]


def test_distinct_prefixes_are_those_of_enumeration(rng: np.random.Generator) -> None:
    responses = [rng.integers(3, size=rng.integers(1, 6)).tolist() for _ in range(int(rng.integers(1, 30)))]
    prefixes = {tuple(response[:end]) for response in responses for end in range(1, len(response) + 1)}
    assert num_distinct_prefixes(responses) == len(prefixes)
