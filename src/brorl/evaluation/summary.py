"""Results of an evaluation: by dataset, by domain and over all prompts, with 95% intervals. Each prompt counts once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from brorl.algorithms.groups import Group
from brorl.evaluation.mean_interval import mean_with_interval
from brorl.evaluation.pass_at_k import pass_at_k_of_each
from brorl.format import Estimate
from brorl.verdict import is_failure, is_timeout


@dataclass(frozen=True)
class PromptResult:
    """Counts over the n responses to one prompt."""

    prompt_id: str  # name of the prompt
    data_set: str  # its dataset
    domain: str  # its domain, which decides the verifier
    num_samples: int  # responses, duplicates included, n
    num_correct: int  # correct responses, 0 to the number of verified ones
    num_truncated: int  # truncated responses, 0 to n
    num_distinct: int  # distinct responses. Each is verified once.
    sampled_tokens: int  # tokens of all responses
    unique_tokens: int  # tokens computed
    verifier_timeouts: int  # distinct responses whose verification timed out. They count as incorrect.
    verifier_failures: int  # distinct responses whose verification failed otherwise. They count as incorrect.
    # responses that could not be verified because of infrastructure failures, 0 to n. They do not count.
    num_unverified: int = 0

    @property
    def num_verified(self) -> int:
        """Number of responses with a verdict, from which pass@k is estimated."""
        return self.num_samples - self.num_unverified


@dataclass(frozen=True)
class Summary:
    """Results over some prompts."""

    num_prompts: int  # number of prompts, P
    num_samples: int  # responses per prompt, n
    # pass@k for each k: the mean over prompts of unbiased estimates, with its interval. A prompt with fewer than k
    # verified responses does not count for this k; a k without any prompt is missing.
    pass_at: dict[int, Estimate]
    solved: int  # prompts with at least one correct response
    tokens_per_response: float  # mean number of tokens of a response
    truncation_rate: float  # fraction of truncated responses, 0 to 1
    verifier_timeouts: int  # distinct responses whose verification timed out
    verifier_failures: int  # distinct responses whose verification failed otherwise
    num_distinct: int  # distinct responses
    sampled_tokens: int  # tokens of all responses
    unique_tokens: int  # tokens computed
    seconds: float | None  # time of sampling, verifying and storing; None if it is unknown
    # responses that could not be verified because of infrastructure failures. They do not count.
    num_unverified: int = 0
    # prompts that do not count, by k; only the k with such prompts
    left_out: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationSummary:
    """Results of an evaluation."""

    overall: Summary  # over all prompts
    by_data_set: dict[str, Summary]  # for each dataset, in the given order
    by_domain: dict[str, Summary]  # for each domain, in alphabetical order


def default_ks(num_rollouts: int) -> tuple[int, ...]:
    """Return 1 and the powers of 2 up to half the number of samples, at most 256.

    For larger k the estimate averages few subsets, which share most of their responses.
    """
    return (1, *(2**i for i in range(1, 9) if 2 ** (i + 1) <= num_rollouts))


def count(group: Group) -> PromptResult:
    """Count the correct, truncated and distinct responses of a verified group, and their tokens."""
    prompt, tree, reasons = group.prompt, group.tree, [verdict.reason for verdict in group.verdicts]
    return PromptResult(
        prompt_id=prompt.id,
        data_set=prompt.source,
        domain=prompt.domain,
        num_samples=tree.num_rollouts,
        num_correct=group.num_correct,
        num_truncated=tree.num_truncated,
        num_distinct=tree.num_responses,
        sampled_tokens=tree.num_sampled_tokens,
        unique_tokens=tree.num_unique_tokens,
        verifier_timeouts=sum(map(is_timeout, reasons)),
        verifier_failures=sum(map(is_failure, reasons)),
        num_unverified=group.num_unverified,
    )


def summarize(results: Sequence[PromptResult], ks: Sequence[int], seconds: float | None) -> Summary:
    """Average over prompts.

    Args:
        results: At least one prompt, all with the same number of responses n.
        ks: Values of k for pass@k, each 1 to n.
        seconds: Time that the prompts took, if known.

    Raises:
        ValueError: If there is no prompt, the numbers of responses differ, or a k is below 1.
    """
    numbers = {result.num_samples for result in results}
    if len(numbers) != 1:
        raise ValueError(
            f"expected prompts with one number of samples, got {sorted(numbers) or 'no prompt'}; summarize prompts of "
            "one evaluation"
        )
    n = numbers.pop()
    correct_P = np.array([result.num_correct for result in results], np.int64)
    verified_P = np.array([result.num_verified for result in results], np.int64)
    value_KP = {k: pass_at_k_of_each(correct_P, verified_P, k) for k in ks}

    def total(name: str) -> int:
        return sum(getattr(result, name) for result in results)

    return Summary(
        num_prompts=len(results),
        num_samples=n,
        pass_at={k: mean_with_interval(value_P) for k, value_P in value_KP.items() if value_P.size},
        solved=int((correct_P > 0).sum()),
        tokens_per_response=total("sampled_tokens") / (n * len(results)),
        truncation_rate=total("num_truncated") / (n * len(results)),
        verifier_timeouts=total("verifier_timeouts"),
        verifier_failures=total("verifier_failures"),
        num_distinct=total("num_distinct"),
        sampled_tokens=total("sampled_tokens"),
        unique_tokens=total("unique_tokens"),
        seconds=seconds,
        num_unverified=total("num_unverified"),
        left_out={k: correct_P.size - value_P.size for k, value_P in value_KP.items() if value_P.size < correct_P.size},
    )


def summarize_all(
    results: Sequence[PromptResult], ks: Sequence[int], seconds_of: Mapping[str, float]
) -> EvaluationSummary:
    """Summarize over all prompts, by dataset and by domain.

    Args:
        results: All prompts, at least one, with the same number of responses n.
        ks: Values of k for pass@k, each 1 to n.
        seconds_of: Time that each dataset took.
    """
    sets = dict.fromkeys(result.data_set for result in results)
    domains = sorted({result.domain for result in results})
    return EvaluationSummary(
        overall=summarize(results, ks, sum(seconds_of[name] for name in sets)),
        by_data_set={s: summarize([r for r in results if r.data_set == s], ks, seconds_of[s]) for s in sets},
        by_domain={d: summarize([r for r in results if r.domain == d], ks, None) for d in domains},
    )
