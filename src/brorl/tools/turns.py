"""Multi-turn rollouts: an engine that wraps another engine and continues responses that call tools.

The rollouts are sampled one turn at a time, as trees. Rollouts with equal tokens made equal calls, so each distinct
turn is parsed once, each distinct call runs once, and the next turn is sampled from each distinct transcript, for all
rollouts that share it. The result is one tree per prompt, in which tool results are nodes marked as given.

The seed of a later turn depends only on its prompt's seed and the tokens of its transcript. Trees therefore do not
depend on other prompts, and a resumed run samples the same trees. An engine that caches prompts computes a transcript's
earlier turns only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

import numpy as np
from torch import Tensor

from brorl.arrays import BoolArray, FloatArray, IntArray
from brorl.prompts.prompt import row_of
from brorl.rollout.engine import Engine, SampleTask
from brorl.tools.calls import Call, Turn
from brorl.tools.settings import ToolSettings
from brorl.tree import RolloutTree

_SEED_BYTES = 12  # prompt seeds are below 2**96


class CallReader(Protocol):
    """Parses the calls in turns, and answers them."""

    def calls(self, token_ids: Sequence[int]) -> tuple[Call, ...]:
        """Return the calls in a turn; none if the turn is an answer."""
        ...

    def replies(self, turns: Sequence[Turn]) -> list[list[tuple[tuple[int, ...], int]]]:
        """Return the replies to each turn: token ids up to the model's next turn, and how many rollouts get them.

        With deterministic tools, there is one reply per turn. The numbers add up to the turn's count.
        """
        ...


@dataclass(frozen=True)
class _Transcript:
    """A distinct sequence of turns and replies."""

    prompt: int  # index of its prompt
    count: int  # number of rollouts
    token: IntArray  # token ids after the prompt, shape [T]
    logprob: FloatArray  # log-probs (nats), 0 for given tokens, shape [T]
    given: BoolArray  # whether each token is from a reply, shape [T]
    finished: bool = True  # False if it was cut off at a limit
    calls: tuple[Call, ...] = ()  # calls of its last turn
    history: tuple[Call, ...] = ()  # calls of its earlier turns

    @classmethod
    def empty(cls, prompt: int, count: int) -> _Transcript:
        """Return the transcript before the first turn."""
        return cls(prompt, count, np.empty(0, np.int64), np.empty(0), np.empty(0, np.bool_))

    def followed_by(self, tree: RolloutTree, reader: CallReader) -> list[_Transcript]:
        """Return one longer transcript per distinct response in a tree, with parsed calls if the response finished."""
        edges = np.cumsum(tree.total_length)[:-1]
        paths = np.split(tree.response_nodes(), edges)
        return [
            replace(
                self,
                count=count,
                token=np.concatenate([self.token, tree.token[path]]),
                logprob=np.concatenate([self.logprob, tree.logprob[path]]),
                given=np.concatenate([self.given, tree.given[path]]),
                finished=finished,
                calls=reader.calls(tree.token[path].tolist()) if finished else (),
                history=self.history + self.calls,
            )
            for path, count, finished in zip(paths, tree.leaf_count.tolist(), tree.finished.tolist(), strict=True)
        ]

    def with_reply(self, token_ids: Sequence[int], count: int) -> _Transcript:
        """Append a reply to the last turn, for `count` of the rollouts."""
        return replace(
            self,
            count=count,
            token=np.concatenate([self.token, np.array(token_ids, np.int64)]),
            logprob=np.concatenate([self.logprob, np.zeros(len(token_ids))]),
            given=np.concatenate([self.given, np.ones(len(token_ids), np.bool_)]),
        )

    def cut(self) -> _Transcript:
        """Return the transcript cut off after its calls."""
        return replace(self, finished=False)

    def seed(self, prompt_seed: int) -> int:
        """Return the seed of the next turn; for the first turn, the prompt's seed."""
        if not self.token.size:
            return prompt_seed
        words = prompt_seed.to_bytes(_SEED_BYTES, "little") + self.token.astype("<i8").tobytes()
        return int.from_bytes(blake2b(words, digest_size=_SEED_BYTES).digest(), "little")


class TurnEngine:
    """Samples multi-turn responses; see `Engine`.

    A response ends with its first turn that does not call a tool. If it still calls a tool in the last turn that
    `settings` permits, or if its next turn might not fit, it ends with its calls and counts as cut off.
    """

    def __init__(self, engine: Engine, reader: CallReader, settings: ToolSettings) -> None:
        self._engine, self._reader, self._settings = engine, reader, settings

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._engine.version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on."""
        self._engine.load_weights(weights, version)

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.close()

    def sample(self, task: SampleTask) -> list[RolloutTree]:
        """Sample N rollouts of each prompt, with one or more turns; see `Sampler.sample`.

        `max_new_tokens` limits each turn.
        """
        room = self._settings.total_tokens(task.sampling.max_new_tokens) - task.sampling.max_new_tokens
        live = [_Transcript.empty(prompt, count) for prompt, count in enumerate(task.rollouts_P)]
        ended: list[_Transcript] = []
        for turns_left in range(self._settings.max_turns - 1, -1, -1):
            longer = self._sampled(live, task)
            ended += [transcript for transcript in longer if not transcript.calls]
            calling = [transcript for transcript in longer if transcript.calls]
            if turns_left:
                live, cut = self._replied(calling, task.prompts, room)
            else:
                live = []
                cut = [transcript.cut() for transcript in calling]
            ended += cut
            if not live:
                break
        return _trees(task.prompts, ended)

    def _sampled(self, live: Sequence[_Transcript], task: SampleTask) -> list[_Transcript]:
        """Sample the next turn of each transcript, and parse its calls."""
        seed_P = task.seed_P
        turns = SampleTask(
            [[*task.prompts[transcript.prompt], *transcript.token.tolist()] for transcript in live],
            [transcript.count for transcript in live],
            task.sampling,
            [transcript.seed(seed_P[transcript.prompt]) for transcript in live],
        )
        trees = self._engine.sample(turns)
        return [
            longer
            for transcript, tree in zip(live, trees, strict=True)
            for longer in transcript.followed_by(tree, self._reader)
        ]

    def _replied(
        self, calling: Sequence[_Transcript], prompts: Sequence[Sequence[int]], room: int
    ) -> tuple[list[_Transcript], list[_Transcript]]:
        """Reply to calls. Return the transcripts with room for another turn, and those that are cut off."""
        live: list[_Transcript] = []
        cut: list[_Transcript] = []
        turns = [
            Turn(transcript.calls, transcript.count, transcript.history, row_of(prompts[transcript.prompt]))
            for transcript in calling
        ]
        for transcript, replies in zip(calling, self._reader.replies(turns), strict=True):
            for token_ids, count in replies:
                if transcript.token.size + len(token_ids) <= room:
                    live.append(transcript.with_reply(token_ids, count))
                else:
                    cut.append(replace(transcript.cut(), count=count))
        return live, cut


def _trees(prompts: Sequence[Sequence[int]], ended: Sequence[_Transcript]) -> list[RolloutTree]:
    """Merge the transcripts of each prompt into a tree."""
    transcripts_P: list[list[_Transcript]] = [[] for _ in prompts]
    for transcript in ended:
        transcripts_P[transcript.prompt].append(transcript)
    return [
        RolloutTree.from_responses(
            prompt,
            [transcript.token.tolist() for transcript in transcripts],
            [transcript.logprob.tolist() for transcript in transcripts],
            [transcript.finished for transcript in transcripts],
            [transcript.given.tolist() for transcript in transcripts],
            [transcript.count for transcript in transcripts],
        )
        for prompt, transcripts in zip(prompts, transcripts_P, strict=True)
    ]
