"""Evaluates prompts batch by batch: sample, verify, store. Batches that are stored already are not sampled again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from brorl.activity import Echo, Observe, Phase, unobserved
from brorl.errors import UnverifiedResponsesError
from brorl.evaluation.responses import PromptBatch, ResponseStore, StoredBatch
from brorl.evaluation.summary import count
from brorl.format import duration
from brorl.rollout.engine import Engine
from brorl.sampling import SamplingParams
from brorl.verification.grade import Grader


@dataclass(frozen=True)
class EvaluatedModel:
    """A model under evaluation, with the grader of its responses."""

    engine: Engine  # samples responses
    sampling: SamplingParams  # sampling parameters
    num_rollouts: int  # responses per prompt, n
    grader: Grader  # verifies responses
    observe: Observe = unobserved  # called at the start of each phase

    def evaluate(self, batch: PromptBatch, store: ResponseStore) -> StoredBatch:
        """Sample, verify and store a batch.

        Raises:
            UnverifiedResponsesError: If most responses could not be verified because of infrastructure failures. The
                batch is not stored, so a rerun samples it again.
        """
        started = perf_counter()
        self.observe(Phase("generation", f"{len(batch.prompts)} prompts of {batch.data_set}"))
        token_ids = [prompt.token_ids for prompt in batch.prompts]
        trees = self.engine.sample(token_ids, self.num_rollouts, self.sampling, batch.seed)
        self.observe(Phase("verification"))
        groups = self.grader.verify(batch.prompts, trees)
        lost, responses = sum(group.num_unverified for group in groups), sum(tree.num_rollouts for tree in trees)
        if 2 * lost > responses:
            reasons = Counter(v.reason for group in groups for v in group.verdicts if v.unverified)
            raise UnverifiedResponsesError(
                f"{lost:,} of {responses:,} responses could not be verified (most often: "
                f"{reasons.most_common(1)[0][0]}); free memory and processes, then rerun the command to continue"
            )
        texts = [self.grader.texts(tree) for tree in trees]
        stored = StoredBatch(tuple(map(count, groups)), perf_counter() - started)
        store.write(batch, groups, texts, stored)
        return stored


def evaluate_batches(
    batches: Sequence[PromptBatch],
    model: EvaluatedModel,
    store: ResponseStore,
    echo: Echo = lambda _: None,
) -> list[StoredBatch]:
    """Evaluate all batches that are not stored yet.

    Args:
        batches: All batches, stored ones included.
        model: The model under evaluation.
        store: Where batches are read from and written to.
        echo: Receives a line of progress after each new batch; its time left is for all datasets.

    Returns:
        The stored counts of every batch, in order.
    """
    stored = [store.read(batch) for batch in batches]
    left = sum(len(batch.prompts) for batch, read in zip(batches, stored, strict=True) if read is None)
    started, new = perf_counter(), 0
    for i, batch in enumerate(batches):
        if stored[i] is not None:
            continue
        stored[i] = new_batch = model.evaluate(batch, store)
        new += len(batch.prompts)
        same_set = [j for j, other in enumerate(batches) if other.data_set == batch.data_set]
        results = [result for j in same_set if (read := stored[j]) for result in read.results]
        fractions = [r.num_correct / r.num_verified for r in results if r.num_verified]
        tokens_per_second = sum(r.sampled_tokens for r in new_batch.results) / max(new_batch.seconds, 1e-9)
        seconds_left = (perf_counter() - started) / new * (left - new)
        echo(
            f"{batch.data_set}  {len(results)}/{sum(len(batches[j].prompts) for j in same_set)} prompts  "
            f"pass@1 so far {sum(fractions) / max(len(fractions), 1):.3f}  {tokens_per_second:,.0f} tokens/s  "
            f"ETA {duration(seconds_left)}"
        )
    return [batch for batch in stored if batch is not None]
