"""Tests of verdicts."""

import pytest

from brorl.verdict import UNVERIFIED, Verdict, is_failure, is_unverified, unverified_verdict


def test_an_unverified_verdict_has_no_outcome():
    verdict = unverified_verdict("a worker was lost", 0.5)
    assert verdict == Verdict(False, 0.0, None, "unverified: a worker was lost", 0.5)
    assert verdict.unverified
    assert not is_failure(verdict.reason)


@pytest.mark.parametrize("reason", ["correct", "wrong answer", "timeout", "unverifiedly", "not unverified: x", ""])
def test_any_other_reason_is_a_verdict(reason):
    assert not is_unverified(reason)
    assert not Verdict(False, 0.0, None, reason, 0.0).unverified


@pytest.mark.parametrize(("correct", "score"), [(True, 0.0), (False, 0.5), (True, 1.0)])
@pytest.mark.parametrize("reason", [UNVERIFIED, f"{UNVERIFIED}: no memory"])
def test_an_unverified_response_cannot_be_scored(reason, correct, score):
    with pytest.raises(ValueError, match="must not be correct and must have the score 0"):
        Verdict(correct, score, None, reason, 0.0)
