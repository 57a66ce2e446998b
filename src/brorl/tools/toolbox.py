"""A run's tools in its model's call format: parses the calls in turns, runs them, and writes the replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from brorl.config.settings import TrainConfig
from brorl.model.load import end_tokens
from brorl.prompts.question import ENVIRONMENT_DOMAIN, Question, with_text_after
from brorl.sampling import decode_tokens
from brorl.tools.calls import Call, Failure, Turn
from brorl.tools.environments import calls_text
from brorl.tools.format import ToolFormat, check_turn_ends
from brorl.tools.functions import ToolRunner
from brorl.tools.settings import ToolSettings
from brorl.tree import RolloutTree

_PROBE = "1234567890"  # a result that does not occur in any template


@dataclass(frozen=True, eq=False)
class Toolbox:
    """Parses and answers a model's calls."""

    tools: ToolRunner
    format: ToolFormat
    settings: ToolSettings
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def for_run(cls, config: TrainConfig, model: str, tokenizer: PreTrainedTokenizerBase, tools: ToolRunner) -> Toolbox:
        """Choose the call format for a model, given by name or folder.

        Raises:
            UserError: If the model's chat template does not show tools.
        """
        check_turn_ends(tokenizer, config.sampling.stop)
        stop_token_ids = end_tokens(model, tokenizer, config.sampling.stop)
        form = ToolFormat.choose(tokenizer, config.tools, config.prompt, tools.schemas, stop_token_ids)
        return cls(tools, form, config.tools, tokenizer)

    def calls_text(self, turns: Sequence[Sequence[int]]) -> str:
        """Return all calls in a response's turns, in the form that the environment verifier reads."""
        return calls_text([call for turn in turns for call in self.calls(turn)])

    def observed(self, questions: Sequence[Question]) -> list[Question]:
        """Append to each environment question the text that the environment's reset returns for its row."""
        rows = [question.reference for question in questions if question.domain == ENVIRONMENT_DOMAIN]
        observations = iter(self.tools.observations(rows))
        return [
            with_text_after(question, next(observations)) if question.domain == ENVIRONMENT_DOMAIN else question
            for question in questions
        ]

    def calls(self, token_ids: Sequence[int]) -> tuple[Call, ...]:
        """Return the calls in a turn; none if the turn is an answer."""
        return self.format.parse(self.format.turn_text(token_ids))

    def replies(self, turns: Sequence[Turn]) -> list[list[tuple[tuple[int, ...], int]]]:
        """Run the calls in these turns, each distinct call once, and return the reply tokens (see `CallReader`)."""
        reply_of: dict[tuple[tuple[str, str], ...], tuple[int, ...]] = {}
        replies = []
        for turn, outcomes in zip(turns, self.tools.run(turns), strict=True):
            counts = Counter[tuple[int, ...]]()
            for results, count in outcomes:
                names = (call.name or "tool" for call in turn.calls)
                shown = tuple((name, self._cut(result.text)) for name, result in zip(names, results, strict=True))
                if shown not in reply_of:
                    reply_of[shown] = self.format.reply(shown)
                counts[reply_of[shown]] += count
            replies.append([*counts.items()])
        return replies

    def _cut(self, text: str) -> str:
        """Truncate text to the maximum length of a result."""
        limit = self.settings.max_result_tokens
        if len(text.encode()) <= limit:  # a token has at least one byte
            return text
        token_ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return text if len(token_ids) <= limit else decode_tokens(self.tokenizer, token_ids[:limit], special=True)

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a reply; for a single result, without the text that the format puts around it."""
        text = decode_tokens(self.tokenizer, token_ids, special=True)
        before, after = self._frame
        is_framed = text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)
        return text[len(before) : len(text) - len(after)] if is_framed else text.strip()

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """The text before a result and the text after it."""
        text = decode_tokens(self.tokenizer, self.format.reply([("tool", _PROBE)]), special=True)
        before, _, after = text.partition(_PROBE)
        return before, after

    def metrics(self, trees: Sequence[RolloutTree]) -> dict[str, Any]:
        """Return the `tools` section of the metrics (docs/reference/metrics.md): turns, calls and failures.

        Failures are counted as the model saw them.
        """
        num_rollouts = sum(tree.num_rollouts for tree in trees)
        num_turns = sum(tree.num_turns for tree in trees)
        num_calls = 0
        distinct: set[Call] = set()
        failures = Counter[str]()
        for tree in trees:
            for node in tree.first_given.tolist():
                count = int(tree.count[node])
                calls = self.calls(_turn_before(tree, node))
                num_calls += count * len(calls)
                distinct.update(calls)
                for failure in self.tools.failures(calls, decode_tokens(self.tokenizer, _reply_from(tree, node))):
                    failures[failure] += count
        return {
            "turns": num_turns / num_rollouts if num_rollouts else 1.0,
            "calls": num_calls,
            "distinct_calls": len(distinct),
            "given_tokens": sum(tree.num_given_tokens for tree in trees),
            "failures": {failure.value: failures[failure] for failure in Failure if failures[failure]},
        }


def _turn_before(tree: RolloutTree, node: int) -> list[int]:
    """Return the tokens of the turn before a reply, which begins at `node`."""
    path = tree.path(int(tree.parent[node]))
    replies = np.flatnonzero(tree.given[path])  # positions of tokens from replies
    return tree.token[path[replies[-1] + 1 :] if replies.size else path].tolist()  # type: ignore[no-any-return]


def _reply_from(tree: RolloutTree, node: int) -> list[int]:
    """Return the tokens of the reply that begins at `node`, up to its first fork."""
    stop = node + 1
    while stop < tree.num_nodes and tree.given[stop] and tree.parent[stop] == stop - 1:
        stop += 1
    return tree.token[node:stop].tolist()  # type: ignore[no-any-return]
