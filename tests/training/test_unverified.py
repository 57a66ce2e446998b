"""Rollouts that infrastructure failures kept from being verified: training equals training without them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from brorl.algorithms.advantages import advantage_estimator
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import AdvantageSettings, CosineLength, RewardShaping
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream
from brorl.rollout.engine import SampleTask
from brorl.training.batch import Batch
from brorl.training.collector import NoGroupsError, RetryPolicy, SyncCollector
from brorl.tree import RolloutTree
from brorl.verdict import Verdict, unverified_verdict
from brorl.verification.grade import Grader
from recipes import recipe
from small_models import random_tree, rollouts
from tree_invariants import check_tree

REASON = "unverified: a worker was lost"
SHAPING = RewardShaping(cosine_length=CosineLength(every_steps=1, on_steps=1))
Rollout = tuple[tuple[int, ...], bool]  # the tokens of one rollout, and whether it is finished


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


class LosingVerifier:
    """An odd sum of tokens is correct; some texts are lost always, others at their first verification."""

    def __init__(self, always: Iterable[str] = (), once: Iterable[str] = ()) -> None:
        self.always, self.once = set(always), set(once)
        self.asked: Counter[str] = Counter()

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        return [self._verify(text) for _, text in items]

    def _verify(self, text: str) -> Verdict:
        self.asked[text] += 1
        if text in self.always or (text in self.once and self.asked[text] == 1):
            return unverified_verdict("a worker was lost", 0.25)
        correct = sum(map(int, text.split())) % 2 == 1
        return Verdict(correct, float(correct), None, "correct" if correct else "wrong", 0.0)


def grader_of(verifier: LosingVerifier, shaping: RewardShaping = SHAPING) -> Grader:
    return Grader({"sums": verifier}, decode, shaping, 9)


def prompt_of(tree: RolloutTree, name: str = "p") -> Prompt:
    return Prompt(name, "text", tree.prompt_ids, "", "sums")


def logprob_of(prefix: tuple[int, ...]) -> float:
    """A made-up log-prob that depends on the prefix alone, so that trees agree on shared nodes."""
    return -0.01 - (sum((i + 1) * t for i, t in enumerate(prefix)) % 97) / 50


def with_logprobs(tree: RolloutTree) -> RolloutTree:
    paths = [tuple(tree.token[tree.path(node)].tolist()) for node in range(tree.num_unique_tokens)]
    return replace(tree, logprob=np.array([logprob_of(path) for path in paths]))


def rollouts_of(tree: RolloutTree) -> list[Rollout]:
    return [(tuple(tree.token[path].tolist()), bool(tree.finished[leaf])) for leaf, path in rollouts(tree)]


def rebuilt(tree: RolloutTree, lost: set[str]) -> RolloutTree | None:
    """The tree of the rollouts that are not lost, built from the beginning; a truncated one is never verified."""
    kept = [(r, done) for r, done in rollouts_of(tree) if not (done and decode(r) in lost)]
    if not kept:
        return None
    logprobs = [[logprob_of(r[: i + 1]) for i in range(len(r))] for r, _ in kept]
    return RolloutTree.from_responses(tree.prompt_ids, [r for r, _ in kept], logprobs, [done for _, done in kept])


def random_trees(rng: np.random.Generator, num_trees: int) -> list[RolloutTree]:
    return [with_logprobs(random_tree(rng, num_rollouts=14, max_length=5)) for _ in range(num_trees)]


def lost_texts(rng: np.random.Generator, trees: Sequence[RolloutTree], fraction: float = 0.3) -> set[str]:
    texts = sorted({decode(r) for tree in trees for r, _ in rollouts_of(tree)})
    return {text for text in texts if rng.random() < fraction}


def test_a_group_is_that_of_the_remaining_rollouts(rng: np.random.Generator) -> None:
    num_lost = 0
    for round_ in range(60):
        (tree,) = random_trees(rng, 1)
        if round_ % 3 == 0:  # without truncated rollouts, which need no verification
            tree = replace(tree, finished=np.ones(tree.num_responses, np.bool_))
        lost = lost_texts(rng, [tree], rng.random() if round_ % 6 else 1.0)
        grader = grader_of(LosingVerifier(always=lost))
        (whole,) = grader.verify([prompt_of(tree)], [tree])
        whole, verdicts = grader.rewarded(whole, step=1), whole.verdicts
        group = whole.verified
        smaller = rebuilt(tree, lost)
        assert whole.num_unverified == tree.num_rollouts - (smaller.num_rollouts if smaller else 0)
        if smaller is None or (smaller.num_rollouts == 1 and smaller != tree):
            assert group is None
            num_lost += 1
            continue
        plain = grader_of(LosingVerifier())
        expected = plain.rewarded(*plain.verify([prompt_of(tree)], [smaller]), step=1)
        group_tree, expected_tree = (replace(g.tree, logprob=np.round(g.tree.logprob, 12)) for g in (group, expected))
        check_tree(group_tree)
        assert group_tree == expected_tree
        assert group.correct_L.tolist() == expected.correct_L.tolist() == [v.correct for v in group.verdicts]
        assert group.reward_L.tolist() == expected.reward_L.tolist()
        assert whole.tree == tree
        assert np.isnan(whole.reward_L).tolist() == [v.unverified for v in verdicts]
        assert whole.reward_L[~np.isnan(whole.reward_L)].tolist() == group.reward_L.tolist()
    assert num_lost


def test_a_lost_response_is_verified_again_after_all_others(rng: np.random.Generator) -> None:
    """Each lost text twice, every other one once; a second success is an ordinary verdict."""
    trees = random_trees(rng, 5)
    always, once = lost_texts(rng, trees, 0.2), lost_texts(rng, trees, 0.4)
    calls: list[list[str]] = []

    class Recording(LosingVerifier):
        def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
            calls.append([text for _, text in items])
            return super().verify_all(items)

    prompts = [prompt_of(tree, f"p{i}") for i, tree in enumerate(trees)]
    verifier = Recording(always)
    verifier.once = once
    verdicts_PL = [group.verdicts for group in grader_of(verifier, RewardShaping()).verify(prompts, trees)]
    texts_PL = [[decode(r) for r, _ in tree.responses()] for tree in trees]
    asked = [(p, t) for p, (ts, tree) in enumerate(zip(texts_PL, trees, strict=True))
             for t, done in zip(ts, tree.finished, strict=True) if done]  # fmt: skip
    assert len(calls) == 2
    assert Counter(calls[0]) == Counter(t for _, t in dict.fromkeys(asked))
    assert set(calls[1]) <= always | once
    assert always & set(calls[0]) <= set(calls[1])
    for texts, verdicts, tree in zip(texts_PL, verdicts_PL, trees, strict=True):
        for text, verdict, done in zip(texts, verdicts, tree.finished, strict=True):
            assert verdict.unverified == (bool(done) and text in always)
            assert verdict.reason == (
                "truncated" if not done else REASON if text in always
                else "correct" if sum(map(int, text.split())) % 2 else "wrong"
            )  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 4, 9])
def test_pass_at_k_of_a_group_that_became_too_small_is_that_of_fewer_attempts(size: int) -> None:
    tree = RolloutTree.from_responses((1,), [[2 if i == 0 else 3, 4 + i] for i in range(size)])
    group = Group(prompt_of(tree), tree, tree.token[tree.parent[tree.leaf]] == 2, np.zeros(size))
    group = replace(group, reward_L=group.correct_L.astype(float))
    small = advantage_estimator(AdvantageSettings(estimator="pass_at_k", k=4))([group])
    same = advantage_estimator(AdvantageSettings(estimator="pass_at_k", k=min(4, size - 1)))([group])
    assert small[0].tolist() == same[0].tolist()
    assert small[0].any()


class CoinEngine:
    """Draws responses of one number and an end token; the numbers of a prompt are equally likely."""

    version = 0

    def __init__(self, numbers: Sequence[Sequence[int]], seed: int) -> None:
        self._numbers = numbers
        self._rng = np.random.default_rng(seed)
        self.drawn: list[tuple[int, list[tuple[int, int]]]] = []
        self.num_calls = 0

    def sample(self, task: SampleTask) -> list[RolloutTree]:
        assert task.sampling.max_new_tokens == 2
        assert task.seed
        self.num_calls += 1
        trees = []
        for (prompt,) in task.prompts:
            drawn = [(int(n), 0) for n in self._rng.choice(self._numbers[prompt], task.num_rollouts)]
            self.drawn.append((prompt, drawn))
            trees.append(RolloutTree.from_responses((prompt,), drawn))
        return trees

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise AssertionError(f"no weights are loaded here, not {weights} of version {version}")


def collector(
    numbers: Sequence[Sequence[int]], verifier: LosingVerifier, seed: int = 0, **changes: object
) -> SyncCollector:
    prompts = [Prompt(f"p{i}", str(i), (i,), "", "sums", f"s{i % 2}") for i in range(len(numbers))]
    return SyncCollector(
        engine=CoinEngine(numbers, seed),
        stream=PromptStream(prompts, seed=0),
        grader=grader_of(verifier, RewardShaping()),
        config=recipe(
            rollouts_per_prompt=8,
            max_new_tokens=2,
            seed=seed,
            **{"max_tries": 20, "prompts_per_step": 6, **changes},
        ),
    )


def engine_of(source: SyncCollector) -> CoinEngine:
    assert isinstance(source.engine, CoinEngine)
    return source.engine


def check_against_draws(batch: Batch, engine: CoinEngine, lost: set[int]) -> None:
    """Compare groups and sums with plain counting over everything that was drawn."""
    draws: dict[int, list[tuple[int, int]]] = {}
    for prompt, drawn in engine.drawn:
        draws.setdefault(prompt, []).extend(drawn)
    kept = {p: [r for r in drawn if r[0] not in lost] for p, drawn in draws.items()}
    alive = {p: rs for p, rs in kept.items() if len(rs) > 1 or len(rs) == len(draws[p])}
    assert {g.prompt.token_ids[0] for g in batch.verified} == set(alive)
    for group in batch.verified:
        rest = alive[group.prompt.token_ids[0]]
        assert group.tree == RolloutTree.from_responses(group.tree.prompt_ids, rest)
        odd_L = [n % 2 == 1 for n in group.tree.token[::2]]
        assert [v.correct for v in group.verdicts] == group.correct_L.tolist() == odd_L
        assert group.reward_L.tolist() == [float(c) for c in group.correct_L]
    num_lost = sum(len(draws[p]) - len(kept[p]) for p in draws)
    all_kept = [r for rs in alive.values() for r in rs]
    odd = [n % 2 == 1 for n, _ in all_kept]
    summary = batch.summary()
    assert summary.samples == sum(map(len, draws.values()))
    assert summary.sampled_tokens == 2 * summary.samples
    assert summary.distinct_responses == sum(len(set(drawn)) for drawn in draws.values())
    assert (summary.samples_unverified or 0) == num_lost
    assert (summary.groups_unverified or 0) == len(draws) - len(alive)
    assert (summary.unverified_reasons or {}) == ({REASON: num_lost} if num_lost else {})
    assert summary.groups == len(alive)
    mixed = [p for p, rs in alive.items() if 0 < sum(n % 2 for n, _ in rs) < len(rs)]
    assert summary.groups_mixed == len(mixed)
    assert summary.groups_all_correct == sum(all(n % 2 for n, _ in rs) for rs in alive.values())
    assert summary.accuracy == summary.reward == pytest.approx(sum(odd) / max(len(odd), 1))
    dropped = [rs for p, rs in alive.items() if p not in mixed]
    gone = dropped if batch.dynamic_sampling.enabled else ()
    assert summary.samples_dropped == sum(map(len, gone))
    assert summary.sampled_tokens_dropped == 2 * sum(map(len, gone))
    assert summary.unique_tokens_dropped == sum(2 * len(set(rs)) for rs in gone)
    for name, record in (summary.by_source or {}).items():
        rows = [rs for p, rs in alive.items() if f"s{p % 2}" == name]
        assert record.groups == len(rows)
        assert record.accuracy == pytest.approx(np.mean([n % 2 for rs in rows for n, _ in rs]))
    assert len(batch.sampled) == len(draws)
    for group in batch.sampled:
        drawn = draws[group.prompt.token_ids[0]]
        assert group.tree == RolloutTree.from_responses(group.tree.prompt_ids, drawn)
        assert [v.unverified for v in group.verdicts] == [n in lost for n in group.tree.token[::2].tolist()]
    complete = {g.prompt.token_ids[0] for g in batch.complete}
    assert complete == {p for p in alive if len(alive[p]) == len(draws[p])}


def random_numbers(rng: np.random.Generator, num_lists: int) -> list[list[int]]:
    """For each prompt a few numbers; 50 to 53 are lost. Some prompts have only these, some only even or odd ones."""
    chosen = []
    for _ in range(num_lists):
        kind = rng.random()
        low = 50 if kind < 0.1 else 1
        numbers = rng.integers(low, 54 if low == 50 else 20, 4)
        if low == 1 and kind < 0.3:
            numbers = numbers * 2
        if low == 1 and rng.random() < 0.5:
            numbers[0] = rng.integers(50, 54)
        chosen.append(numbers.tolist())
    return chosen


LOST = set(range(50, 54))
LOST_TEXTS = {f"{n} 0" for n in LOST}


@pytest.mark.parametrize("dynamic", [True, False])
def test_sums_and_groups_are_those_of_the_verified_rollouts(dynamic: bool, rng: np.random.Generator) -> None:
    source = collector(
        random_numbers(rng, 120), LosingVerifier(LOST_TEXTS), int(rng.integers(1 << 30)),
        enabled=dynamic, prompts_per_step=25,
    )  # fmt: skip
    batch = source.next_batch(1)
    check_against_draws(batch, engine_of(source), LOST)
    assert len(batch.groups) == 25
    assert len(batch.complete) < len(batch.sampled)
    if dynamic:
        assert all(g.is_mixed for g in batch.groups)


def test_nothing_changes_where_all_responses_were_verified(rng: np.random.Generator) -> None:
    """A response that is lost once is verified again: the batch and its metrics have no trace of it."""
    numbers = [rng.integers(1, 20, 4).tolist() for _ in range(200)]
    texts = {f"{n} 0" for n in range(1, 20, 3)}
    seed = int(rng.integers(1 << 30))
    batches = [collector(numbers, LosingVerifier(once=once), seed).next_batch(1) for once in ((), texts)]
    summaries = [batch.summary() for batch in batches]
    assert summaries[0] == summaries[1]
    assert summaries[0].samples_unverified is None
    for a, b in zip(*(batch.groups for batch in batches), strict=True):
        assert a.tree == b.tree
        assert a.reward_L.tolist() == b.reward_L.tolist()


@pytest.mark.parametrize(("dynamic", "max_tries"), [(True, 10), (True, 1), (False, 10)])
@pytest.mark.parametrize("numbers", [[50, 51], [50, 51, 52] * 20 + [2]], ids=["all", "most"])
def test_a_machine_that_verifies_nothing_ends_the_run(
    dynamic: bool, max_tries: int, numbers: list[int], rng: np.random.Generator
) -> None:
    seed = int(rng.integers(1 << 30))
    source = collector([numbers] * 40, LosingVerifier(LOST_TEXTS), seed, enabled=dynamic, max_tries=max_tries)
    steps = iter(range(1, 4))
    with pytest.raises(NoGroupsError, match="most often: unverified: a worker was lost") as raised:
        list(map(source.next_batch, steps))
    assert raised.value.unverified
    assert (raised.value.batch.summary().samples_unverified or 0) > 0
    assert source.state().attempts == 1
    assert engine_of(source).num_calls == 3  # rounds, in one step or in several


def test_rounds_without_a_verified_group_are_lost() -> None:
    """One verified rollout of two has nothing to be compared with."""
    retries = RetryPolicy(recipe(max_tries=1).dynamic_sampling)
    tree = RolloutTree.from_responses((1,), [[3], [50]])
    verdicts = [Verdict(True, 1.0, None, "correct", 0.0), unverified_verdict("a worker was lost")]
    group = Group.from_verdicts(prompt_of(tree), tree, verdicts)
    for _ in range(3):
        assert not retries.is_over
        retries.add([group])
    assert retries.is_over
    assert retries.error(Batch()).unverified


def test_a_machine_that_recovers_does_not_end_the_run(rng: np.random.Generator) -> None:
    """Two bad rounds and a good one, again and again."""

    class Recovering(LosingVerifier):
        def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
            self.asked["calls"] += 1
            texts = {text for _, text in items}
            self.always = texts if (self.asked["calls"] - 1) // 2 % 2 == 0 and self.bad else set()
            return super().verify_all(items)

        bad = True

    verifier = Recovering()
    source = collector([[1, 2, 3]] * 40, verifier, int(rng.integers(1 << 30)), enabled=False)
    for step in range(1, 9):
        verifier.bad, verifier.asked["calls"] = True, 0
        batch = source.next_batch(step)
        assert len(batch.groups) == 6
        assert batch.summary().groups_unverified == 6


def test_fruitless_rounds_name_the_machine_if_most_verifications_were_lost(rng: np.random.Generator) -> None:
    """Half of the distinct responses are enough for the sentence, but not for the end of the run."""
    source = collector(
        [[2] * 7 + [50, 51, 52]] * 40, LosingVerifier(LOST_TEXTS), int(rng.integers(1 << 30)), max_tries=2,
    )  # fmt: skip
    with pytest.raises(NoGroupsError, match=r"verifications failed \(most often: unverified: a worker") as raised:
        source.next_batch(1)
    assert not raised.value.unverified
