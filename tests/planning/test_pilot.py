"""The pilot: gradients against autograd and enumeration, timings, memory, and a model that does not change."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import brorl.planning.gradient_noise as gradients_module
import brorl.planning.step_cost as timing_module
from brorl.activity import Activity, Stage
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import RewardShaping
from brorl.console.screen import StatusLine
from brorl.planning.gradient_noise import NoiseMoments, gradient_products, noise_moments, prompt_gradient
from brorl.planning.pilot import NoKeptGroupsError, PilotCounts, generator_of, measure
from brorl.planning.step_cost import mean_rounds, sample_groups, timing_sizes
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.training.collector import SyncCollector
from brorl.training.local_parts import LocalParts
from brorl.tree import RolloutTree
from brorl.verdict import Verdict
from brorl.verification.grade import Grader
from recipes import recipe
from small_models import flattened_logprobs, plain_logprobs, random_tree, rollouts, small_model

TEMPERATURE = 0.9
LENGTH = 3
SETTINGS = recipe(
    learning_rate=1e-2, mini_batches=2, temperature=TEMPERATURE, max_new_tokens=LENGTH, prompts_per_step=4,
    store_rollouts_every=2,
)  # fmt: skip
SILENT = print


class FirstTokenVerifier:
    """Correct is what begins with one of the tokens that the reference lists."""

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        return [self.verify(prompt, response) for prompt, response in items]

    def verify(self, prompt: Prompt, response: str) -> Verdict:
        correct = response.split(" ")[0] in prompt.reference
        return Verdict(correct, float(correct), None, "correct" if correct else "wrong", 0.0)


def prompts(num_prompts: int, reference: str = "23") -> list[Prompt]:
    return [Prompt(f"p{i}", str(i), (1 + i % 3, 1 + i // 3 % 3, 2), reference, "token") for i in range(num_prompts)]


def make_parts(model: PreTrainedModel, seed: int = 0, reference: str = "23", **changes: Any) -> LocalParts:
    return LocalParts(
        engine=NativeEngine(model, 0),
        model=model,
        stream=PromptStream(prompts(20, reference), seed),
        grader=Grader({"token": FirstTokenVerifier()}, lambda tokens: " ".join(map(str, tokens)), RewardShaping()),
        config=recipe(SETTINGS, seed=seed, **changes),
    )


def flat_gradient(model: PreTrainedModel) -> np.ndarray:
    return np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])


def test_a_prompts_gradient_by_autograd_over_rollouts(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)))
    tree = random_tree(rng, num_rollouts=9)
    reward_L = rng.normal(size=tree.num_responses)
    group = Group(prompts(1)[0], tree, reward_L > 0, reward_L)
    count_L = rng.multivariate_hypergeometric(tree.leaf_count, tree.num_rollouts // 2)
    gradient = prompt_gradient(model, group, count_L, make_parts(model))

    chosen, left = [], count_L.copy()
    for place, (leaf, _) in enumerate(rollouts(tree)):
        if left[leaf]:
            left[leaf] -= 1
            chosen.append((place, leaf))
    rewards = np.array([reward_L[leaf] for _, leaf in chosen])
    model.zero_grad()
    (rows,) = flattened_logprobs(model, [tree], TEMPERATURE)
    total = torch.zeros((), dtype=torch.float64)
    for i, (place, _) in enumerate(chosen):
        others = np.delete(rewards, i).mean()
        total = total + (rewards[i] - others) * rows[place].sum() / len(chosen)
    total.backward()
    expected = flat_gradient(model)
    assert np.linalg.norm(expected) > 1e-6
    np.testing.assert_allclose(gradient, expected, atol=1e-10 * np.linalg.norm(expected))


def test_a_projection_keeps_inner_products(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_module, "_SKETCH", 256)
    monkeypatch.setattr(gradients_module, "_PIECE", 1024)
    shapes = [(37, 20), (900,), (11, 300), (5,)]

    def project(vectors: Sequence[np.ndarray]) -> np.ndarray:
        parameters = [torch.nn.Parameter(torch.zeros(v.shape, dtype=torch.float64)) for v in vectors]
        for parameter, vector in zip(parameters, vectors, strict=True):
            parameter.grad = torch.from_numpy(vector)
        return gradients_module.projected_gradient(parameters)

    errors, repeats = [], 80
    for _ in range(repeats):
        a, b = ([rng.normal(size=s) for s in shapes] for _ in range(2))
        whole = sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))
        size = np.sqrt(np.prod([sum(float((x**2).sum()) for x in v) for v in (a, b)]))
        errors.append((project(a) @ project(b) - whole) / size)
        total = project([x + y for x, y in zip(a, b, strict=True)])
        np.testing.assert_allclose(total, project(a) + project(b), atol=1e-9)
    assert abs(np.mean(errors)) < 6 / np.sqrt(256 * repeats)
    assert 0.5 < np.std(errors) * np.sqrt(256) < 2
    ones = project([np.ones(s) for s in shapes])  # would add up if signs did not differ from place to place
    assert 0.5 < ones @ ones / sum(int(np.prod(s)) for s in shapes) < 2


class Tabular:
    """Every response of some prompts under a model, with its probability, reward and score: exact expectations."""

    def __init__(self, model: PreTrainedModel, parts: LocalParts, some: Sequence[Prompt]) -> None:
        vocabulary = model.config.vocab_size
        middle = [r for n in range(1, LENGTH) for r in product(range(1, vocabulary), repeat=n - 1)]
        responses = [(*m, 0) for m in middle] + list(product(range(1, vocabulary), repeat=LENGTH - 1))
        responses = [r for r in responses if r[-1] == 0] + [
            (*r, t) for r in responses if r[-1] != 0 or len(r) == LENGTH - 1 for t in range(vocabulary) if 0 not in r
        ]
        responses = sorted(set(responses))
        self.per_prompt = []
        for prompt in some:
            logprobs = plain_logprobs(model, [prompt.token_ids] * len(responses), responses, TEMPERATURE)
            scores = []
            for logprob in logprobs:
                model.zero_grad()
                logprob.sum().backward(retain_graph=True)
                scores.append(flat_gradient(model))
            p = np.exp([float(lp.detach().sum()) for lp in logprobs])
            assert p.sum() == pytest.approx(1)
            text = [parts.grader.decode(r) for r in responses]
            finished = np.array([r[-1] == 0 for r in responses])
            reward = np.array([FirstTokenVerifier().verify(prompt, t).score for t in text]) * finished
            self.per_prompt.append((p, reward, np.array(scores)))

    def moments(self, rng: np.random.Generator, num_rollouts: int, repeats: int = 6_000) -> NoiseMoments:
        """Expected moments; the variance within prompts by drawing many groups."""
        mean = np.array([(p * r) @ s for p, r, s in self.per_prompt])
        products = mean @ mean.T
        off = products.sum() - np.trace(products)
        within = []
        for (p, r, s), g in zip(self.per_prompt, mean, strict=True):
            count = rng.multinomial(num_rollouts, p, repeats)
            baseline = count @ r / num_rollouts
            weight = count * (r - baseline[:, None]) / (num_rollouts - 1)
            within.append(num_rollouts * (np.einsum("by,yz,bz->b", weight, s @ s.T, weight).mean() - g @ g))
        num = len(mean)
        return NoiseMoments(*map(np.array, (off / (num * (num - 1)), np.trace(products) / num, np.mean(within))))


@pytest.mark.slow
def test_moments_are_those_of_all_responses_there_are(rng: np.random.Generator) -> None:
    model = small_model(vocab_size=4, seed=int(rng.integers(1 << 30)), num_hidden_layers=1, hidden_size=8,
                        intermediate_size=8, scale=0.1)  # fmt: skip
    parts = make_parts(model, enabled=False)
    some = prompts(4)
    exact = Tabular(deepcopy(model), parts, some).moments(rng, num_rollouts=5)
    found = []
    scratch = deepcopy(model)
    for _ in range(30):
        groups = sample_groups(parts, some, 10, int(rng.integers(1 << 30))).groups
        found.append(noise_moments(gradient_products(scratch, groups, parts, rng)))
    for name in ("mean_squared", "prompt_squared", "within"):
        values = np.array([float(getattr(m, name)) for m in found])
        error = values.std(ddof=1) / np.sqrt(values.size)
        truth = float(getattr(exact, name))
        assert abs(values.mean() - truth) < 7 * error + 0.02 * abs(truth), (name, values.mean(), truth, error)
    assert float(exact.within) > 0


def test_groups_that_are_dropped_have_no_gradient(rng: np.random.Generator) -> None:
    """With dynamic sampling: rewards that differ among incorrect responses do not train."""
    model = small_model()
    trees = [random_tree(rng, num_rollouts=8) for _ in range(2)]
    groups = [
        Group(prompts(1)[0], t, np.arange(t.num_responses) < kept, rng.normal(size=t.num_responses))
        for t, kept in zip(trees, (0, 1), strict=True)
    ]
    parts = make_parts(model)
    products = gradient_products(model, groups, parts, rng)
    assert products.gram_PP[0, 0] == products.across_P[0] == products.apart_P[0] == 0
    assert products.gram_PP[1, 1] > 0
    assert gradient_products(model, groups, make_parts(model, enabled=False), rng).gram_PP[0, 0] > 0
    assert all(p.grad is None for p in model.parameters())


@pytest.fixture(scope="module")
def measured_parts() -> LocalParts:
    return make_parts(small_model(vocab_size=5, seed=3, dtype=torch.float32))


@pytest.fixture(scope="module")
def measured(measured_parts: LocalParts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    before = {name: tensor.clone() for name, tensor in measured_parts.model.state_dict().items()}
    said: list[str] = []
    phases: list[str] = []
    status = StatusLine(Stage("loading"), clock=lambda: 0.0)

    def observe(activity: Activity) -> None:
        status.observe(activity)
        phases.append(status.line())

    observed = replace(measured_parts, observe=observe)
    measurements = measure(observed, 10, 8, np.array([4, 8, 16, 64]), tmp_path_factory.mktemp("scratch"), said.append)
    assert not said
    return measurements, before, phases


def test_the_model_stays_as_it_was(measured: tuple, measured_parts: LocalParts) -> None:
    _, before, _ = measured
    after = measured_parts.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in measured_parts.model.parameters())
    assert not measured_parts.model.training


def test_what_is_measured(measured: tuple) -> None:
    measurements, _, _ = measured
    assert measurements.counts.correct_P.shape == (10,)
    assert measurements.counts.nodes_PJ.shape == (10, 4)
    assert (np.diff(measurements.counts.nodes_PJ, axis=1) > 0).all()
    assert (measurements.counts.responses_PJ <= measurements.counts.nodes_PJ + 1e-9).all()
    np.testing.assert_array_equal(measurements.counts.trained_PJ, measurements.counts.nodes_PJ)
    assert set(measurements.cost.costs) == {"generation", "verification", "training", "diagnostics", "storing"}
    assert measurements.cost.per_step["storing"] == 0.5
    assert {p.num_rollouts for p in measurements.timings} >= {8, 32, 64}
    for timing in measurements.timings:
        assert all(seconds > 0 for seconds in timing.seconds.values())
        assert set(timing.seconds) == set(measurements.cost.costs)
        assert timing.work.updates == 2
        assert timing.work.trained_nodes >= timing.work.unique_tokens
    summary = measurements.summary
    assert summary.num_prompts == 10
    assert summary.num_rollouts == 8
    assert summary.accuracy == measurements.counts.correct_P.mean() / 8
    assert 0 < summary.entropy < np.log(5)
    assert 1 <= summary.mean_length <= LENGTH
    assert measurements.counts.length_P.mean() == pytest.approx(summary.mean_length)


def test_the_status_line_says_what_the_pilot_does(measured: tuple) -> None:
    measurements, _, lines = measured
    work = list(dict.fromkeys(line.partition(" for 0s")[0] for line in lines))
    mixed = ((measurements.counts.correct_P > 0) & (measurements.counts.correct_P < 8)).nonzero()[0]
    assert work[0] == "sampling the pilot"
    assert work[1 : 1 + mixed.size] == [f"measuring the gradient of prompt {p + 1} of 10" for p in mixed]
    sizes = [line.removeprefix("warming up ") for line in work if line.startswith("warming up")]
    timed = [
        f"timing {what} ({i} of 3)" for i in (1, 2, 3) for what in (*sizes, "the other stages on the pilot's groups")
    ]
    assert work[1 + mixed.size :] == [*(f"warming up {size}" for size in sizes), *timed]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_pilot(measured: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing_module, "_REPEATS", 1)
    again = make_parts(small_model(vocab_size=5, seed=3, dtype=torch.float32))
    wanted = np.array([4, 8, 16, 64])
    counts = measured[0].counts
    same = measure(again, 10, 8, wanted, tmp_path, SILENT).counts
    np.testing.assert_array_equal(same.correct_P, counts.correct_P)
    np.testing.assert_array_equal(same.nodes_PJ, counts.nodes_PJ)
    np.testing.assert_allclose(same.products.gram_PP, counts.products.gram_PP, rtol=1e-4, atol=1e-9)
    parts = [make_parts(again.model, seed) for seed in range(3)]
    seeds = {generator_of(run_parts, p).integers(1 << 62) for run_parts in parts for p in (1, 2, 10, 11)}
    assert len(seeds) == 12


def test_a_pilot_without_a_mixed_group_is_rejected(tmp_path: Path) -> None:
    parts = make_parts(small_model(vocab_size=5), reference="9")  # no token of the vocabulary
    with pytest.raises(NoKeptGroupsError, match="all correct: 0, all incorrect: 8") as caught:
        measure(parts, 8, 4, np.array([4]), tmp_path, SILENT)
    assert caught.value.exit_code == 1


def test_a_pilot_above_the_limit_is_rejected(tmp_path: Path) -> None:
    """With N = 512, one correct rollout of the pilot's four is already too much."""
    parts = make_parts(small_model(vocab_size=5), rollouts_per_prompt=512, max_pass_rate=0.01)
    with pytest.raises(NoKeptGroupsError, match=r"are above dynamic_sampling\.max_pass_rate = 0\.01"):
        measure(parts, 8, 4, np.array([4]), tmp_path, SILENT)


def test_timed_steps_are_no_larger_than_the_pilot() -> None:
    for num_prompts, num_rollouts, per_step, most in product((8, 64, 300), (4, 64), (1, 16, 512), (16, 2048)):
        for quick in (True, False):
            sizes = timing_sizes(num_prompts, num_rollouts, per_step, most, quick)
            limit = num_prompts * num_rollouts // (1 if quick else 4)
            assert 1 <= len(sizes) <= 4
            for n, p in sizes:
                assert n * p <= max(limit, n)
                assert 1 <= p <= min(max(per_step, 1), num_prompts)
                assert n <= max(most, 16)
    assert timing_sizes(64, 64, 16, 2048, True) == [(16, 4), (16, 16), (256, 16), (512, 8)]


@pytest.mark.slow
def test_rounds_are_those_of_the_collector(rng: np.random.Generator) -> None:
    """The real SyncCollector on an engine whose groups are mixed by the toss of a coin."""
    fraction, per_step, steps = 0.35, 6, 300

    class Coins:
        rounds, version = 0, 0

        def sample(self, task: SampleTask) -> list[RolloutTree]:
            self.rounds += 1
            return [RolloutTree.from_responses(p, [[2 if rng.random() < fraction else 1], [1]]) for p in task.prompts]

    engine = Coins()
    parts = make_parts(small_model(vocab_size=4), reference="2")
    collector = SyncCollector(
        engine=engine, stream=parts.stream, grader=parts.grader,
        config=recipe(parts.config, rollouts_per_prompt=2, prompts_per_step=per_step, max_tries=1000),
    )  # fmt: skip
    rounds, sampled = [], 0
    for step in range(steps):
        before = engine.rounds
        batch = collector.next_batch(step)
        rounds.append(engine.rounds - before)
        sampled += len(batch.verified)
    error = np.std(rounds) / np.sqrt(steps) + np.std(rounds) / np.sqrt(64 * 24)
    assert abs(np.mean(rounds) - mean_rounds(fraction, per_step)) < 5 * error
    assert sampled / steps == pytest.approx(per_step / fraction, rel=0.15)


def test_nodes_of_a_limited_number_of_responses(rng: np.random.Generator) -> None:
    parts = make_parts(small_model(vocab_size=5))
    some = prompts(6)
    groups = sample_groups(parts, some, 40, 5).groups
    wanted = np.array([8, 40, 400])
    products = gradient_products(deepcopy(parts.model), groups, parts, rng)
    few = replace(parts, config=recipe(parts.config, max_responses_per_outcome=2))
    counts = PilotCounts.of(few, groups, wanted, products)
    assert (counts.trained_PJ <= counts.nodes_PJ).all()
    assert (counts.trained_PJ <= 4 * LENGTH + 1e-9).all()
    assert (counts.trained_PJ > 0).all()
    assert (np.diff(counts.trained_PJ, axis=1) >= -1e-9).all()
    np.testing.assert_array_equal(PilotCounts.of(parts, groups, wanted, products).trained_PJ, counts.nodes_PJ)
