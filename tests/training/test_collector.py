"""Dynamic sampling with refill, on a scripted engine: what is sampled is trained on once and in order."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from math import ceil, comb

import numpy as np
import pytest
from torch import Tensor

from brorl.activity import Activity, Round
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import RewardShaping
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream
from brorl.rollout.engine import SampleTask
from brorl.runs.checkpoint import CollectorState
from brorl.sampling import SamplingParams
from brorl.training.batch import Batch
from brorl.training.collector import NoGroupsError, SyncCollector, num_prompts_for_round
from brorl.tree import RolloutTree
from brorl.verdict import BATCH_TIMEOUT, Verdict
from brorl.verification.grade import Grader
from each_row import each_row
from recipes import recipe

NUM_ROLLOUTS = 6
RIGHT, WRONG, END = 7, 8, 9


class ScriptedEngine:
    """Gives the i-th prompt that it is ever asked for as many correct rollouts as the script says."""

    def __init__(self, num_correct: Iterable[int]) -> None:
        self.version = 0
        self._num_correct = iter(num_correct)
        self.calls: list[tuple[int, int]] = []  # prompts and seed of each call
        self.trees: list[tuple[RolloutTree, int]] = []  # every tree with its number of correct rollouts

    def sample(self, task: SampleTask) -> list[RolloutTree]:
        assert task.num_rollouts == NUM_ROLLOUTS
        assert task.sampling == SamplingParams(max_new_tokens=3)
        self.calls.append((len(task.prompts), task.seed))
        trees = []
        for prompt in task.prompts:
            correct = next(self._num_correct)
            responses = [[RIGHT, END]] * correct + [[WRONG, WRONG, END]] * (task.num_rollouts - correct)
            trees.append(RolloutTree.from_responses(prompt, responses))
            self.trees.append((trees[-1], correct))
        return trees

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert not list(weights)
        self.version = version


class RightVerifier:
    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        return [self.verify(prompt, response) for prompt, response in items]

    def verify(self, prompt: Prompt, response: str) -> Verdict:
        correct = response.startswith(prompt.reference)
        return Verdict(correct, 1.0 if correct else 0.0, None, "correct" if correct else "wrong", 0.0)


def prompts(num_prompts: int) -> list[Prompt]:
    return [Prompt(f"p{i}", str(i), (100 + i,), str(RIGHT), "scripted") for i in range(num_prompts)]


def collector(
    engine: ScriptedEngine,
    *,
    per_step: int = 4,
    dynamic: bool = True,
    max_tries: int = 3,
    max_pass_rate: float = 1.0,
) -> SyncCollector:
    return SyncCollector(
        engine=engine,
        stream=PromptStream(prompts(10), seed=0),
        grader=Grader({"scripted": RightVerifier()}, lambda tokens: " ".join(map(str, tokens)), RewardShaping()),
        config=recipe(
            rollouts_per_prompt=NUM_ROLLOUTS,
            prompts_per_step=per_step,
            max_new_tokens=3,
            enabled=dynamic,
            max_tries=max_tries,
            max_pass_rate=max_pass_rate,
        ),
    )


def collect(source: SyncCollector, step: int) -> tuple[list[Group], list[Group], Batch]:
    """Return the groups of a step, those that wait afterwards, and everything that was sampled."""
    batch = source.next_batch(step)
    waiting = list(source.state().carried)
    assert batch.num_carried == len(waiting)
    return batch.groups, waiting, batch


def test_every_round_reports_the_groups_and_the_cut_rollouts_of_the_step_so_far(rng: np.random.Generator) -> None:
    """With the groups that were carried; all wrong rollouts are cut."""

    class CuttingEngine(ScriptedEngine):
        def sample(self, task: SampleTask) -> list[RolloutTree]:
            return [replace(tree, finished=tree.length < 3) for tree in super().sample(task)]

    engine = CuttingEngine([int(c) for c in rng.choice([0, 0, 3], 400)])
    reports: list[tuple[Activity, int]] = []
    source = replace(
        collector(engine, max_tries=100), observe=lambda activity: reports.append((activity, len(engine.trees)))
    )
    carried: list[Group] = []
    for step in range(1, 6):
        reports.clear()
        first, before = len(engine.trees), len(carried)
        _, carried, _ = collect(source, step)
        for number, (report, at) in enumerate(reports, 1):
            correct = [c for _, c in engine.trees[first:at]]
            cut = sum(NUM_ROLLOUTS - c for c in correct) / max(len(correct) * NUM_ROLLOUTS, 1)
            assert report == Round(step, number, before + correct.count(3), 4, cut)


@pytest.mark.parametrize(("per_step", "max_pass_rate", "most"), [(1, 1.0, 5), (2, 0.5, 3), (5, 1.0, 5), (5, 0.4, 2)])
def test_every_mixed_group_is_trained_on_once_and_in_order(per_step: int, max_pass_rate: float, most: int) -> None:
    """Over many steps, with the surplus of each carried to the next; without the groups that are solved too often."""
    chance = np.random.default_rng(per_step)
    script = chance.choice([0, 0, 0, 2, 3, 4, 5, NUM_ROLLOUTS], 3000)
    engine = ScriptedEngine(script.tolist())
    source = collector(engine, per_step=per_step, max_tries=100, max_pass_rate=max_pass_rate)
    carried, trained, ever_carried = [], [], 0
    dropped = 0
    for step in range(1, 31):
        before = list(carried)
        groups, carried, batch = collect(source, step)
        assert len(groups) == per_step
        assert groups[: len(before)] == before[:per_step]  # the oldest first
        trained += groups
        ever_carried += len(carried)
        assert sum(g.tree.num_rollouts for g in batch.verified) == batch.summary().samples
        dropped += batch.summary().samples_dropped
    expected = [tree for tree, correct in engine.trees if 0 < correct <= most]
    assert dropped == NUM_ROLLOUTS * (len(engine.trees) - len(expected))
    seen = [g.tree for g in trained + carried]
    assert len(seen) == len(expected)
    assert all(a is b for a, b in zip(seen, expected, strict=True))
    assert ever_carried or per_step == 1
    assert len({seed for _, seed in engine.calls}) == len(engine.calls)  # no round repeats another's draws


def test_surplus_that_fills_a_step_samples_nothing() -> None:
    engine = ScriptedEngine([3] * 8)
    carried, _, _ = collect(collector(engine, per_step=8), 1)
    engine.calls.clear()
    source = collector(engine, per_step=3)
    source.load_state(CollectorState(carried=tuple(carried)))
    groups, surplus, batch = collect(source, 2)
    assert groups == carried[:3]
    assert surplus == carried[3:]
    assert not engine.calls
    assert batch.rounds == 0
    summary = batch.summary()
    assert summary.samples == summary.sampled_tokens == 0
    rollouts = sum(g.tree.num_rollouts for g in groups)
    assert summary.accuracy == sum(g.num_correct for g in groups) / rollouts > 0


def test_gives_up_after_max_tries_without_a_mixed_group_and_keeps_what_it_had() -> None:
    engine = ScriptedEngine([3, 0, 0, 6] + [0] * 100)
    with pytest.raises(NoGroupsError, match=r"in 3 rounds in a row \(no rollout was correct\)") as caught:
        collect(source := collector(engine, max_tries=3), 1)
    (kept,) = source.state().carried
    assert kept.num_correct == 3
    assert kept.tree is engine.trees[0][0]
    assert source.state().attempts == 1
    assert caught.value.batch.rounds == len(engine.calls)
    assert len(engine.calls) == 1 + 3
    assert "rollouts_per_prompt" in str(caught.value)


def test_rounds_are_sized_by_the_groups_that_are_kept() -> None:
    """Half of the mixed groups are above the limit, so that a round needs twice as many prompts."""
    engine = ScriptedEngine([1, 5] * 2000)
    source = collector(engine, per_step=60, max_pass_rate=0.5)
    for step in range(1, 8):
        collect(source, step)
    assert len(engine.calls) <= 10
    assert 110 < engine.calls[-1][0] < 180


def test_groups_above_the_limit_end_the_run_with_its_name() -> None:
    engine = ScriptedEngine([4, 5, 6, 0] * 100)
    with pytest.raises(NoGroupsError, match=r"2 of 4 groups were mixed .*max_pass_rate = 0\.5; raise"):
        collect(collector(engine, max_pass_rate=0.5), 1)


WRONG_VERDICT = Verdict(False, 0.0, "7", "wrong", 0.0)


@each_row(
    ("script", "wrong", "finished", "cause"),
    [
        ([NUM_ROLLOUTS], WRONG_VERDICT, True, "all rollouts were correct.*choose harder ones"),
        ([0, NUM_ROLLOUTS], WRONG_VERDICT, True, "in 2 of the last 4 groups.*more rollouts_per_prompt"),
        ([0], "verifier raised ValueError: x", True, "verifier raised ValueError: x.*fix the"),
        ([0], "timeout", True, r"4 of 4 verifications failed \(most often: timeout"),
        ([0], Verdict(False, 0.5, None, "partly", 0.0), True, "rewards.partial_credit: true"),
        ([0], WRONG_VERDICT, False, "24 of 24 rollouts were truncated at sampling.max_new_tokens"),
        ([0], "no answer", True, "found no answer in 4 of 4.*set prompt.template"),
        ([0], "unfinished thought", True, "4 of 4 .*end inside a thought.*thought_tags"),
        ([0], "no code block", True, "found no answer in 4 of 4.*set prompt.template"),
        ([0], WRONG_VERDICT, True, "first check the format and the verifier.*rollouts_per_prompt"),
    ],
)
def test_the_message_says_why_nothing_is_mixed(
    script: list[int], wrong: Verdict | str, finished: bool, cause: str
) -> None:
    verdict = Verdict(False, 0.0, None, wrong, 0.0) if isinstance(wrong, str) else wrong

    class GivenVerdict(RightVerifier):
        def verify(self, prompt: Prompt, response: str) -> Verdict:
            right = super().verify(prompt, response)
            return right if right.correct else verdict

    class CutEngine(ScriptedEngine):
        def sample(self, task: SampleTask) -> list[RolloutTree]:
            trees = super().sample(task)
            return [replace(t, finished=np.full(t.num_responses, finished)) for t in trees]

    source = collector(CutEngine(script * 100))
    grader = replace(source.grader, verifiers={"scripted": GivenVerdict()}, judged={"scripted"})  # it has worked before
    with pytest.raises(NoGroupsError, match=cause):
        collect(replace(source, grader=grader), 1)


def test_tries_count_rounds_in_a_row() -> None:
    """One mixed group starts the count afresh: there are more than `max_tries` rounds without one in all."""
    script = [*[0] * 8, 3, *[0] * 3, *[0] * 32, *[0] * 15, 3, *[0] * 32, 3, 3, *[0] * 30]
    engine = ScriptedEngine(script)
    groups, _, batch = collect(collector(engine, max_tries=3), 1)
    assert len(groups) == 4
    ends = np.cumsum([0, *(num_prompts for num_prompts, _ in engine.calls)])
    without = sum(not any(script[a:b]) for a, b in pairwise(ends))
    assert batch.rounds == len(engine.calls)
    assert without > 3


def enough(missing: int, fraction: float) -> int:
    """The least number of tosses with at least so many successes in nine of ten cases, by exact sums."""
    num_prompts = missing
    while True:
        below = sum(comb(num_prompts, k) * fraction**k * (1 - fraction) ** (num_prompts - k) for k in range(missing))
        if below <= 0.1:
            return num_prompts
        num_prompts += 1


def test_a_round_fills_its_step_in_nine_of_ten_cases(rng: np.random.Generator) -> None:
    """Against exact binomial sums, where neither the surplus nor the round is at its bound."""
    for _ in range(60):
        per_step, sampled = int(rng.integers(24, 80)), int(rng.integers(20, 200))
        missing, kept = int(rng.integers(per_step // 2, per_step + 1)), int(sampled * rng.uniform(0.4, 0.95))
        fraction = (kept + 1) / (sampled + 1)
        num_prompts = int(num_prompts_for_round(per_step, missing, kept, sampled))
        assert abs(num_prompts - enough(missing, fraction)) <= 1 + 0.02 * num_prompts
        assert num_prompts * fraction <= missing + per_step / 3 + 1


def test_one_lost_group_does_not_keep_a_surplus_alive(rng: np.random.Generator) -> None:
    """Where as many as are missing suffice in nine of ten cases, no more are sampled."""
    for missing in rng.integers(2, 200, 50).tolist():
        sampled = float(rng.uniform(50, 5000))
        lost = (1 - 0.92 ** (1 / missing)) * (sampled + 1)  # then all of the missing ones are kept in 92 of 100 cases
        assert num_prompts_for_round(200, missing, sampled - lost, sampled) == missing


def test_a_round_is_bounded(rng: np.random.Generator) -> None:
    counts = np.arange(1, 2000)
    assert num_prompts_for_round(2000, counts, 0, 0).tolist() == counts.tolist()  # nothing is known
    sampled = rng.integers(1, 5000, counts.size)
    assert num_prompts_for_round(2000, counts, sampled, sampled).tolist() == counts.tolist()  # all groups are kept
    for per_step in (1, 3, 16):
        assert num_prompts_for_round(per_step, per_step, 0, 500) == per_step  # the run may be about to give up
        assert num_prompts_for_round(per_step, per_step, 1, 500) == 6 * per_step
        for kept in range(21):  # few groups can be surplus, also where a step has few
            num_prompts = int(num_prompts_for_round(per_step, 1, kept, 20))
            assert 1 <= num_prompts <= max(per_step, ceil((1 + per_step / 3) * 21 / (kept + 1)))


@pytest.mark.slow
def test_once_the_fraction_is_known_a_step_takes_one_round(rng: np.random.Generator) -> None:
    """And samples no more in the long run; only the first step knows nothing."""
    per_step, steps, fraction = 12, 80, 0.55
    script = np.where(rng.random(20_000) < fraction, 3, 0)
    engine = ScriptedEngine(script.tolist())
    source = collector(engine, per_step=per_step)
    batches, waited = [], []
    for step in range(1, steps + 1):
        _, carried, batch = collect(source, step)
        batches.append(batch)
        waited.append(len(carried))
    assert engine.calls[0][0] == per_step
    assert 1.0 <= np.mean([batch.rounds for batch in batches[1:]]) < 1.3  # with as many as are missing it is 2.4
    total = sum(len(batch.verified) for batch in batches)
    assert sum(script[:total] == 3) == steps * per_step + waited[-1]  # what was found was trained on, or waits
    assert np.mean(waited) < per_step / 2
    assert max(waited) <= 2 * per_step


def test_a_source_that_continues_samples_rounds_of_the_same_sizes(rng: np.random.Generator) -> None:
    """The counts of earlier steps are in the state, and without them the rounds would be others."""
    script = np.where(rng.random(4_000) < 0.3, 3, 0).tolist()
    whole = ScriptedEngine(script)
    source = collector(whole, per_step=8, max_tries=100)
    states = []
    for step in range(1, 7):
        states.append((source.state(), len(whole.trees), len(whole.calls)))
        source.next_batch(step)
    state, trees, calls = states[3]
    assert 0 < state.seen[0] < state.seen[1]
    sizes = {}
    for seen in (state.seen, (0.0, 0.0)):
        engine = ScriptedEngine(script[trees:])
        again = collector(engine, per_step=8, max_tries=100)
        again.load_state(state._replace(seen=seen))
        for step in range(4, 7):
            again.next_batch(step)
        sizes[seen] = engine.calls
    assert sizes[state.seen] == whole.calls[calls:]
    assert sizes[0.0, 0.0] != whole.calls[calls:]


def test_programs_that_were_cut_off_are_timeouts_with_a_count_of_their_own() -> None:
    _, _, batch = collect(collector(ScriptedEngine([0, 6, 4, 3]), dynamic=False), 1)
    batch.sampled = [
        replace(p, verdicts=[v if v.correct else replace(v, reason=BATCH_TIMEOUT) for v in p.verdicts])
        for p in batch.sampled
    ]
    summary = batch.summary()
    assert summary.verifier_batch_timeouts == summary.verifier_timeouts == 3  # distinct incorrect responses


def test_a_group_has_the_version_of_the_weights_that_sampled_it(rng: np.random.Generator) -> None:
    """Also while it waits for later steps, whose weights are newer."""
    engine = ScriptedEngine([int(c) for c in rng.choice([0, 3, 3], 400)])
    source, sampled_at, waited = collector(engine, max_tries=100), {}, 0
    for step in range(1, 21):
        groups, waiting, batch = collect(source, step)
        sampled_at |= {id(g.tree): step - 1 for g in batch.verified}
        assert [g.version for g in groups + waiting] == [sampled_at[id(g.tree)] for g in groups + waiting]
        waited += sum(g.version < step - 1 for g in groups)
        source.publish([], step)
    assert waited


@pytest.mark.parametrize("found", [True, False])
def test_a_step_that_is_undone_is_sampled_again(found: bool, rng: np.random.Generator) -> None:
    """With the same prompts and seeds, whether it found its groups or not."""
    later = rng.choice([0, 0, 3], 400).tolist() if found else [0] * 400
    engine = ScriptedEngine([0, 3, 3, 3, 3, 3, *later])
    source = collector(engine, max_tries=100 if found else 2)
    outcome = nullcontext() if found else pytest.raises(NoGroupsError)
    collect(source, 1)
    source.publish([], 1)
    before = source.state()
    source.rewind()  # the weights are newer than the last step: there is nothing to undo
    assert source.state() == before
    assert before.carried
    calls = []
    for _ in range(2):
        first = len(engine.calls)
        with outcome:
            source.next_batch(2)
        calls.append(engine.calls[first])
        assert source.state() != before
        source.rewind()
        assert source.state() == before
    assert calls[0] == calls[1]


def test_only_groups_that_wait_are_given_old_logprobs() -> None:
    engine = ScriptedEngine([3] * 40)
    asked: list[list[Group]] = []

    def keep(groups: Sequence[Group]) -> list[Group]:
        asked.append(list(groups))
        return [replace(g, old_logprob_M=np.zeros(g.tree.num_unique_tokens)) for g in groups]

    source = replace(collector(engine, per_step=3), with_old_logprobs=keep)
    source.load_state(CollectorState(carried=tuple(collect(collector(engine, per_step=8), 1)[0])))
    groups, waiting, _ = collect(source, 2)
    assert [g.old_logprob_M is None for g in groups] == [True] * 3
    assert [g.old_logprob_M is None for g in waiting] == [False] * 5
    assert [g.tree for g in waiting] == [g.tree for g in asked[0]]
