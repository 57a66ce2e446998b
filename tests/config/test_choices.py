"""A choice of words in the settings has the members of the type that the code behind it takes."""

from typing import Any, get_args

import pytest

from brorl.algorithms.aggregation import Aggregation
from brorl.algorithms.importance import ImportanceMode
from brorl.algorithms.kl import KLEstimator, KLPlacement
from brorl.algorithms.policy_loss import LossKind
from brorl.config.reading import settings_of
from brorl.config.settings import TrainConfig
from brorl.cost import Unit
from brorl.trackers import TrackerName

FIELDS = dict(settings_of(TrainConfig))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("budget.unit", Unit),
        ("importance.correction", ImportanceMode),
        ("kl.estimator", KLEstimator),
        ("kl.placement", KLPlacement),
        ("loss.aggregation", Aggregation),
        ("loss.kind", LossKind),
    ],
)
def test_settings_offer_what_the_code_takes(setting: str, words: Any) -> None:
    assert get_args(FIELDS[setting].annotation) == get_args(words)


def test_trackers_are_those_of_the_code() -> None:
    (members,) = (choice for choice in get_args(FIELDS["tracking.to"].annotation) if choice is not Ellipsis)
    assert get_args(members) == get_args(TrackerName)
