"""Evaluates part after part: sample, verify, store.

In: an engine, verifiers, and parts of which some may be done. Out: the counts of all prompts; every part that ends is
told, with how far the evaluation is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from brorl.activity import Observe, Phase, unobserved
from brorl.evaluation.responses import Part, ResponseStore, StoredPart
from brorl.evaluation.summary import count
from brorl.rollout.engine import Engine
from brorl.sampling import SamplingParams
from brorl.verify.grade import grade
from brorl.verify.verifier import Verifier


@dataclass(frozen=True)
class EvaluatedModel:
    """What answers and what judges.

    Attributes:
        engine: Samples responses.
        sampling: How they are drawn; independently, or pass@k would be biased.
        num_samples: Responses per prompt, n.
        verifiers: Verifier of each domain.
        decode: Token ids of a response to its text.
        accept_truncated: Verify truncated responses too, rather than count them as incorrect.
        observe: Gets each phase when it begins.

    Raises:
        ValueError: If responses are not drawn independently.
    """

    engine: Engine
    sampling: SamplingParams
    num_samples: int
    verifiers: Mapping[str, Verifier]
    decode: Callable[[Sequence[int]], str]
    accept_truncated: bool = False
    observe: Observe = unobserved

    def __post_init__(self) -> None:
        if self.sampling.scheme != "iid":
            raise ValueError(f"pass@k needs independent responses, not sampling.scheme = {self.sampling.scheme}")

    def do(self, part: Part, store: ResponseStore) -> StoredPart:
        """Sample, verify and store a part."""
        started = perf_counter()
        self.observe(Phase("generation", f"{len(part.prompts)} prompts of {part.data_set}"))
        token_ids = [prompt.token_ids for prompt in part.prompts]
        trees = self.engine.sample(token_ids, self.num_samples, self.sampling, part.seed)
        self.observe(Phase("verification"))
        verdicts = grade(part.prompts, trees, self.verifiers, self.decode, self.accept_truncated)
        texts = [[self.decode(response) for response, _ in tree.responses()] for tree in trees]
        results = tuple(map(count, part.prompts, trees, verdicts))
        done = StoredPart(results, perf_counter() - started)
        store.write(part, trees, verdicts, texts, done)
        return done


@dataclass(frozen=True)
class PartProgress:
    """How far an evaluation is.

    Attributes:
        data_set: The data set of the part that ended.
        set_done: Its prompts that are done.
        set_size: All of its prompts.
        pass_at_1: Mean share of correct responses of those that are done.
        tokens_per_second: Sampled tokens of the part per second.
        seconds_left: Estimate from the prompts done since this process began.
    """

    data_set: str
    set_done: int
    set_size: int
    pass_at_1: float
    tokens_per_second: float
    seconds_left: float


def evaluate_parts(
    parts: Sequence[Part],
    respondent: EvaluatedModel,
    store: ResponseStore,
    report: Callable[[PartProgress], None] = lambda _: None,
) -> list[StoredPart]:
    """Do all parts that are not done.

    Args:
        parts: All parts.
        respondent: What answers and what judges.
        store: Where they are stored.
        report: Told after each part.

    Returns:
        What is known of every part, in order.
    """
    found = {part.index: store.read(part) for part in parts}
    sizes = {name: sum(len(p.prompts) for p in parts if p.data_set == name) for name in {p.data_set for p in parts}}
    left = sum(len(part.prompts) for part in parts if found[part.index] is None)
    started, new = perf_counter(), 0
    for part in parts:
        if found[part.index] is not None:
            continue
        stored = respondent.do(part, store)
        found[part.index] = stored
        new += len(part.prompts)
        done = [r for p in parts if p.data_set == part.data_set and (f := found[p.index]) for r in f.results]
        report(
            PartProgress(
                data_set=part.data_set,
                set_done=len(done),
                set_size=sizes[part.data_set],
                pass_at_1=sum(r.num_correct / r.num_samples for r in done) / len(done),
                tokens_per_second=sum(r.sampled_tokens for r in stored.results) / max(stored.seconds, 1e-9),
                seconds_left=(perf_counter() - started) / new * (left - new),
            )
        )
    return [one for one in found.values() if one is not None]
