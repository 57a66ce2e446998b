"""Mutated responses: no verifier crashes, hangs, or returns another verdict the second time."""

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from fuzz import MUTATIONS, ROOT, mutations, problems, seeds_of

from brorl.verification.domains.verifiers import DOMAINS
from brorl.verification.sandbox.pool import Workers

COUNTS = {"countdown": 400, "ifeval": 200, "science": 150, "math": 60, "code": 50, "gym": 60}
NEEDS = {"ifeval": "langdetect", "gym": "reasoning_gym"}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as workers:
        yield workers


@pytest.mark.linux
@pytest.mark.parametrize(
    "domain",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("gym", "math") else []) for name in sorted(DOMAINS)],
)
def test_mutated_responses_have_verdicts_that_repeat(
    domain: str, workers: Workers, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if domain in NEEDS:
        pytest.importorskip(NEEDS[domain])
    monkeypatch.chdir(ROOT)  # the recipes name their files from here
    random = Random(int(rng.integers(2**32)))
    items = mutations(seeds_of(domain), COUNTS[domain], random)
    assert len(items) == COUNTS[domain]
    assert problems(lambda: DOMAINS[domain](workers), items, random) == []


@pytest.mark.slow
def test_every_mutation_changes_some_text(rng: np.random.Generator) -> None:
    text = "So \\boxed{12} is the answer.\n```python\nprint(12)\n```"
    for mutation in MUTATIONS:
        assert any(mutation(Random(int(rng.integers(2**32))), text) != text for _ in range(50))
