"""Rollouts of several turns against the enumeration of all transcripts of a small model."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import PreTrainedModel

from brorl.rollout.engine import Engine, SampleTask
from brorl.sampling import SamplingParams
from brorl.tools.calls import Call, Turn
from brorl.tools.settings import ToolSettings
from brorl.tools.turns import TurnEngine
from brorl.tree import RolloutTree
from tree_invariants import check_tree

END, CALL = 0, 1
FALSE_ALARM = 1e-6


class CountingReader:
    """A turn with one of some tokens calls a tool that says how many tokens it has, and how many calls came before.

    With `outcomes` above 1 the tool is not deterministic: the rollouts of a turn get results in turn.
    """

    def __init__(self, outcomes: int = 1, calling: Iterable[int] = (CALL,)) -> None:
        self.outcomes, self.calling = outcomes, frozenset(calling)
        self.num_read = self.num_run = self.num_made = 0

    def calls(self, token_ids: Sequence[int]) -> tuple[Call, ...]:
        self.num_read += 1
        return (Call("length", str(len(token_ids))),) if self.calling.intersection(token_ids) else ()

    def replies(self, turns: Sequence[Turn]) -> list[list[tuple[tuple[int, ...], int]]]:
        self.num_run += len({(turn.calls, turn.history) for turn in turns})
        self.num_made += sum(turn.count for turn in turns)
        return [
            [
                (reply_to(int(turn.calls[0].arguments), len(turn.history), outcome), count)
                for outcome in range(self.outcomes)
                if (count := len(range(outcome, turn.count, self.outcomes)))
            ]
            for turn in turns
        ]


def reply_to(length: int, earlier: int, outcome: int = 0) -> tuple[int, ...]:
    return (2 + length % 2, 2 + earlier, *[3] * outcome)


Transcript = tuple[tuple[int, ...], tuple[bool, ...], bool]  # tokens, which are given, whether it ended by itself


class Enumeration:
    """All transcripts of a model with the tool of `CountingReader`, and their log-probs (nats)."""

    def __init__(
        self, model: PreTrainedModel, sampling: SamplingParams, calling: frozenset[int], max_turns: int, room: int
    ) -> None:
        self.model, self.sampling, self.max_turns, self.room = model, sampling, max_turns, room
        self.calling, self.ends = calling, {END, *sampling.stop_token_ids}

    def next_token(self, ids: Sequence[int]) -> np.ndarray:
        """Log-probs of the next token, from the model's own forward pass; -inf where top-k drops a token."""
        with torch.no_grad():
            logit_V = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1].double()
        logit_V = logit_V / self.sampling.temperature
        if self.sampling.top_k:
            logit_V[logit_V < logit_V.topk(self.sampling.top_k).values[-1]] = -torch.inf
        return logit_V.log_softmax(0).numpy()

    def turns(
        self, before: tuple[int, ...], turn: tuple[int, ...] = ()
    ) -> Iterator[tuple[tuple[int, ...], float, bool]]:
        """Yield each turn that can follow some tokens: (turn, log-prob, whether it ended)."""
        for token, logprob in enumerate(self.next_token((*before, *turn))):
            longer = (*turn, token)
            if not np.isfinite(logprob):
                continue
            if token in self.ends or len(longer) == self.sampling.max_new_tokens:
                yield longer, float(logprob), token in self.ends
            else:
                for rest, of_rest, ended in self.turns(before, longer):
                    yield rest, float(logprob) + of_rest, ended

    def transcripts(
        self, prompt: tuple[int, ...], so_far: tuple[int, ...] = (), given: tuple[bool, ...] = (), earlier: int = 0
    ) -> Iterator[tuple[Transcript, float]]:
        for turn, logprob, ended in self.turns((*prompt, *so_far)):
            tokens, flags = (*so_far, *turn), (*given, *[False] * len(turn))
            if not (ended and self.calling.intersection(turn)):
                yield (tokens, flags, ended), logprob
                continue
            reply = reply_to(len(turn), earlier)
            if earlier + 1 == self.max_turns or len(tokens) + len(reply) > self.room:
                yield (tokens, flags, False), logprob
                continue
            longer, more = (*tokens, *reply), (*flags, *[True] * len(reply))
            for transcript, of_rest in self.transcripts(prompt, longer, more, earlier + 1):
                yield transcript, logprob + of_rest


def transcripts_of(tree: RolloutTree) -> dict[Transcript, tuple[int, float]]:
    """The count and the log-prob of each distinct transcript of a tree."""
    paths = [tree.path(int(leaf)) for leaf in tree.leaf]
    return {
        (tuple(tree.token[path].tolist()), tuple(tree.given[path].tolist()), finished): (
            count,
            tree.logprob[path].sum(),
        )
        for path, finished, count in zip(paths, tree.finished.tolist(), tree.leaf_count.tolist(), strict=True)
    }


def assert_transcripts_follow_the_model(
    engine: Engine,
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    num_rollouts: int,
    seed: int,
    bound: float,
    max_turns: int = 3,
    max_tokens: int = 12,
    calling: Iterable[int] = (CALL,),
) -> None:
    """Compare counts by chi-square, and log-probs, with the enumeration; each distinct call ran once."""
    reader = CountingReader(calling=calling)
    settings = ToolSettings(calculator=True, max_turns=max_turns, max_response_tokens=max_tokens)
    trees = TurnEngine(engine, reader, settings).sample(SampleTask(prompts, num_rollouts, sampling, seed))
    enumeration = Enumeration(model, sampling, reader.calling, max_turns, max_tokens - sampling.max_new_tokens)
    for prompt, tree in zip(prompts, trees, strict=True):
        check_tree(tree)
        expected = dict(enumeration.transcripts(prompt))
        assert sum(map(np.exp, expected.values())) == pytest.approx(1.0, rel=1e-6)
        found = transcripts_of(tree)
        assert found.keys() <= expected.keys()
        for transcript, (_, logprob) in found.items():
            assert abs(logprob - expected[transcript]) < bound
        observed = np.array([found.get(transcript, (0, 0.0))[0] for transcript in expected])
        mean = num_rollouts * np.exp(list(expected.values()))
        rare = mean < 8
        cells = [np.append(x[~rare], x[rare].sum()) for x in (observed, mean)]
        assert cells[0].size > 20
        assert chisquare(cells[0], cells[1] * cells[0].sum() / cells[1].sum()).pvalue > FALSE_ALARM
        assert tree.given.any()
        assert {len(flags) - sum(flags) for _, flags, _ in found} != {len(flags) for _, flags, _ in found}
    assert reader.num_run < reader.num_made / 20
