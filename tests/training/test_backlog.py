"""The order of `Backlog` against an independent schedule, for random orders of events."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_support import END, WRONG, prompts_of
from brorl.algorithms.groups import Group
from brorl.prompts.stream import PromptStream
from brorl.training.backlog import Backlog, PromptStart
from brorl.tree import RolloutTree


def group_of(start: PromptStart) -> Group:
    tree = RolloutTree.from_responses(start.prompt.token_ids, [[WRONG, END]], [[0.0, 0.0]], [True])
    return Group(start.prompt, tree, np.zeros(1, bool), np.zeros(1), version=start.version)


@given(
    per_step=st.integers(1, 4), staleness=st.integers(0, 3), num_prompts=st.integers(1, 12), seed=st.integers(0, 2**20)
)
def test_steps_train_the_oldest_groups_as_soon_as_there_are_enough(
    per_step: int, staleness: int, num_prompts: int, seed: int
) -> None:
    """Newer prompts end earlier half of the time. A prompt is late only if newer groups filled a step while it was
    in progress."""
    generator = np.random.default_rng(seed)
    backlog = Backlog(PromptStream(prompts_of(num_prompts), 0), per_step, staleness)
    under_way: dict[int, PromptStart] = {}
    ready: list[PromptStart] = []
    overtaken: set[int] = set()

    def begin() -> None:
        under_way.update({start.serial: start for start in backlog.start()})

    def end_one() -> None:
        newest = generator.random() < 0.5
        start = under_way.pop(max(under_way) if newest else int(generator.choice(sorted(under_way))))
        kept = generator.random() < 0.8
        assert backlog.finish(start, group_of(start) if kept else None)
        ready.extend([start] * kept)
        begin()

    backlog.advance(0)
    begin()
    for step in range(1, 31):
        while (taken := backlog.take(step)) is None:
            assert len(ready) < per_step
            end_one()
        ready.sort(key=lambda start: start.version)
        trained, ready[:] = ready[:per_step], ready[per_step:]
        assert sorted(group.version for group in taken[0]) == [start.version for start in trained]
        overtaken |= {s for s, start in under_way.items() if start.version < trained[-1].version}
        begin()
        for _ in range(min(int(generator.integers(5)), len(under_way))):
            end_one()
        starts = under_way | {start.serial: start for start in ready}
        late = {serial for serial, start in starts.items() if start.version < step - staleness}
        assert late <= overtaken
        backlog.advance(step)
        begin()
