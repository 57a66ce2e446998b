"""Settings that had another name or form mean what they meant, and one line names the current form."""

from typing import Any

import numpy as np
import pytest

from brorl.config.reading import dump_yaml, make_config, parse_yaml, settings_of
from brorl.config.renamed import OLD_NAMES, RENAMED, _notice
from brorl.config.resuming import first_change, fixed_settings
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from run_support import command


@pytest.fixture(autouse=True)
def notices_come_again() -> None:
    _notice.cache_clear()


def test_old_names_are_not_names_of_settings_and_new_ones_are() -> None:
    names = {name for name, _ in settings_of(TrainConfig)}
    assert {*OLD_NAMES.values()} <= names
    assert not {*OLD_NAMES} & names


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_read_with_one_line(
    old: str, new: str, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    number = int(rng.integers(2, 1000))
    expected = make_config({}, {new: number}, "test")
    section, key = old.split(".")
    for settings, overrides in (({old: number}, {}), ({section: {key: number}}, {}), ({new: 1}, {old: number})):
        assert make_config(settings, overrides, "test") == expected
    assert capsys.readouterr().err == f"brorl: {old} is now {new}; write {new}: {number}\n"
    assert make_config({old: 1}, {new: number}, "test") == expected  # the override wins


def test_independent_rollouts_are_no_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_config({"sampling.scheme": "iid"}, {}, "test") == make_config({}, {}, "test")
    assert not capsys.readouterr().err
    with pytest.raises(UserError, match=r"sampling\.scheme = systematic is no longer available.*; remove"):
        make_config({"sampling": {"scheme": "systematic"}}, {}, "test")


@pytest.mark.parametrize("nested", [True, False])
def test_adaptive_as_a_number_of_rollouts_is_the_switch(
    nested: bool, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    average = int(rng.integers(20, 500))
    old: dict[str, Any] = {"rollouts_per_prompt": "adaptive", "adaptive.samples_per_prompt": average}
    if nested:
        old = {"rollouts_per_prompt": "adaptive", "adaptive": {"samples_per_prompt": average, "max_rollouts": 512}}
    config = make_config(old, {}, "test")
    assert (config.adaptive.enabled, config.rollouts_per_prompt) == (True, average)
    assert capsys.readouterr().err == (
        f"brorl: rollouts_per_prompt is now a number; write adaptive.enabled: true and rollouts_per_prompt: {average}\n"
    )
    assert make_config({"adaptive.samples_per_prompt": average}, {"rollouts_per_prompt": "adaptive"}, "x") == config
    assert make_config(old, {"rollouts_per_prompt": 7}, "x").adaptive.enabled is False  # a number was a fixed one
    assert make_config({}, {"rollouts_per_prompt": "adaptive"}, "x").rollouts_per_prompt == 64  # the default then


def test_the_average_of_a_run_with_a_fixed_number_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    """Every run directory of an earlier version has it."""
    old = parse_yaml(dump_yaml(TrainConfig()), "dump")
    old["adaptive"] = {"pilot_rollouts": 16, "max_rollouts": 512, "samples_per_prompt": 64}
    assert make_config(old, {}, "old") == TrainConfig()
    assert capsys.readouterr().err == ""


def test_a_run_of_an_earlier_version_has_not_changed() -> None:
    config = make_config({}, {"adaptive.enabled": True, "rollouts_per_prompt": 24}, "test")
    before = fixed_settings(config)
    before["diagnostics.held_out_check_every"] = before.pop("diagnostics.held_out_check_every")
    del before["adaptive.enabled"]
    before |= {"rollouts_per_prompt": "adaptive", "adaptive.samples_per_prompt": 24}
    assert first_change(before, config) is None
    change = first_change(before | {"diagnostics.held_out_check_every": 3}, config)
    assert change is not None
    assert (change.name, change.before) == ("diagnostics.held_out_check_every", 3)


def test_old_options_are_read_and_not_shown() -> None:
    outcome = command(
        "check", "--no-timing", "--diagnostics.held_out_check_every=5", "--rollouts-per-prompt=adaptive",
        "--adaptive.samples-per-prompt=40",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "rollouts_per_prompt: 40\n" in outcome.err
    shown = command("train", "--help").out
    assert "diagnostics.held_out_check_every" in shown
    assert not any(old in shown for old in OLD_NAMES)
