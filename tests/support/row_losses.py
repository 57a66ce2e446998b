"""Every loss, aggregation, correction and penalty as loops over the N x T batch and the model's own forward pass.

It knows no tree: each of the N rollouts is a row of a padded batch, each formula is written per token or per response
as in its paper, and autograd does the rest (float64). A row has the numbers of the sampled tokens alone: only the model
reads given tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from brorl.algorithms.groups import Group
from brorl.algorithms.settings import ImportanceCorrection, KLPenalty, PolicyLossSettings
from brorl.config.settings import TrainConfig
from brorl.sampling import SamplingSettings
from brorl.tree import RolloutTree
from learner_support import group_of
from recipes import recipe
from small_models import flattened_logprobs, random_tree, rollouts, with_given

SETTINGS = recipe(learning_rate=1e-3, temperature=0.9, nodes_per_pass=30, max_grad_norm=1e9, max_new_tokens=9)
MAX_LENGTH = SETTINGS.sampling.max_new_tokens
OLD = {False: "engine", True: "recompute"}
Rows = list[list[Tensor]]
Batch = tuple[list[Group], list[np.ndarray]]


class Tally:
    """Sums over the tokens of the rows."""

    def __init__(self) -> None:
        self.loss, self.kl_loss = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        self.weight = self.low = self.high = self.beyond = self.kl = self.masked = self.apart = 0.0
        self.ratios: list[float] = []
        self.tokens = 0


def row_factors(ratio_T: np.ndarray, importance: ImportanceCorrection) -> np.ndarray:
    """The factor of each token of a row, from its ratios exp(old - sampler)."""
    low, high = importance.low, importance.high
    inside = low <= math.prod(ratio_T.tolist()) ** (1 / ratio_T.size) <= high
    match importance.correction:
        case "none":
            return np.ones_like(ratio_T)
        case "truncate":
            return np.array([min(w, high) for w in ratio_T])
        case "mask":
            return np.array([w if low <= w <= high else 0.0 for w in ratio_T])
        case "sequence_mask":
            return ratio_T if inside else np.zeros_like(ratio_T)


def add_row(
    tally: Tally, new_T: Tensor, old_T: Tensor, advantage: float, factor_T: np.ndarray, loss: PolicyLossSettings
) -> None:
    """Add the policy term of a row, token by token."""
    low, high = 1 - loss.clip.low, 1 + loss.clip.high
    fraction = 1 / new_T.numel() if loss.aggregation == "sequence_mean" else 1.0
    sequence_ratio = torch.exp((new_T - old_T).mean())
    for new, old, factor in zip(new_T, old_T, factor_T, strict=True):
        weight = fraction * float(factor)
        ratio = sequence_ratio if loss.kind == "gspo" else torch.exp(new - old)
        bounded = ratio.clamp(low, high)
        if loss.kind == "cispo":
            gain = bounded.detach() * advantage * new
            is_low, is_high = ratio.item() < low, ratio.item() > high
        else:
            gain = torch.minimum(ratio * advantage, bounded * advantage)
            is_low, is_high = advantage < 0 and ratio.item() < low, advantage > 0 and ratio.item() > high
            if loss.dual_clip is not None and advantage < 0 and ratio.item() > loss.dual_clip:
                gain = torch.tensor(loss.dual_clip * advantage, dtype=torch.float64)
                tally.beyond += weight * abs(advantage)
        tally.loss = tally.loss - weight * gain
        tally.weight += weight * abs(advantage)
        tally.low += weight * abs(advantage) * is_low
        tally.high += weight * abs(advantage) * is_high


def add_kl(
    tally: Tally, new_T: Tensor, reference_T: Tensor, penalty: KLPenalty, fraction: float, factor: float
) -> None:
    for x in new_T - reference_T:
        x = x.clamp(-penalty.clamp, penalty.clamp)
        kl = {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) - 1 + x}[penalty.estimator]
        tally.kl_loss = tally.kl_loss + fraction * factor * kl
        tally.kl += factor * kl.item()


def flat(
    batch: Batch,
    settings: TrainConfig,
    new: Rows,
    old: Rows,
    reference: Rows | None = None,
    factors: list[np.ndarray] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of the rows, and what `UpdateRecord` should say; `factors` are those of chosen responses, else 0."""
    tally, loss, penalty = Tally(), settings.loss, settings.kl if settings.kl.coefficient else None
    factor_sum, num_rows = 0.0, sum(group.tree.num_rollouts for group in batch[0])
    for p, (group, advantage_L) in enumerate(zip(*batch, strict=True)):
        for i, (leaf, path) in enumerate(rollouts(group.tree)):
            if loss.mask_truncated and not group.tree.finished[leaf]:
                continue
            factor = 1.0 if factors is None else float(factors[p][leaf])
            ratio_T = np.exp(old[p][i].numpy() - group.tree.logprob[sampled_part(group.tree, path)])
            token_factors = row_factors(ratio_T, settings.importance)
            add_row(tally, new[p][i], old[p][i], float(advantage_L[leaf]) * factor, token_factors, loss)
            if penalty and reference:
                fraction = 1 / ratio_T.size if loss.aggregation == "sequence_mean" else 1.0
                add_kl(tally, new[p][i], reference[p][i], penalty, fraction, factor)
            tally.masked += int((token_factors == 0).sum())
            tally.apart += float((old[p][i] - new[p][i].detach()).sum())
            tally.ratios += ratio_T.tolist()
            tally.tokens += ratio_T.size
            factor_sum += factor * ratio_T.size
    denominator = {"token_mean": tally.tokens, "sequence_mean": num_rows, "constant": num_rows * MAX_LENGTH}
    policy = tally.loss / denominator[loss.aggregation]
    total = policy
    if penalty and penalty.placement == "loss":
        total = policy + penalty.coefficient * tally.kl_loss / denominator[loss.aggregation]
    told = {
        "loss": policy.item(),
        "clip_low_fraction": tally.low / max(tally.weight, 1e-30),
        "clip_high_fraction": tally.high / max(tally.weight, 1e-30),
        "clip_fraction": (tally.low + tally.high + tally.beyond) / max(tally.weight, 1e-30),
    }
    if factors is None:
        told["old_policy_kl"] = tally.apart / tally.tokens
    if settings.recompute_old_logprobs:
        told |= {
            "mismatch_mean": float(np.mean(tally.ratios)),
            "mismatch_max": max(tally.ratios),
            "mismatch_kl": float(np.mean([w - 1 - math.log(w) for w in tally.ratios])),
            "masked_fraction": tally.masked / tally.tokens,
        }
    return total, told | ({"reference_kl": tally.kl / factor_sum} if penalty else {})


def sampled_part(tree: RolloutTree, path: np.ndarray) -> np.ndarray:
    """The nodes of a path that are not given."""
    return path[~tree.given[path]]


def rows_of(model: PreTrainedModel, trees: list[RolloutTree], sampling: SamplingSettings = SETTINGS.sampling) -> Rows:
    if sampling.top_p == 1 and not sampling.top_k:
        rows = flattened_logprobs(model, trees, sampling.temperature)
    else:
        rows = [
            [kept_row(model, t.prompt_ids, t.token[path].tolist(), sampling) for _, path in rollouts(t)] for t in trees
        ]
    return [
        [row[torch.from_numpy(~t.given[path])] for (_, path), row in zip(rollouts(t), of_tree, strict=True)]
        for t, of_tree in zip(trees, rows, strict=True)
    ]


def kept_row(model: PreTrainedModel, prompt: Sequence[int], response: list[int], sampling: SamplingSettings) -> Tensor:
    """The log-probs of a response among the tokens that transformers keeps and the response's own."""
    ids = torch.tensor([[*prompt, *response]])
    logits_TV = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / sampling.temperature
    kept_TV = TopPLogitsWarper(sampling.top_p)(ids, TopKLogitsWarper(sampling.top_k)(ids, logits_TV))
    own = torch.arange(len(response)), torch.tensor(response)
    return kept_TV.index_put(own, logits_TV[own]).log_softmax(1)[own]


def detached(rows: Rows) -> Rows:
    return [[row.detach() for row in group] for group in rows]


def sampler_rows(trees: list[RolloutTree]) -> Rows:
    return [[torch.from_numpy(t.logprob[sampled_part(t, path)]) for _, path in rollouts(t)] for t in trees]


def sampled(model: PreTrainedModel, rng: np.random.Generator, num_groups: int = 2, noise: float = 0.4) -> Batch:
    """Random trees whose log-probs differ from the model's; one response's ratios are past each bound for certain.

    About a third of the nodes that can be given are given.
    """
    trees = [with_given(random_tree(rng, num_rollouts=10, branching=5), rng) for _ in range(num_groups)]
    for i, rows in enumerate(detached(rows_of(model, trees))):
        logprob_M = np.zeros(trees[i].num_nodes)
        for (_, path), row in zip(rollouts(trees[i]), rows, strict=True):
            logprob_M[sampled_part(trees[i], path)] = row.numpy()
        far = trees[i].path(int(trees[i].leaf[0]))
        shifted = logprob_M[far] + (1.0 if i == 0 else -1.0)
        logprob_M = np.minimum(logprob_M + noise * rng.normal(size=logprob_M.size), -1e-3)
        logprob_M[far] = shifted
        trees[i] = replace(trees[i], logprob=np.where(trees[i].given, 0.0, logprob_M))
    advantages = [rng.normal(size=t.num_responses) for t in trees]
    for i, advantage_L in enumerate(advantages):
        advantage_L[0] = -1.0 if i == 0 else 1.0
    return [group_of(t, rng) for t in trees], advantages


def moved(model: PreTrainedModel, rng: np.random.Generator, size: float = 0.05) -> None:
    """Move the weights in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.from_numpy(rng.normal(size=parameter.shape))
