"""An asynchronous collector over a pool with a virtual clock: staleness, memory, stragglers, and its accounts."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_support import N, WordyEngine, by_tokens, grader, prompts_of, virtual_collector
from brorl.activity import Activity, Decoding
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream
from brorl.rollout.engine import SampleTask
from brorl.runs.checkpoint import CollectorState
from brorl.sampling import SamplingParams
from brorl.training.async_collector import AsyncCollector
from brorl.training.batch import Batch
from brorl.training.collector import NoGroupsError, SyncCollector
from brorl.tree import RolloutTree
from brorl.verdict import Verdict, unverified_verdict
from virtual_pool import VirtualPool


def steps_of(collector: Any, pool: VirtualPool, first: int, last: int, learning: Sequence[float]) -> list[Batch]:
    """Train steps: take groups, let the learner work, publish."""
    batches = []
    for step in range(first, last + 1):
        batches.append(collector.next_batch(step))
        pool.advance(learning[step % len(learning)])
        collector.publish([], step)
    return batches


learning_times = st.lists(st.floats(0.0, 60.0), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    staleness=st.integers(0, 3),
    workers=st.integers(1, 6),
    per_step=st.integers(1, 4),
    mixed=st.sampled_from([0.4, 1.0]),
    learning=learning_times,
    seed=st.integers(0, 1000),
)
def test_staleness_and_memory_are_bounded_and_no_prompt_is_lost(
    staleness: int,
    workers: int,
    per_step: int,
    mixed: float,
    learning: list[float],
    seed: int,
) -> None:
    """For random durations; every prompt that began was trained, left out by its outcome, or is still in the collector.

    The collector passes over only late prompts of the stream.
    """
    engine = WordyEngine(mixed_fraction=mixed, longest=12)
    collector, pool = virtual_collector(
        engine, workers=workers, per_step=per_step, staleness=staleness, seed=seed, max_tries=1000
    )
    begun: list[str] = []
    were_late: set[str] = set()
    begin = collector._backlog.start

    def start() -> Any:
        were_late.update(collector._backlog._slow)  # a prompt that is done in time is soon no longer among them
        starts = begin()
        begun.extend(s.prompt.id for s in starts)
        held = collector._backlog.num_ready + len(collector._backlog._under_way)
        assert held <= per_step * (staleness + 1)
        return starts

    collector._backlog.start = start  # type: ignore[method-assign]
    collector.publish([], 0)
    ended: Counter[str] = Counter()
    for step in range(1, 11):
        batch = collector.next_batch(step)
        assert len(batch.groups) == per_step
        for group in batch.groups:
            assert 0 <= step - 1 - group.version <= step
            assert (-group.tree.logprob == group.version).all()  # the weights that sampled it
        updates_G = [step - 1 - g.version for g in batch.groups]
        assert batch.ahead["staleness_mean"] == pytest.approx(np.mean(updates_G))
        assert batch.ahead["staleness_max"] == max(updates_G)
        assert batch.ahead["groups_late"] == sum(updates > staleness for updates in updates_G)
        ended.update(g.prompt.id for g in batch.groups)
        ended.update(g.prompt.id for g in batch.verified if not g.is_mixed)
        pool.advance(learning[step % len(learning)])
        collector.publish([], step)
    waiting, plain = collector._backlog.state()
    plain_stream = collector.stream.state_dict()
    rest = [g.prompt.id for g in waiting] + plain["pending"]
    assert len(begun) + len(collector._backlog._pending) == ended.total() + len(rest)
    stream = PromptStream(prompts_of(11), 0)
    taken = Counter(p.id for p in stream.take(sum(plain_stream["turns"])))
    passed_over = taken - (ended + Counter(rest))
    assert taken == ended + Counter(rest) + passed_over  # what the stream gave, each once
    assert passed_over.keys() <= were_late


@pytest.mark.slow
@given(learning=learning_times, mixed=st.booleans(), seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_without_staleness_the_groups_are_those_of_sampling_in_turn(
    learning: list[float], mixed: bool, seed: int
) -> None:
    """The same prompts, trees and order in every step, where sampling in turn carries no surplus."""
    fraction = 1.0 if mixed else 0.5
    ahead, pool = virtual_collector(WordyEngine(fraction), staleness=0, enabled=mixed, seed=seed)
    engine = WordyEngine(fraction)
    in_turn = SyncCollector(engine=engine, stream=PromptStream(prompts_of(11), 0), grader=grader(), config=ahead.config)
    ahead.publish([], 0)
    in_turn.publish([], 0)
    for step in range(1, 8):
        ours, theirs = ahead.next_batch(step), in_turn.next_batch(step)
        assert [g.prompt for g in ours.groups] == [g.prompt for g in theirs.groups]
        assert [g.tree for g in ours.groups] == [g.tree for g in theirs.groups]
        assert [g.version for g in ours.groups] == [g.version for g in theirs.groups] == [step - 1] * 3
        assert [g.reward_L.tolist() for g in ours.groups] == [g.reward_L.tolist() for g in theirs.groups]
        assert ours.summary().samples == theirs.summary().samples
        pool.advance(learning[step % len(learning)])
        ahead.publish([], step)
        in_turn.publish([], step)


def straggling(slow_s: float) -> Callable[[SampleTask, Sequence[RolloutTree]], float]:
    """Return durations with which the prompt p0 takes `slow_s` seconds."""

    def duration(task: SampleTask, trees: Sequence[RolloutTree]) -> float:
        return slow_s if task.prompts[0][0] == 100 else by_tokens(task, trees)

    return duration


def num_under_way(collector: AsyncCollector, name: str) -> int:
    return sum(start.prompt.id == name for start in collector._backlog._under_way.values())


def test_a_straggler_blocks_no_step_and_trains_late() -> None:
    """One prompt takes far longer than the others; one copy of it is sampled, and it trains as soon as it is done."""
    collector, pool = virtual_collector(WordyEngine(longest=5), workers=6, duration=straggling(200.0), num_prompts=12)
    collector.publish([], 0)
    late = []
    for step in range(1, 81):
        (batch,) = steps_of(collector, pool, step, step, [5.0])
        assert num_under_way(collector, "p0") <= 1
        for group in batch.groups:
            if group.prompt.id == "p0":
                late.append((step, group.version, pool.now))
            else:
                assert step - 1 - group.version <= 1
        summary = batch.summary()
        assert summary.groups_late == (late[-1][0] == step if late else 0)
    assert len(late) >= 2
    assert all(step - 1 - version > 10 for step, version, _ in late)
    assert 200 <= late[0][2] < 220  # the step after it was done


@pytest.mark.slow
def test_a_straggler_of_many_epochs_begins_once_afterwards() -> None:
    """The stream returns it in every epoch meanwhile: its copies neither pile up nor fill steps."""

    def duration(task: SampleTask, _: Sequence[RolloutTree]) -> float:
        return 100.0 if task.prompts[0][0] == 100 and pool.now < 150 else 1.0

    collector, pool = virtual_collector(WordyEngine(), workers=6, duration=duration, num_prompts=6, enabled=False)
    collector.publish([], 0)
    epochs = 0
    for step in range(1, 201):
        (batch,) = steps_of(collector, pool, step, step, [1.0])
        assert sum(group.prompt.id == "p0" for group in batch.groups) <= 2
        assert len(collector._backlog.state()[1]["pending"]) <= collector._backlog.capacity + 1
        epochs += pool.now < 150
    assert epochs > 50


def test_as_many_long_responses_are_trained_as_were_drawn() -> None:
    """A prompt takes long if one of its responses is long. All draws are trained, but for those of the last steps."""
    drawn: list[RolloutTree] = []

    def is_long(tree: RolloutTree) -> bool:
        return int(tree.length.max()) > 30

    def duration(_: SampleTask, trees: Sequence[RolloutTree]) -> float:
        drawn.extend(trees)
        return 300.0 if any(map(is_long, trees)) else 1.0

    collector, pool = virtual_collector(WordyEngine(), workers=9, duration=duration, enabled=False)
    collector.publish([], 0)
    trained = [g.tree for batch in steps_of(collector, pool, 1, 100, [1.0]) for g in batch.groups]
    assert len(drawn) - len(trained) <= collector._backlog.capacity
    assert 0 < sum(map(is_long, drawn)) - collector._backlog.capacity <= sum(map(is_long, trained))


def test_learning_overlaps_with_sampling() -> None:
    """A learner as slow as the sampling takes all of its time; without staleness the two take turns."""
    seconds = {}
    for staleness in (0, 1):
        collector, pool = virtual_collector(
            WordyEngine(), staleness=staleness, workers=3, duration=lambda *_: 10.0, enabled=False
        )
        collector.publish([], 0)
        steps_of(collector, pool, 1, 20, [10.0])
        seconds[staleness] = pool.now
    assert seconds == {0: 400.0, 1: 210.0}


def test_prompts_with_one_outcome_are_replaced_while_others_are_still_sampled() -> None:
    engine = WordyEngine(mixed_fraction=0.3)
    collector, pool = virtual_collector(engine, max_tries=1000)
    collector.publish([], 0)
    batches = steps_of(collector, pool, 1, 15, [5.0])
    assert all(g.is_mixed for batch in batches for g in batch.groups)
    sampled = [g for batch in batches for g in batch.verified]
    assert len({id(g.tree) for g in sampled}) == len(sampled)  # each is reported once
    unmixed = sum(not g.is_mixed for g in sampled)
    assert unmixed > 15
    assert sum(batch.summary().samples_dropped for batch in batches) == unmixed * N


def test_gives_up_without_mixed_groups_and_keeps_what_it_had() -> None:
    class OneMixed(WordyEngine):
        def sample(self, task: SampleTask) -> list[RolloutTree]:
            self.mixed_fraction = float(not self.sampled)
            return super().sample(task)

    collector, _ = virtual_collector(OneMixed(), max_tries=2)
    collector.publish([], 0)
    with pytest.raises(NoGroupsError, match=r"in 2 rounds in a row \(no rollout was correct\)") as caught:
        collector.next_batch(1)
    assert caught.value.batch.num_kept == 1
    assert 1 + 2 * 3 <= len(caught.value.batch.verified) <= 1 + 3 * 3
    (kept,) = collector.state().carried
    assert kept.is_mixed
    assert collector.state().attempts == 1


def test_gives_up_when_the_machine_loses_most_verdicts() -> None:
    class Undecided:
        def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
            return [unverified_verdict("no memory") for _ in items]

    collector, _ = virtual_collector(WordyEngine())
    collector.grader = type(collector.grader)({"first": Undecided()}, collector.grader.decode, collector.grader.shaping)
    collector.publish([], 0)
    with pytest.raises(NoGroupsError, match=r"3 rounds in a row .*no memory"):
        collector.next_batch(1)


def test_a_state_continues_exactly(rng: np.random.Generator) -> None:
    """A run that is stored every third step, against one that is built anew from each state."""
    learning = rng.uniform(0, 30, 5).tolist()

    def fresh() -> tuple[Any, VirtualPool]:
        return virtual_collector(WordyEngine(mixed_fraction=0.6), staleness=2, max_tries=1000, workers=4)

    def train(again: bool) -> list[tuple[list[RolloutTree], dict[str, Any]]]:
        found = []
        collector, pool = fresh()
        collector.publish([], 0)
        for step in range(1, 16):
            (batch,) = steps_of(collector, pool, step, step, learning)
            found.append(([g.tree for g in batch.groups], batch.summary()))
            if step % 3 == 0:
                state = collector.state()
                if again:
                    assert state.ahead is not None
                    now = pool.now
                    collector, pool = fresh()
                    pool.advance(now)
                    collector.load_state(state)
                    collector.publish([], step)
        return found

    uninterrupted, resumed = train(False), train(True)
    for (trees, summary), (resumed_trees, other) in zip(uninterrupted, resumed, strict=True):
        assert trees == resumed_trees
        assert summary == other


def test_a_late_group_that_waits_is_counted_once_by_a_resumed_run() -> None:
    """With one group per step and two prompts that are done together, one of them waits, and becomes late."""

    def fresh() -> tuple[AsyncCollector, VirtualPool]:
        begun = iter([1.0, 5.0, 5.0])
        return virtual_collector(WordyEngine(), per_step=1, staleness=2, duration=lambda *_: next(begun, 1.0))

    collector, pool = fresh()
    collector.publish([], 0)
    batches = steps_of(collector, pool, 1, 3, [1.0, 1.0, 4.0])
    assert [batch.groups[0].version for batch in batches] == [0, 1, 0]
    state = collector.state()
    (late,) = state.carried
    assert late.version == 0
    resumed, _ = fresh()
    resumed.load_state(state)
    resumed.publish([], 3)
    for waiting in (collector, resumed):
        summary = waiting.next_batch(4).summary()
        assert (summary.groups_late, summary.prompts_late) == (1, 1)


def test_a_step_that_is_undone_is_sampled_again() -> None:
    collector, pool = virtual_collector(WordyEngine(), staleness=1)
    collector.publish([], 0)
    steps_of(collector, pool, 1, 3, [10.0])
    collector.state()
    before = collector._state()
    collector.rewind()  # weights were published: there is nothing to undo
    assert collector._state() == before
    collector.next_batch(4)
    assert collector._state() != before
    collector.rewind()
    assert collector._state() == before
    other, _ = virtual_collector(WordyEngine(), staleness=1)
    other.load_state(before)
    other.publish([], 3)
    again, resumed = collector.next_batch(4), other.next_batch(4)
    assert [g.tree for g in again.groups] == [g.tree for g in resumed.groups]
    assert Counter(g.prompt.id for g in again.groups) <= Counter(before.ahead["pending"])  # type: ignore[index]


def test_a_step_that_needs_no_new_samples_has_the_outcomes_of_its_groups() -> None:
    collector, _ = virtual_collector(WordyEngine(), per_step=3, staleness=1)
    collector.publish([], 0)
    first = collector.next_batch(1)
    collector.load_state(CollectorState(collector.stream.state_dict(), tuple(first.groups)))
    collector.publish([], 0)
    again = collector.next_batch(1)
    assert [g.prompt.id for g in again.groups] == [g.prompt.id for g in first.groups]
    summary = again.summary()
    assert summary.samples == 0
    correct = sum(int(g.tree.leaf_count[g.correct_L].sum()) for g in first.groups)
    assert summary.accuracy == summary.reward == correct / (3 * N) > 0


def test_steps_follow_the_weights() -> None:
    collector, _ = virtual_collector(WordyEngine())
    collector.publish([], 4)
    with pytest.raises(ValueError, match="step 4 needs version 3 of the weights, but the newest is version 4"):
        collector.next_batch(4)


def test_the_sampler_uses_the_newest_weights_while_training_goes_on() -> None:
    engine = WordyEngine()
    collector, pool = virtual_collector(engine, prompts_per_task=2)
    collector.publish([], 0)
    steps_of(collector, pool, 1, 2, [1.0])
    asked = [prompt.token_ids for prompt in prompts_of(5)]
    sampling = SamplingParams(max_new_tokens=8)
    trees = collector.sampler.sample(SampleTask(asked, [1, 2, 3, 4, 5], sampling, 77))
    assert trees == engine.sample(SampleTask(asked, [1, 2, 3, 4, 5], sampling, 77))
    assert {-float(tree.logprob.max()) for tree in trees} == {2.0}
    assert collector.next_batch(3).groups


def test_an_observer_that_raises_ends_the_wait() -> None:
    """As Ctrl-C does; nothing of a question to the sampler is left behind."""
    seen: list[Activity] = []

    def observe(activity: Activity) -> None:
        seen.append(activity)
        if isinstance(activity, Decoding):
            raise KeyboardInterrupt

    collector, _ = virtual_collector(WordyEngine(), observe=observe)
    collector.publish([], 0)
    with pytest.raises(KeyboardInterrupt):
        collector.sampler.sample(SampleTask([(100,)], 1, SamplingParams(max_new_tokens=8), 5))
    assert not collector._asked
    with pytest.raises(KeyboardInterrupt):
        collector.next_batch(1)
    assert seen
