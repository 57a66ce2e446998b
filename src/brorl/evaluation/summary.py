"""Results of an evaluation: by data set, by domain and over all prompts, with 95% intervals.

In: for every prompt, how many of its n responses were correct, and what they cost. Out: pass@k as means over prompts,
each prompt counted once whatever data set it is from, and totals. It estimates nothing where there is no prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from brorl.evaluation.mean_interval import mean_with_interval
from brorl.evaluation.pass_at_k import Estimate, pass_at_k
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree
from brorl.verify.verifier import TIMEOUT, Verdict, is_failure


@dataclass(frozen=True)
class PromptResult:
    """What the n responses to one prompt came to.

    Attributes:
        prompt_id: The prompt.
        data_set: The data set that it is from.
        domain: Which verifier judged the responses.
        num_samples: Responses n, duplicates counted.
        num_correct: Correct ones among them.
        num_truncated: Those that were cut.
        num_distinct: Distinct responses, which are verified once each.
        sampled_tokens: Tokens of all responses.
        unique_tokens: Tokens that were computed.
        verifier_timeouts: Distinct responses whose verification took too long; they count as incorrect.
        verifier_failures: Distinct responses whose verification failed otherwise; they count as incorrect.
    """

    prompt_id: str
    data_set: str
    domain: str
    num_samples: int
    num_correct: int
    num_truncated: int
    num_distinct: int
    sampled_tokens: int
    unique_tokens: int
    verifier_timeouts: int
    verifier_failures: int


@dataclass(frozen=True)
class Summary:
    """Results over some prompts.

    Attributes:
        num_prompts: Number of prompts P.
        num_samples: Responses per prompt n.
        pass_at: pass@k for each k: the mean over prompts of unbiased estimates, with its interval.
        solved: Prompts with at least one correct response.
        tokens_per_response: Mean number of tokens.
        truncated_share: Share of responses that were cut.
        verifier_timeouts: Distinct responses whose verification took too long.
        verifier_failures: Distinct responses whose verification failed otherwise.
        num_distinct: Distinct responses.
        sampled_tokens: Tokens of all responses.
        unique_tokens: Tokens that were computed.
        seconds: Time of sampling, verifying and storing; None where it was not measured apart.
    """

    num_prompts: int
    num_samples: int
    pass_at: dict[int, Estimate]
    solved: int
    tokens_per_response: float
    truncated_share: float
    verifier_timeouts: int
    verifier_failures: int
    num_distinct: int
    sampled_tokens: int
    unique_tokens: int
    seconds: float | None


@dataclass(frozen=True)
class EvaluationSummary:
    """Results of an evaluation.

    Attributes:
        overall: Over all prompts.
        by_data_set: By data set, in the order given.
        by_domain: By domain, in the order of the alphabet.
    """

    overall: Summary
    by_data_set: dict[str, Summary]
    by_domain: dict[str, Summary]


def default_ks(num_samples: int) -> tuple[int, ...]:
    """Return 1 and the powers of 2 up to half the number of samples, 256 at most.

    Beyond half of them the estimate rests on few subsets that share most of their responses.
    """
    return (1, *(2**i for i in range(1, 9) if 2 ** (i + 1) <= num_samples))


def count(prompt: Prompt, tree: RolloutTree, verdicts: Sequence[Verdict]) -> PromptResult:
    """Count what a prompt's responses came to.

    Args:
        prompt: The prompt.
        tree: Its responses.
        verdicts: The verdict of each distinct one.
    """
    correct_L = np.array([verdict.correct for verdict in verdicts])
    reasons = [verdict.reason for verdict in verdicts]
    return PromptResult(
        prompt_id=prompt.id,
        data_set=prompt.source,
        domain=prompt.domain,
        num_samples=tree.num_rollouts,
        num_correct=int(tree.leaf_count[correct_L].sum()),
        num_truncated=int(tree.leaf_count[~tree.finished].sum()),
        num_distinct=tree.num_responses,
        sampled_tokens=tree.num_sampled_tokens,
        unique_tokens=tree.num_unique_tokens,
        verifier_timeouts=reasons.count(TIMEOUT),
        verifier_failures=sum(map(is_failure, reasons)),
    )


def summarise(results: Sequence[PromptResult], ks: Sequence[int], seconds: float | None) -> Summary:
    """Average over prompts.

    Args:
        results: At least one, all of the same number of samples n.
        ks: Which pass@k, each 1 to n.
        seconds: What they took, if known.

    Raises:
        ValueError: If there is no prompt, the numbers of samples differ, or a k is not 1 to n.
    """
    numbers = {result.num_samples for result in results}
    if len(numbers) != 1:
        raise ValueError(f"prompts need one number of samples to be averaged, got {sorted(numbers) or 'no prompt'}")
    n = numbers.pop()
    correct_P = np.array([result.num_correct for result in results], np.int64)
    sampled = sum(result.sampled_tokens for result in results)
    return Summary(
        num_prompts=len(results),
        num_samples=n,
        pass_at={k: mean_with_interval(pass_at_k(correct_P, n, k)) for k in ks},
        solved=int((correct_P > 0).sum()),
        tokens_per_response=sampled / (n * len(results)),
        truncated_share=sum(result.num_truncated for result in results) / (n * len(results)),
        verifier_timeouts=sum(result.verifier_timeouts for result in results),
        verifier_failures=sum(result.verifier_failures for result in results),
        num_distinct=sum(result.num_distinct for result in results),
        sampled_tokens=sampled,
        unique_tokens=sum(result.unique_tokens for result in results),
        seconds=seconds,
    )


def summarise_all(
    results: Sequence[PromptResult], ks: Sequence[int], seconds_of: Mapping[str, float]
) -> EvaluationSummary:
    """Summarise over all prompts, by data set and by domain.

    Args:
        results: All prompts, those of a data set together.
        ks: Which pass@k.
        seconds_of: What each data set took.
    """
    sets = list(dict.fromkeys(result.data_set for result in results))
    domains = sorted({result.domain for result in results})
    return EvaluationSummary(
        overall=summarise(results, ks, sum(seconds_of[name] for name in sets)),
        by_data_set={s: summarise([r for r in results if r.data_set == s], ks, seconds_of[s]) for s in sets},
        by_domain={d: summarise([r for r in results if r.domain == d], ks, None) for d in domains},
    )
