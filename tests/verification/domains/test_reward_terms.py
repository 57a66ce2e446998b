"""Further terms of the reward: their values beside the verdict, their failures, and the reward that they make."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from brorl.algorithms.settings import RewardShaping, RewardTerm
from brorl.errors import UserError
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree
from brorl.verdict import Verdict, is_failure
from brorl.verification.domains.verifiers import make_verifiers
from brorl.verification.grade import Grader
from brorl.verification.sandbox.pool import WorkerPool, Workers
from brorl.verification.settings import VerificationSettings
from brorl.verification.verifier import Verifier

SOURCE = """
import time

def right(response, reference):
    return {"score": len(response) / 10, "correct": response == reference}

def brief(completions, **columns):
    return [10.0 - len(text) for text in completions]

def asked(response, reference, prompt):
    return prompt.count("?")

def sometimes(response, reference):
    if response == "raises":
        raise ValueError("no such word")
    if response == "waits":
        time.sleep(9)
    return {"none": None, "text": "0.5", "nan": float("nan"), "huge": -1e308, "long": 10**400}.get(response, True)

def one(response):
    return 1.0
"""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with WorkerPool(num_workers=1, timeout_s=0.5) as pool:
        yield Workers(pool, None)  # type: ignore[arg-type]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(SOURCE, "utf-8")
    return tmp_path / "own.py"


def verifier_of(workers: Workers, own: Path, *names: str) -> Verifier:
    terms = {name: RewardTerm(function=f"{own}:{name}", weight=1.0) for name in names}
    settings = VerificationSettings(functions={"sums": f"{own}:right"})
    return make_verifiers(["sums"], settings, RewardShaping(terms=terms), workers)["sums"]


def ask(verifier: Verifier, *responses: str) -> list[Verdict]:
    prompt = Prompt("p", "2+2?", (1,), "4", "sums", question="2+2?")
    return verifier.verify_all([(prompt, response) for response in responses])


def test_terms_stand_beside_the_verdict_and_do_not_change_it(workers: Workers, own: Path) -> None:
    responses = ("4", "four", "")
    with_terms = ask(verifier_of(workers, own, "brief", "asked"), *responses)
    alone = ask(verifier_of(workers, own), *responses)
    assert [(v.correct, v.score, v.reason) for v in with_terms] == [(v.correct, v.score, v.reason) for v in alone]
    assert [v.terms for v in with_terms] == [(10.0 - len(text), 1.0) for text in responses]
    assert [v.terms for v in alone] == [()] * 3


def test_a_term_that_fails_is_the_verdict_of_its_failure(workers: Workers, own: Path) -> None:
    verifier = verifier_of(workers, own, "brief", "sometimes", "asked")
    responses = ("4", "none", "raises", "text", "nan", "huge", "long", "waits")
    fine, none, raised, text, nan, huge, long, waited = ask(verifier, *responses)
    assert fine.terms == (9.0, 1.0, 1.0)
    assert none.terms == (6.0, None, 1.0)  # it does not apply
    assert raised.reason == "verifier raised ValueError: no such word (rewards.terms.sometimes)"
    assert text.reason == "verifier returned str, not a number, a bool or None (rewards.terms.sometimes)"
    assert nan.reason == "verifier returned nan, not a number, a bool or None (rewards.terms.sometimes)"
    # finite, and yet the reward would be infinite
    assert huge.reason == "verifier returned -1e+308, not a number from -1e+09 to 1e+09 (rewards.terms.sometimes)"
    assert long.reason.startswith(
        "verifier returned 1000000000000000000000000000000000000000, not a number from -1e+09"
    )
    assert waited.reason == "timeout"
    for failed in (raised, text, nan, huge, long, waited):
        assert (failed.correct, failed.score, failed.terms) == (False, 0.0, ())
    assert all(is_failure(v.reason) for v in (raised, text, nan, huge, long))


def test_a_function_that_cannot_be_a_term_is_refused_before_training(workers: Workers, own: Path) -> None:
    with pytest.raises(UserError, match=r"rewards\.terms\.one: .* must take two arguments"):
        verifier_of(workers, own, "one")


@pytest.mark.parametrize("weight", [1e308, -1e308, 1e7])
def test_a_weight_that_makes_rewards_infinite_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"weight|domain_weights"):
        RewardTerm(function="a:b", weight=weight)
    with pytest.raises(ValueError, match=r"rewards\.domain_weights\.sums must be"):
        RewardShaping(domain_weights={"sums": weight})


def test_the_reward_is_the_weighted_sum(workers: Workers, own: Path) -> None:
    """A plain sum over the functions, called directly."""
    shaping = RewardShaping(
        partial_credit=True, stop_properly=1.0, domain_weights={"sums": 2.0},
        terms={"brief": RewardTerm(function="a:b", weight=-0.5), "sometimes": RewardTerm(function="a:b", weight=3.0)},
    )  # fmt: skip
    texts = ["4", "none", "four"]
    tree = RolloutTree.from_responses((1,), [(number + 5,) for number in range(3)])
    grader = Grader(
        {"sums": verifier_of(workers, own, "brief", "sometimes")}, lambda tokens: texts[tokens[0] - 5], shaping
    )
    prompt = Prompt("p", "2+2?", tree.prompt_ids, "4", "sums")
    group = grader.rewarded(*grader.verify([prompt], [tree]), step=1)
    wanted = []
    for tokens, _ in tree.responses():
        text = texts[tokens[0] - 5]
        last = 0.0 if text == "none" else 3.0 * (text != "none")
        wanted.append(2.0 * (len(text) / 10 - 0.5 * (10.0 - len(text)) + last))
    np.testing.assert_allclose(group.reward_L, wanted)
    np.testing.assert_array_equal(np.isnan(group.terms_L["sometimes"]), [t == "none" for t in texts])
