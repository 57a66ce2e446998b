"""Evaluation on held-out prompts during training: samples them as trees, verifies the trees, and estimates pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from time import perf_counter
from typing import Any

from transformers import PreTrainedModel

from brorl.activity import Observe, Phase, unobserved
from brorl.algorithms.groups import Group
from brorl.config.settings import TrainConfig
from brorl.evaluation.summary import count, summarize
from brorl.model.device import in_float64
from brorl.prompts.prompt import Prompt, fingerprint
from brorl.rollout.engine import Sampler
from brorl.sampling import SamplingParams
from brorl.verification.grade import Grader

_SEED_OFFSET = 1_000_003  # keeps the draws apart from those of training
_VALUES_OF_A_TENSOR = 65_536
_RECORDED = (
    "pass_at", "num_prompts", "num_samples", "solved", "truncation_rate", "verifier_timeouts", "verifier_failures",
    "unique_tokens", "sampled_tokens", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """Held-out prompts and the settings of their evaluation."""

    prompts: Sequence[Prompt]  # the prompts
    grader: Grader  # verifies responses
    sampling: SamplingParams  # sampling parameters
    num_rollouts: int  # responses per prompt, n
    ks: tuple[int, ...]  # values of k for pass@k, each 1 to n
    seed: int  # seed of the sampling, the same for every evaluation
    observe: Observe = unobserved  # called at the start of each phase

    @classmethod
    def from_recipe(
        cls, config: TrainConfig, prompts: Sequence[Prompt], grader: Grader, observe: Observe = unobserved
    ) -> Benchmark | None:
        """Make the evaluation of the held-out prompts of a run; None without any."""
        if not prompts:
            return None
        settings = config.evaluation
        sampling = SamplingParams(settings.temperature, settings.top_p, max_new_tokens=config.max_evaluated_tokens)
        seed = config.seed + _SEED_OFFSET
        return cls(prompts, grader, sampling, settings.rollouts_per_prompt, settings.ks, seed, observe=observe)

    @property
    def fingerprint(self) -> str:
        """Hash of the prompts. Scores on different prompts cannot be compared."""
        return fingerprint(self.prompts)

    def answer(self, sampler: Sampler) -> tuple[list[Group], float]:
        """Sample and verify responses to all prompts; return their groups, in order, and the wall time in seconds."""
        started = perf_counter()
        self.observe(Phase("evaluating"))
        token_ids = [p.token_ids for p in self.prompts]
        trees = sampler.sample(token_ids, self.num_rollouts, self.sampling, self.seed)
        self.observe(Phase("evaluating", f"verifying {sum(t.num_responses for t in trees):,} distinct responses"))
        groups = self.grader.verify(self.prompts, trees)
        return groups, perf_counter() - started

    def record(self, groups: Sequence[Group], seconds: float) -> dict[str, Any] | None:
        """Return the numbers of an evaluation as docs/reference/metrics.md lists them.

        None if no prompt has enough verified responses for a k.
        """
        results = list(map(count, groups))
        overall = asdict(summarize(results, self.ks, seconds))
        if len(overall["pass_at"]) < len(self.ks):
            return None
        lost = [result.num_unverified for result in results]
        sources = sorted({result.data_set for result in results})
        by_source = {s: summarize([r for r in results if r.data_set == s], self.ks, None) for s in sources}
        by_source = {s: summary for s, summary in by_source.items() if len(summary.pass_at) == len(self.ks)}
        names = (*_RECORDED, "num_unverified", "left_out") if any(lost) else _RECORDED
        return {name: overall[name] for name in names} | {
            "by_source": {s: asdict(summary)["pass_at"] for s, summary in by_source.items()}
            if len(sources) > 1
            else {},
            "prompts": {
                "num_correct": [result.num_correct for result in results],
                "sampled_tokens": [result.sampled_tokens for result in results],
                **({"num_unverified": lost} if any(lost) else {}),
            },
        }


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of the name, the shape and up to 65,536 evenly spaced values of each tensor."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        values = in_float64(flat[:: max(1, flat.numel() // _VALUES_OF_A_TENSOR)]).cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + values.astype("<f8").tobytes())
    return digest.hexdigest()
