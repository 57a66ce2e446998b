"""Responses that a peer sampled one by one: their work, and the fraction that a tree would compute.

In: token ids. Out: counts, and the `Run` of a peer that only samples. Plain Python, because peers have separate
environments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from measurement import Run
from workload import Work


@dataclass(frozen=True)
class Group:
    """The responses of one prompt.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        responses: Token ids of each response, an end token included.
    """

    num_prompt_tokens: int
    responses: list[list[int]]


def sampling_run(seconds: float, cpu_seconds: float, groups: Sequence[Group]) -> Run:
    """Return the run of a peer that sampled these responses."""
    return Run(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        sampled_tokens=sum(len(response) for group in groups for response in group.responses),
        unique_tokens=sum(num_distinct_prefixes(group.responses) for group in groups),
        work=Work.total(
            flat_work(group.num_prompt_tokens, [len(response) for response in group.responses]) for group in groups
        ),
        parts={"generation": seconds},
    )


def flat_work(num_prompt_tokens: int, lengths: Sequence[int]) -> Work:
    """Count the work of sampling the responses of one prompt one by one, with the prompt computed once.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        lengths: Tokens of each response, >= 1. The last token is drawn and not fed.
    """
    fed = sum(length - 1 for length in lengths)
    attended = sum(num_prompt_tokens * (n - 1) + (n - 1) * n // 2 for n in lengths)
    prompt_attended = num_prompt_tokens * (num_prompt_tokens + 1) // 2
    return Work(num_prompt_tokens + fed, prompt_attended + attended, 1 + fed)


def num_distinct_prefixes(responses: Sequence[Sequence[int]]) -> int:
    """Count the distinct non-empty prefixes of responses, as a check that peers sample from one distribution."""
    ordered = sorted(tuple(response) for response in responses)
    shared = sum(_common_length(a, b) for a, b in pairwise(ordered))
    return sum(len(response) for response in ordered) - shared


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return min(len(a), len(b))
