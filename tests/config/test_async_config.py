"""Settings of asynchronous training that do not fit each other."""

import pytest

from brorl.config.reading import make_config, read_recipe
from brorl.config.settings import TrainConfig
from brorl.errors import UserError

ASYNC = {
    "cluster.nodes": 1,
    "cluster.mode": "async",
    "importance.correction": "truncate",
    "optimizer.old_logprobs": "recompute",
}


def config(**changes: object) -> TrainConfig:
    overrides = ASYNC | {name.replace("__", "."): value for name, value in changes.items()}
    return make_config(read_recipe("quickstart"), overrides, "quickstart")


def test_asynchronous_settings() -> None:
    assert config(cluster__segment_tokens=16).cluster.segment_tokens == 16
    assert config(cluster__max_staleness=0, importance__correction="none").cluster.max_staleness == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"adaptive__enabled": True, "adaptive__pilot_rollouts": 4}, "set adaptive.enabled: false, or cluster.mode"),
        ({"importance__correction": "none"}, "up to 1 updates old.*set importance.correction: truncate"),
        ({"optimizer__old_logprobs": "engine"}, "set optimizer.old_logprobs: recompute"),
        ({"cluster__nodes": 0}, "async needs workers.*set cluster.nodes, for example 1"),
        ({"cluster__mode": "sync", "cluster__segment_tokens": 8}, "segment_tokens = 8 has no effect"),
        ({"cluster__placement": "colocated"}, "set cluster.placement: apart, or cluster.mode: sync"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        config(**changes)
