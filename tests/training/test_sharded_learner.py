"""The learner on 2 and 3 ranks against one process: updates, metrics, checkpoints, failures (gloo, float64)."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import sharded_cases
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import ImportanceCorrection, KLPenalty, PolicyLossSettings
from brorl.config.settings import TrainConfig
from brorl.runs.step_record import UpdateRecord
from brorl.training.ranks import ALONE
from learner_support import group_of
from rank_processes import RankProcesses
from recipes import recipe
from run_support import save_tiny_model
from sharded_cases import Case, Result
from small_models import random_tree

SETTINGS = recipe(
    learning_rate=1e-3,
    loss=PolicyLossSettings(kind="ppo", clip_low=0.1, clip_high=0.15),
    temperature=0.9,
    nodes_per_pass=20,
    max_new_tokens=7,
)
SHAPES = {
    "even": [(12, 7)] * 4,
    "ragged": [(1, 7), (30, 7), (3, 2), (9, 5), (2, 1)],
    "uneven": [(60, 7), (1, 1)],
    "one response": [(1, 1)],
    "first tokens": [(4, 1), (6, 1)],
}


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    started = RankProcesses(3)
    yield started
    started.close()


def batch(rng: np.random.Generator, shape: str = "ragged") -> tuple[list[Group], list[np.ndarray]]:
    groups = []
    for num_rollouts, longest in SHAPES[shape]:
        tree = random_tree(rng, num_rollouts=num_rollouts, max_length=longest, branching=6)
        if shape == "one response":
            tree, _ = tree.select(np.array([0]))
        groups.append(group_of(replace(tree, logprob=rng.uniform(-3.5, -1.5, tree.num_unique_tokens)), rng))
    return groups, [rng.normal(size=g.tree.num_responses) for g in groups]


def case_of(rng: np.random.Generator, settings: TrainConfig, shape: str = "ragged", steps: int = 1) -> Case:
    return Case(settings, int(rng.integers(1 << 30)), [batch(rng, shape) for _ in range(steps)])


def assert_same_update(got: UpdateRecord, expected: UpdateRecord, tolerance: float = 1e-9) -> None:
    for name, value in asdict(expected).items():
        found = getattr(got, name)
        assert found == (value if value is None else pytest.approx(value, rel=tolerance, abs=tolerance / 100)), name


def assert_same(got: list[Result], expected: Result, tolerance: float = 1e-10) -> None:
    for one in got:
        assert one.updates == got[0].updates
    for one, other in zip(got[0].updates, expected.updates, strict=True):
        assert_same_update(one, other, 10 * tolerance)
    total = np.sqrt(sum(float((g**2).sum()) for g in expected.gradients.values()))
    assert total > 1e-6
    assert got[0].gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        np.testing.assert_allclose(got[0].gradients[name], gradient, rtol=0, atol=tolerance * total, err_msg=name)
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(got[0].weights[name], weight, rtol=0, atol=tolerance, err_msg=name)


def check(processes: RankProcesses, size: int, case: Case) -> Result:
    expected = sharded_cases.alone(sharded_cases.train, case)
    assert_same(processes.run(size, sharded_cases.train, case), expected)
    return expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_update_is_that_of_one_process(
    size: int, shape: str, processes: RankProcesses, rng: np.random.Generator
) -> None:
    unclipped = recipe(
        SETTINGS, loss=PolicyLossSettings(kind="ppo", clip_low=1.0, clip_high=1e3)
    )  # a clip could leave no gradient
    check(processes, size, case_of(rng, unclipped, shape))


LOSSES = {
    "dual clip": {"loss": PolicyLossSettings(kind="ppo", clip_low=0.1, clip_high=0.15, dual_clip=1.5)},
    "cispo": {"loss": PolicyLossSettings(kind="cispo", clip_low=0.1, clip_high=0.15, aggregation="sequence_mean")},
    "gspo": {"loss": PolicyLossSettings(kind="gspo", clip_low=0.01, clip_high=0.01, aggregation="constant")},
    "entropy bonus": {"loss": PolicyLossSettings(kind="ppo", entropy_coefficient=0.3)},
    "mask truncated": {"loss": PolicyLossSettings(kind="ppo", clip_low=0.1, clip_high=0.15, mask_truncated=True)},
    "kl in the loss": {"kl": KLPenalty(coefficient=0.7, estimator="k3", placement="loss")},
    "kl offloaded": {
        "kl": KLPenalty(coefficient=0.7, estimator="k2", placement="loss"),
        "offload": True,
        "states": "host",
    },
    "kl in the reward": {"kl": KLPenalty(coefficient=0.7, estimator="k1", placement="reward")},
    "kl in the reward, recomputed": {
        "kl": KLPenalty(coefficient=0.7, estimator="k2", placement="reward"),
        "old_logprobs": "recompute",
    },
    "mini-batches": {"mini_batches": 3, "warmup_updates": 4, "weight_decay": 0.1},
    "few responses": {"max_responses_per_outcome": 2},
    **{
        f"{mode} {kind}": {
            "loss": PolicyLossSettings(kind=kind, clip_low=0.5, clip_high=0.5),
            "importance": ImportanceCorrection(correction=mode, low=0.5, high=2.0),
            "old_logprobs": "recompute",
        }
        for mode, kind in (("truncate", "ppo"), ("mask", "gspo"), ("sequence_mask", "ppo"))
    },
    "flat": {},
    "flat gspo": {
        "loss": PolicyLossSettings(kind="gspo", clip_low=0.01, clip_high=0.01),
        "kl": KLPenalty(coefficient=0.7, estimator="k2"),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_and_penalty_is_that_of_one_process(
    kind: str, processes: RankProcesses, rng: np.random.Generator
) -> None:
    steps = 3 if kind == "mini-batches" else 1
    corrects = "importance" in LOSSES[kind]
    settings = recipe(SETTINGS, **{"nodes_per_pass": 40, **LOSSES[kind]})
    case = case_of(rng, settings, "even" if corrects else "ragged", steps)
    (update, *_) = check(processes, 3, replace(case, flat=kind.startswith("flat"))).updates
    assert (update.mismatch_mean is not None) == ("old_logprobs" in LOSSES[kind])
    assert (update.masked_fraction > 0) == (corrects and "mask" in kind)


@pytest.mark.slow
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("lora", [0, 2])  # rank 2: a rank of 3 has no rows of an adapter
def test_adapters_and_gradient_checkpointing(
    lora: int, gradient_checkpointing: bool, processes: RankProcesses, rng: np.random.Generator
) -> None:
    case = case_of(rng, recipe(SETTINGS, kl=KLPenalty(coefficient=0.3), nodes_per_pass=40), steps=2 if lora else 1)
    check(processes, 3, replace(case, lora=lora, gradient_checkpointing=gradient_checkpointing))


def test_tied_embeddings(processes: RankProcesses, rng: np.random.Generator) -> None:
    check(processes, 2, replace(case_of(rng, SETTINGS), overrides={"tie_word_embeddings": True}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "tied", "adapters", "changes"),
    [
        (2, True, False, {}),
        (3, False, False, {"loss": PolicyLossSettings(kind="gspo", clip_low=0.5, clip_high=0.5)}),
        (3, False, True, {"loss": PolicyLossSettings(kind="ppo", entropy_coefficient=0.3)}),
    ],
)
def test_logits_in_blocks_with_and_without_gradients(
    size: int,
    tied: bool,
    adapters: bool,
    changes: dict[str, Any],
    processes: RankProcesses,
    rng: np.random.Generator,
) -> None:
    settings = recipe(
        SETTINGS,
        kl=KLPenalty(coefficient=0.7, estimator="k2", placement="reward"),
        old_logprobs="recompute",
        **changes,
    )
    case = replace(
        case_of(rng, settings),
        overrides={"tie_word_embeddings": tied},
        lora=2 if adapters else 0,
        gradient_checkpointing=adapters,
        flat=size == 3 and not adapters,
    )
    whole = sharded_cases.alone(sharded_cases.train, case)
    assert_same(processes.run(size, sharded_cases.train, replace(case, logits_per_block=60)), whole)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_float32_after_passes_in_bfloat16(
    tied: bool, processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    case = replace(
        case_of(rng, recipe(SETTINGS, dtype="bfloat16"), "even"),
        dtype=torch.float32,
        overrides={"tie_word_embeddings": tied},
    )
    [(weights, dtype), (others, _)] = processes.run(2, sharded_cases.weights_after_passes, case, tmp_path)
    assert dtype == torch.float32
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, parameter in saved.named_parameters():
        assert np.array_equal(weights[name], parameter.detach().numpy()), name
        assert np.array_equal(weights[name], others[name])
        rounded = parameter.detach().bfloat16().float()
        assert "norm" in name or not torch.equal(parameter.detach(), rounded), name


@pytest.mark.slow
def test_bfloat16_computes_in_bfloat16_and_keeps_the_weights_in_float32(
    processes: RankProcesses, rng: np.random.Generator
) -> None:
    case = replace(case_of(rng, recipe(SETTINGS, dtype="bfloat16"), "even", steps=1), dtype=torch.float32)
    settings = recipe(SETTINGS, old_logprobs="recompute")
    exact = sharded_cases.alone(sharded_cases.train, replace(case, settings=settings))
    rounded = sharded_cases.alone(sharded_cases.train, case)
    [got, _] = processes.run(2, sharded_cases.train, case)
    norm = exact.updates[0].grad_norm
    assert got.updates[0].grad_norm != norm
    assert got.updates[0].grad_norm == pytest.approx(norm, rel=0.1)
    assert rounded.updates[0].loss == pytest.approx(got.updates[0].loss, rel=0.1, abs=0.02)
    assert all(g.dtype == np.float32 for g in got.gradients.values())


def test_log_probs_are_complete_on_every_rank(processes: RankProcesses, rng: np.random.Generator) -> None:
    case = case_of(rng, recipe(SETTINGS, old_logprobs="recompute"), steps=1)
    expected, _ = sharded_cases.alone(sharded_cases.logprobs, case)
    for now, old in processes.run(3, sharded_cases.logprobs, case):
        for one, other, third in zip(now, old, expected, strict=True):
            np.testing.assert_array_equal(one, other)
            np.testing.assert_allclose(one, third, rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("clear", [False, True])
def test_the_reference_is_reset_on_every_rank(clear: bool, processes: RankProcesses, rng: np.random.Generator) -> None:
    case = case_of(rng, recipe(SETTINGS, kl=KLPenalty(coefficient=0.5)), steps=2)
    expected = sharded_cases.alone(sharded_cases.reset, case, clear)
    assert expected.updates[0].reference_kl > 0
    assert expected.updates[1].reference_kl == pytest.approx(0, abs=1e-12)
    assert_same(processes.run(3, sharded_cases.reset, case, clear), expected)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["embedding", "layer", "backward"])
def test_all_ranks_start_again_with_half_the_nodes_if_one_runs_out_of_memory(
    where: str, processes: RankProcesses, rng: np.random.Generator
) -> None:
    settings = recipe(SETTINGS, nodes_per_pass=64, kl=KLPenalty(coefficient=0.5), mini_batches=1)
    case = case_of(rng, settings, "uneven", steps=2)
    expected = sharded_cases.alone(sharded_cases.train, replace(case, settings=recipe(settings, nodes_per_pass=16)))
    outcomes = processes.run(3, sharded_cases.run_out, case, 1, 20, where)
    failures = [failures for _, failures in outcomes]
    assert failures[0] == failures[2] == 0 < failures[1]
    results = [result for result, _ in outcomes]
    assert sum(u.out_of_memory_retries for u in results[0].updates) == failures[1]
    retries = 0
    for index, update in enumerate(results[0].updates):
        assert all(result.updates[index] == update for result in results)
        retries += update.out_of_memory_retries
        assert update.nodes_per_pass == 64 >> retries
        same = {name: getattr(update, name) for name in ("nodes_per_pass", "out_of_memory_retries")}
        assert_same_update(update, replace(expected.updates[index], **same))
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(results[0].weights[name], weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize("where", ["embedding", "layer", "backward"])
def test_all_ranks_start_again_if_one_without_responses_runs_out_of_memory(
    where: str, processes: RankProcesses, rng: np.random.Generator
) -> None:
    case = case_of(rng, recipe(SETTINGS, nodes_per_pass=64), "one response")
    expected = sharded_cases.alone(sharded_cases.train, case)
    outcomes = processes.run(2, sharded_cases.run_out, case, 0, 1, where, 1)
    assert [failures for _, failures in outcomes] == [1, 0]
    for result, _ in outcomes:
        assert_same_update(result.updates[0], replace(expected.updates[0], nodes_per_pass=32, out_of_memory_retries=1))


def test_all_ranks_end_together_if_one_has_too_little_memory_for_anything(
    processes: RankProcesses, rng: np.random.Generator
) -> None:
    for error, _ in processes.run(2, sharded_cases.run_into, case_of(rng, SETTINGS), 1):
        assert error.startswith("OutOfMemoryError: out of memory while training with 16 tree nodes")


@pytest.mark.slow
def test_all_ranks_diverge_together(processes: RankProcesses, rng: np.random.Generator) -> None:
    case = case_of(rng, SETTINGS)
    case.steps[0][1][0][:] = np.inf
    outcomes = processes.run(3, sharded_cases.run_into, case)
    start = {name: p.detach().numpy() for name, p in sharded_cases.model_of(case).named_parameters()}
    for error, weights in outcomes:
        assert error.startswith("DivergedError: the loss")
        assert all(np.array_equal(weights[name], weight) for name, weight in start.items())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 3, 2, 1), (3, 1, 3, 2)])
def test_a_checkpoint_of_any_number_of_ranks_continues_on_any_other(
    sizes: tuple[int, ...], processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    settings = recipe(SETTINGS, kl=KLPenalty(coefficient=0.5), warmup_updates=3, mini_batches=2, ema_decay=0.8)
    case = replace(case_of(rng, settings, steps=len(sizes)), moved=False)
    expected = sharded_cases.alone(sharded_cases.train, case)
    resume = None
    for step, size in enumerate(sizes):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        offloaded = replace(case, settings=recipe(settings, states="host" if size == 3 else "device"))
        arguments = offloaded, folder, resume, step
        if size == 1:
            found = sharded_cases.alone(sharded_cases.save, *arguments)
        else:
            found = processes.run(size, sharded_cases.save, *arguments)[0]
            assert len(list((folder / "shards").glob("*.distcp"))) == size
        [update] = found.updates
        assert_same_update(update, expected.updates[step])
        exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
        for name, weight in found.weights.items():
            assert np.array_equal(exported[name].numpy(), weight)
        resume = folder
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(found.weights[name], weight, rtol=0, atol=1e-10)

    alone = None
    for step in range(len(sizes)):
        sharded_cases.alone(sharded_cases.save, case, tmp_path / f"alone-{step}", alone, step)
        alone = tmp_path / f"alone-{step}"
    averages = [AutoModelForCausalLM.from_pretrained(at / "ema", dtype=torch.float64) for at in (resume, alone)]
    for (name, average), (_, ours) in zip(*(model.named_parameters() for model in averages), strict=True):
        np.testing.assert_allclose(average.detach(), ours.detach(), rtol=0, atol=1e-10, err_msg=name)
        assert not np.array_equal(average.detach(), found.weights[name])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 3, 2, 1), (3, 1, 3, 2)])
def test_moments_in_8_bits_are_the_same_on_any_number_of_ranks(
    sizes: tuple[int, ...], processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    """Gradients of other ranks differ in their last digits, which can give a number the next code."""
    case = replace(case_of(rng, recipe(SETTINGS, states="8bit"), steps=len(sizes)), moved=False)
    case = replace(case, overrides={"intermediate_size": 300})  # whose matrices are quantized
    expected, resume = sharded_cases.alone(sharded_cases.train, case), None
    for step, size in enumerate(sizes):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        arguments = case, folder, resume, step
        if size == 1:
            found = sharded_cases.alone(sharded_cases.save, *arguments)
        else:
            found = processes.run(size, sharded_cases.save, *arguments)[0]
        state = torch.load(folder / "state.pt", weights_only=True)["optimizer"]
        quantized = sum(s["exp_avg"].dtype == torch.uint8 for s in state["state"].values()) if size == 1 else 0
        assert len(state.get("quantized", ())) == (0 if size == 1 else 6)
        assert quantized == (6 if size == 1 else 0)
        resume = folder
    for name, weight in expected.weights.items():
        differing = np.abs(found.weights[name] - weight) > 1e-10
        assert differing.mean() < 0.01, name
        np.testing.assert_allclose(
            found.weights[name], weight, rtol=0, atol=SETTINGS.scaled_learning_rate, err_msg=name
        )


@pytest.mark.slow
def test_adapters_are_saved_in_the_format_of_peft_and_continue_in_one_process(
    processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    case = replace(case_of(rng, SETTINGS, "even", steps=2), lora=2, moved=False)
    expected = sharded_cases.alone(sharded_cases.train, case)
    for size in (1, 3):
        (tmp_path / str(size)).mkdir()
    whole = sharded_cases.alone(sharded_cases.save, case, tmp_path / "1", None, 0)
    processes.run(3, sharded_cases.save, case, tmp_path / "3", None, 0)
    one, three = (load_file(tmp_path / str(size) / "adapter_model.safetensors") for size in (1, 3))
    assert one.keys() == three.keys()
    assert len(one) == len(whole.gradients)
    for name, weight in one.items():
        np.testing.assert_allclose(three[name].numpy(), weight.numpy(), rtol=0, atol=1e-10)
    configs = [json.loads((tmp_path / str(size) / "adapter_config.json").read_text()) for size in (1, 3)]
    for config in configs:
        config["target_modules"].sort()  # stored in any order
    assert configs[0] == configs[1]
    (tmp_path / "last").mkdir()
    continued = sharded_cases.alone(sharded_cases.save, case, tmp_path / "last", tmp_path / "3", 1)
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(continued.weights[name], weight, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_the_optimizer_of_a_sharded_run_is_taken_and_one_of_another_model_is_an_error(
    processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    case = case_of(rng, SETTINGS, "even")
    processes.run(2, sharded_cases.save, case, tmp_path, None, 0)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    state["shards"] = str(tmp_path / "shards")
    learner = sharded_cases.learner_of(case, ALONE)
    learner.load_optimizer_state(state)
    alone = sharded_cases.learner_of(case, ALONE)
    sharded_cases.steps(alone, case)
    taken, expected = (learner_of_state.state_dict()["optimizer"]["state"] for learner_of_state in (learner, alone))
    for index, moments in expected.items():
        for kind, value in moments.items():
            torch.testing.assert_close(taken[index][kind], value, rtol=1e-9, atol=1e-15)
    assert learner.state_dict()["updates"] == 0
    wider = sharded_cases.learner_of(replace(case, overrides={"hidden_size": 48}), ALONE)
    with pytest.raises(ValueError, match=r"belongs to a different model: .* should have shape .*, but has"):
        wider.load_optimizer_state(state)
    for file in (tmp_path / "shards").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"could not read the shards .*\(rank 0: .*; choose a different checkpoint"):
        learner.load_optimizer_state(state)
    (tmp_path / "shards" / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"could not read the shards .*metadata.*; choose a different checkpoint"):
        learner.load_optimizer_state(state)


def test_the_optimizer_of_another_model_in_one_process_is_an_error_on_every_rank(
    processes: RankProcesses, rng: np.random.Generator
) -> None:
    case = case_of(rng, SETTINGS, "even")
    alone = sharded_cases.learner_of(case, ALONE)
    sharded_cases.steps(alone, case)
    wider = replace(case, overrides={"hidden_size": 48})
    for error in processes.run(2, sharded_cases.take_optimizer, wider, alone.state_dict()):
        assert re.search(r"trainable tensor 0 has shape \(17, 48\), its moments \(17, 32\)", error)


@pytest.mark.slow
def test_adapters_in_float32_on_a_base_in_bfloat16(processes: RankProcesses, rng: np.random.Generator) -> None:
    case = replace(case_of(rng, SETTINGS, "even"), lora=2, dtype=torch.bfloat16)
    expected = sharded_cases.alone(sharded_cases.train, case)
    [got, _] = processes.run(2, sharded_cases.train, case)
    assert got.updates[0].loss == pytest.approx(expected.updates[0].loss, rel=0.1, abs=0.02)
    assert got.updates[0].grad_norm == pytest.approx(expected.updates[0].grad_norm, rel=0.1)
    assert got.gradients.keys() == expected.gradients.keys()
    assert all(g.dtype == np.float32 for g in got.gradients.values())


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4])
def test_the_learner_of_a_run_is_built_for_any_number_of_ranks(
    lora: int, processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    settings = {
        "model": str(save_tiny_model(tmp_path)),
        "data.sources": {"task": "countdown", "max_number": 5},
        "evaluation.num_prompts": 3,
        "sampling.max_new_tokens": 8,
        "dtype": "float64",
        "lora.rank": lora,
        "kl.coefficient": 0.1,
        "optimizer.mini_batches": 2,
        "engine.gradient_checkpointing": True,
    }
    case = case_of(rng, SETTINGS, "even")
    expected = sharded_cases.alone(sharded_cases.built, settings, case)
    assert_same(processes.run(2, sharded_cases.built, settings, case), expected, tolerance=1e-6)  # float32 norms
