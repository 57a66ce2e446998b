"""The record of a step: a typed line of `metrics.jsonl`. `from_json` reads one, and `to_json` writes one.

Each field states its unit and meaning, which docs/reference/metrics.md repeats. A count that is missing from a file is
0; a missing mean is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from math import nan
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from brorl.cost import Cost
from brorl.format import Estimate


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """The rollouts sampled from one prompt source."""

    groups: Annotated[int, "prompts", "prompts sampled from the source"] = 0
    groups_mixed: Annotated[int, "prompts", "mixed groups"] = 0
    accuracy: Annotated[float, "fraction", "correct rollouts"] = nan


@dataclass(frozen=True, kw_only=True)
class SamplingRecord:
    """The rollouts that a step sampled. Counts include prompts that dynamic sampling dropped."""

    rounds: Annotated[
        int, "calls", "calls to the sampling engine, about 1.1 once the fraction of mixed groups is known"
    ] = 0
    groups: Annotated[int, "prompts", "sampled prompts, excluding `groups_unverified`"] = 0
    groups_mixed: Annotated[int, "prompts", "mixed groups"] = 0
    groups_all_correct: Annotated[int, "prompts", "groups with only correct rollouts"] = 0
    samples: Annotated[int, "rollouts", "all rollouts"] = 0
    sampled_tokens: Annotated[int, "tokens", "tokens in all rollouts"] = 0
    unique_tokens: Annotated[int, "tokens", "computed tokens: sampled nodes in the trees"] = 0
    distinct_responses: Annotated[int, "responses", "distinct responses"] = 0
    mean_length: Annotated[float, "tokens", "mean rollout length"] = nan
    reward: Annotated[float, "reward", "mean over verified rollouts"] = nan
    accuracy: Annotated[float, "fraction", "correct rollouts among the verified ones"] = nan
    truncation_rate: Annotated[float, "fraction", "rollouts truncated at the length limit"] = nan
    responses_truncated: Annotated[
        int, "responses", "distinct responses that are incorrect because they were truncated"
    ] = 0
    verifier_timeouts: Annotated[
        int,
        "responses",
        "distinct responses whose verification exceeded `verification.timeout_s`, or that `verifier_batch_timeouts` "
        "counts; incorrect",
    ] = 0
    verifier_batch_timeouts: Annotated[
        int,
        "responses",
        "distinct responses whose program had used its share when `verification.batch_timeout_s` was reached",
    ] = 0
    verifier_failures: Annotated[
        int, "responses", "distinct responses whose verification failed for other reasons; incorrect"
    ] = 0
    # with several reward terms
    terms: Annotated[
        Mapping[str, float | None] | None,
        "reward",
        "unweighted mean of the term over the rollouts that have it; null if none do",
    ] = None
    # if some rollouts could not be verified
    samples_unverified: Annotated[
        int | None, "rollouts", "rollouts removed from their groups; `sampling.samples` includes them"
    ] = None
    groups_unverified: Annotated[int | None, "prompts", "dropped prompts with fewer than two verified rollouts"] = None
    unverified_reasons: Annotated[Mapping[str, int] | None, "rollouts", "unverified rollouts by reason"] = None
    samples_dropped: Annotated[int, "rollouts", "rollouts in groups that dynamic sampling dropped"] = 0
    sampled_tokens_dropped: Annotated[int, "tokens", "their tokens"] = 0
    unique_tokens_dropped: Annotated[int, "tokens", "computed tokens among them"] = 0
    # with several sources
    by_source: Mapping[str, SourceRecord] | None = None
    # in asynchronous training
    staleness_mean: Annotated[
        float | None,
        "updates",
        "updates since the weights that sampled a group, mean over the trained groups",
    ] = None
    staleness_max: Annotated[
        int | None, "updates", "the largest one; above `cluster.max_staleness` only for stragglers"
    ] = None
    groups_late: Annotated[int | None, "groups", "trained groups above `cluster.max_staleness`"] = None
    groups_ready: Annotated[int | None, "prompts", "finished groups waiting for a later step"] = None
    prompts_under_way: Annotated[int | None, "prompts", "prompts being sampled or verified"] = None
    prompts_late: Annotated[
        int | None,
        "prompts",
        "prompts in progress or waiting that exceeded `cluster.max_staleness` since the last step",
    ] = None
    worker_seconds: Annotated[float | None, "s", "time that the workers spent on the prompts"] = None


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The tool calls in a set of rollouts, and the tokens of their results."""

    turns: Annotated[float, "turns", "mean number of turns per rollout, 1 without calls"] = 1.0
    calls: Annotated[int, "calls", "calls with a result, in all rollouts"] = 0
    distinct_calls: Annotated[
        int,
        "calls",
        "distinct calls among them; the ratio of calls to distinct calls is how many rollouts share a call",
    ] = 0
    given_tokens: Annotated[int, "tokens", "tokens in results, with the text around them: given nodes in the trees"] = 0
    failures: Annotated[
        Mapping[str, int],
        "calls",
        "calls of all rollouts that [failed](../how-to/tools.md#what-the-model-sees-when-a-call-fails), by kind; "
        "kinds without a failure are absent",
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class KeptRecord:
    """The groups that a step learned from."""

    groups: Annotated[int, "prompts", "groups that the step learned from"] = 0
    carried: Annotated[int, "prompts", "groups left over for the next step"] = 0
    samples: Annotated[int, "rollouts", "their rollouts"] = 0


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """The learner's measurements in a step; means over its mini-batches unless noted."""

    loss: Annotated[float, "", "policy loss without the KL penalty"] = nan
    grad_norm: Annotated[float, "", "gradient norm before clipping"] = nan
    clip_fraction: Annotated[
        float, "fraction", "fraction of the summed absolute advantage whose gradient the clip removed (CISPO: bounded)"
    ] = nan
    clip_low_fraction: Annotated[float, "fraction", "the part at the lower bound"] = nan
    clip_high_fraction: Annotated[float, "fraction", "the part at the upper bound"] = nan
    old_policy_kl: Annotated[
        float, "nats/token", "mean of old minus new log-prob over the sampled tokens, during the updates"
    ] = nan
    entropy: Annotated[float, "nats/token", "negative mean log-prob of the sampled tokens at sampling time"] = nan
    learning_rate: Annotated[float, "", "learning rate in the last mini-batch"] = nan
    trained_nodes: Annotated[int, "nodes", "tree nodes in the loss, over all mini-batches"] = 0
    reference_kl: Annotated[float | None, "nats/token", "estimate of the KL penalty; null without a reference"] = None
    bonus_entropy: Annotated[float | None, "nats/token", "mean next-token entropy; null without an entropy bonus"] = (
        None
    )
    mismatch_mean: Annotated[
        float | None,
        "ratio",
        "mean per-token ratio of learner probability to engine probability; null if the old log-probs aren't "
        "recomputed",
    ] = None
    mismatch_max: Annotated[float | None, "ratio", "the largest one"] = None
    mismatch_kl: Annotated[float | None, "nats/token", "estimate of KL(engine, learner)"] = None
    masked_fraction: Annotated[
        float, "fraction", "the step's trained tokens whose weight the importance correction set to 0"
    ] = nan
    nodes_per_pass: Annotated[int, "nodes", "limit on nodes per forward pass, after the step"] = 0
    out_of_memory_retries: Annotated[int, "", "times this limit was halved in the step"] = 0


@dataclass(frozen=True, kw_only=True)
class ObjectiveRecord:
    """The phase of a step, in a run with more than one."""

    phase: Annotated[int, "", "phase number, starting at 1"]
    name: Annotated[str, "", "its name"] = ""
    began_at: Annotated[
        float,
        Field(alias="from"),
        "fraction",
        "fraction of the steps or the budget at which it began",
    ] = 0.0
    progress: Annotated[float, "fraction", "progress within the phase"] = nan
    begins: Annotated[str | None, "", "a line about the phase, only in its first step"] = None


@dataclass(frozen=True, kw_only=True)
class PooledCoverage:
    """The probability that the rollouts sampled and missed: means over the prompts of the step."""

    p_pos: Annotated[float, "probability", "probability of all sampled correct responses"] = nan
    p_neg: Annotated[float, "probability", "probability of all sampled incorrect responses"] = nan
    unsampled: Annotated[float, "probability", "probability of all other responses"] = nan
    a_2: Annotated[float, "", "sum of squared probabilities of the sampled correct responses"] = nan
    b_2: Annotated[float, "", "the same for the incorrect ones"] = nan
    s_r: Annotated[float, "reward", "S_R of Theorem 1, with rewards minus the group mean"] = nan
    entropy: Annotated[float, "nats/token", "negative mean log-prob of a sampled token"] = nan
    q_pos: Annotated[float | None, "probability", "estimate of the probability of a correct response"] = None
    unsampled_correct: Annotated[
        float | None, "probability", "estimate of the probability of the unsampled correct responses"
    ] = None
    u_pos_2: Annotated[float | None, "", "estimate of their sum of squared probabilities"] = None
    u_neg_2: Annotated[float | None, "", "the same for the incorrect ones"] = None
    duplicate_rate: Annotated[float, "fraction", "rollouts that repeat an earlier rollout"] = nan
    groups_all_unique: Annotated[int, "prompts", "prompts without repeated responses"] = 0
    coupling: Annotated[float | None, "ratio", "ratio of the third term in Theorem 1 to the sum of the first two"] = (
        None
    )
    unsampled_correct_at: Annotated[
        Mapping[int, float] | None, "probability", "estimate of `unsampled_correct` with * rollouts"
    ] = None
    escape_probability_at: Annotated[
        Mapping[int, float],
        "probability",
        "probability that a new rollout leaves the tree at these positions: 1, 2, 3-4, 5-8, ...; the key is the "
        "last position",
    ] = field(default_factory=dict)
    mixed_fraction_at: Annotated[
        Mapping[int, float], "fraction", "mixed fraction with * rollouts, for the powers of 2 below N and for N"
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PromptCoverage:
    """The same quantities for each prompt. `PooledCoverage` describes the fields without a description."""

    id: Annotated[tuple[str, ...], "", "prompt ids"] = ()
    num_rollouts: Annotated[tuple[int, ...], "rollouts", "N"] = ()
    num_correct: Annotated[tuple[int, ...], "rollouts", "correct rollouts"] = ()
    num_distinct: Annotated[tuple[int, ...], "responses", "distinct responses"] = ()
    p_pos: tuple[float, ...] = ()
    p_neg: tuple[float, ...] = ()
    unsampled: tuple[float, ...] = ()
    a_2: tuple[float, ...] = ()
    b_2: tuple[float, ...] = ()
    s_r: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()
    q_pos: tuple[float, ...] = ()
    unsampled_correct: tuple[float, ...] = ()
    u_pos_2: tuple[float, ...] = ()
    u_neg_2: tuple[float, ...] = ()
    unsampled_correct_at: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    escape_probability_at: Mapping[int, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CoverageRecord:
    """The probability that the rollouts of a step sampled and missed."""

    pooled: PooledCoverage = PooledCoverage()
    prompts: PromptCoverage = PromptCoverage()


@dataclass(frozen=True, kw_only=True)
class HeldOutCheck:
    """The effect of an update on the probability of correct responses; intervals are 95%."""

    # null if a weight overflows a float
    change: Annotated[
        float | None, "probability", "estimated change in the probability of a correct response, mean over the prompts"
    ] = None
    change_low: Annotated[float | None, "probability", "its interval"] = None  # normal, from each prompt's variance
    change_high: Annotated[float | None, "probability", "its interval"] = None
    # null without a correct held-out rollout, as are the two extremes
    fraction_improved: Annotated[float | None, "fraction", "fraction of correct probability that increased"] = None
    fraction_improved_low: Annotated[float, "fraction", "its interval"] = nan  # exact binomial
    fraction_improved_high: Annotated[float, "fraction", "its interval"] = nan
    worst_drop: Annotated[
        float | None, "probability", "largest drop in the probability of one correct response, at most 0"
    ] = None
    worst_log_ratio: Annotated[float | None, "nats", "smallest log(new / old probability) of a correct response"] = None
    num_prompts: Annotated[int, "prompts", "prompts"] = 0
    num_rollouts: Annotated[int, "rollouts", "extra rollouts"] = 0
    num_correct: Annotated[int, "rollouts", "correct extra rollouts"] = 0
    # (sum w)^2 / (H sum w^2) of the weights w = new / old over all held-out rollouts
    effective_fraction: Annotated[
        float, "fraction", "effective fraction of the weights; if it is far below 1, the interval isn't reliable"
    ] = nan


@dataclass(frozen=True, kw_only=True)
class EvaluatedPrompts:
    """The counts of an evaluation by prompt, in the order of `held_out.json`."""

    num_correct: Annotated[tuple[int, ...], "responses", "list: correct responses to each prompt"] = ()
    sampled_tokens: Annotated[tuple[int, ...], "tokens", "list: tokens in all responses to each prompt"] = ()
    num_unverified: Annotated[
        tuple[int, ...] | None, "responses", "list: responses to each prompt that could not be verified"
    ] = None


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """An evaluation on the held-out prompts."""

    pass_at: Annotated[Mapping[int, Estimate], "probability", "pass@k, keyed by k"] = field(default_factory=dict)
    num_prompts: Annotated[int, "prompts", "prompts"] = 0
    num_samples: Annotated[int, "responses", "responses per prompt"] = 0
    solved: Annotated[int, "prompts", "prompts with at least one correct response"] = 0
    truncation_rate: Annotated[float, "fraction", "responses truncated at the length limit"] = nan
    verifier_timeouts: Annotated[int, "responses", "distinct responses whose verification took too long"] = 0
    verifier_failures: Annotated[int, "responses", "distinct responses whose verification failed for other reasons"] = 0
    unique_tokens: Annotated[int, "tokens", "computed tokens"] = 0
    sampled_tokens: Annotated[int, "tokens", "tokens in all responses"] = 0
    seconds: Annotated[float, "s", "wall time"] = 0.0
    # if some responses could not be verified
    num_unverified: Annotated[int | None, "responses", "responses that could not be verified; pass@k excludes them"] = (
        None
    )
    left_out: Annotated[
        Mapping[int, int] | None, "prompts", "prompts with fewer than k verified responses, keyed by k"
    ] = None
    # if responses called tools
    turns: Annotated[float | None, "turns", "mean number of turns per response"] = None
    given_tokens: Annotated[int | None, "tokens", "tokens in results: given nodes in the trees"] = None
    by_source: Annotated[
        Mapping[str, Mapping[int, Estimate]], "probability", "the same by source and k, with several sources"
    ] = field(default_factory=dict)
    prompts: EvaluatedPrompts = EvaluatedPrompts()


@dataclass(frozen=True, kw_only=True)
class SecondsRecord:
    """The wall time of a step by phase."""

    generation: Annotated[float | None, "s", "sampling"] = None
    verification: Annotated[float | None, "s", "verifying"] = None
    training: Annotated[float | None, "s", "learning"] = None
    storing: Annotated[float | None, "s", "writing the rollouts"] = None
    diagnostics: Annotated[float | None, "s", "coverage and held-out check"] = None
    total: Annotated[float, "s", "the whole step, without evaluation and checkpoint"] = 0.0


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The metrics of a step. Step 0 is the start, before any update; an attempt without a mixed group has no update."""

    step: Annotated[int, "always", "step number"]
    attempt: Annotated[int | None, "a step that found no mixed group", "number of earlier attempts at this step"] = None
    end_reason: Annotated[str | None, "a step that ended the run early", "the reason"] = None
    failure_reason: Annotated[
        str | None, "a step that ended the run because most rollouts couldn't be verified", "the reason"
    ] = None
    sampling: SamplingRecord | None = None
    tools: ToolUse | None = None
    kept: KeptRecord | None = None
    update: UpdateRecord | None = None
    objective: ObjectiveRecord | None = None
    coverage: CoverageRecord | None = None
    held_out_check: HeldOutCheck | None = None
    seconds: SecondsRecord | None = None
    evaluation: EvaluationRecord | None = None
    evaluation_unverified: Annotated[
        int | None, "responses", "responses that couldn't be verified, in an evaluation that couldn't be completed"
    ] = None
    ema_evaluation: EvaluationRecord | None = None
    reference_reset: Annotated[str | None, "the reference policy was reset after the step", "the reason"] = None
    collapse: Annotated[str | None, "first step with a sign of collapse", "the sign, with its numbers and advice"] = (
        None
    )

    @property
    def cost(self) -> Cost:
        """The cost of the step; step 0 is free. An attempt without an update counts in all units except steps."""
        if self.sampling is None:
            return Cost()
        seconds = self.seconds.total if self.seconds else 0.0
        sampled = self.sampling
        return Cost(int(self.attempt is None), seconds, sampled.samples, sampled.sampled_tokens, sampled.unique_tokens)

    @property
    def weights_step(self) -> int:
        """The step that produced the evaluated weights: the step before, if this one made no update."""
        return self.step if self.update else max(self.step - 1, 0)

    def is_regular(self, every: int) -> bool:
        """Return whether an evaluation in this record is regular: only regular evaluations may affect training.

        An attempt that found no group is repeated, so its evaluation is not regular.
        """
        return self.attempt is None and is_due(self.step, every)


def total_cost(records: Iterable[StepRecord]) -> Cost:
    """Return the total cost of the given steps."""
    return sum((record.cost for record in records), Cost())


def is_due(step: int, every: int) -> bool:
    """Return whether a step is a multiple of `every`; 0 is never due."""
    return every > 0 and step % every == 0


_WITH_NULLS = (UpdateRecord, PooledCoverage, HeldOutCheck)  # here a missing number is null; elsewhere its key is absent
KEYS = {"began_at": "from"}  # fields whose key is a Python keyword


def to_json(record: StepRecord) -> dict[str, Any]:
    """Return the JSON object of a record."""
    content: dict[str, Any] = _plain(record)
    return content


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if not is_dataclass(value):
        return value
    content = {KEYS.get(entry.name, entry.name): getattr(value, entry.name) for entry in fields(value)}
    keeps_nulls = isinstance(value, _WITH_NULLS)
    return {key: _plain(item) for key, item in content.items() if keeps_nulls or item is not None}


def from_json(content: Mapping[str, Any]) -> StepRecord:
    """Return the record of a JSON object; unknown keys are ignored.

    Raises:
        ValueError: If the object is not a record; the message names the first wrong value.
    """
    record: StepRecord = _reader().validate_python(content)
    return record


@cache
def _reader() -> TypeAdapter[StepRecord]:
    return TypeAdapter(StepRecord)
