"""`brorl simulate`: a tiny simulation from end to end, its options, and one line for whatever cannot work."""

import json
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
from matplotlib.image import imread

from brorl.theory.simulator import SimulationSettings, simulate
from case_tables import table
from run_support import command, refused

TINY = ("--vocabulary-size=60", "--num_correct=9", "--steps=12", "--record-every=5")
QUANTITIES = ("correct_mass", "fraction_improved", "worst_drop")


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
refusal = partial(refused, "simulate")


def test_a_tiny_simulation_from_end_to_end() -> None:
    changes = ("--optimizer=sgd", "--learning-rate=0.5", "--surrogate=ratio", "--baseline=none", "--anchor=correct")
    outcome = command("simulate", *TINY, *changes, "--rollouts=30,2", "--seeds=3,4,5", "--output-dir=some/where")
    assert (outcome.code, outcome.err) == (0, "")
    assert sorted(f.name for f in Path("some/where").iterdir()) == [f"simulation.{e}" for e in ("json", "png")]

    content = json.loads(Path("some/where/simulation.json").read_text())
    assert [(r["rollouts"], r["seed"]) for r in content["runs"]] == [(n, s) for n in (2, 30) for s in (3, 4, 5)]
    for run in content["runs"]:
        result = simulate(
            SimulationSettings(
                vocabulary_size=60,
                num_correct=9,
                steps=12,
                record_every=5,
                optimizer="sgd",
                learning_rate=0.5,
                surrogate="ratio",
                baseline="none",
                anchor="correct",
                rollouts=run["rollouts"],
                seed=run["seed"],
            )
        )
        assert run["step"] == result.step.tolist() == [0, 5, 10, 12]
        for name in QUANTITIES:
            assert run[name] == getattr(result, name).tolist()
        ends = f"{result.correct_mass[0]:.4f} -> {result.correct_mass[-1]:.4f}"
        assert f"N = {run['rollouts']}, seed {run['seed']}: correct mass {ends}" in outcome.said
    assert imread("some/where/simulation.png").shape[1] > 1500
    assert "3 seeds: mean ± standard deviation" in outcome.said
    assert "simulation.png are in some/where" in outcome.said


def test_defaults_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field has an option; without any, the settings are the paper's."""
    outcome = command("simulate", "--help")
    assert outcome.code == 0
    for field in fields(SimulationSettings):
        if field.name not in ("rollouts", "seed"):
            assert f"--{field.name.replace('_', '-')}" in outcome.out, field.name
            if field.default is not None:
                assert f"(default: {field.default})" in outcome.said, field.name
    assert "(default: 4,8,16,512,51200)" in outcome.said

    seen = []

    def stop(settings: SimulationSettings) -> None:
        seen.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr("brorl.api.simulate.simulate_one", stop)
    assert command("simulate").code == 130
    assert seen == [SimulationSettings(rollouts=4, seed=0)]
    assert not Path("runs/simulation").exists()  # nothing is left of an interrupted simulation


@pytest.mark.slow
def test_an_earlier_simulation_is_replaced() -> None:
    assert command("simulate", *TINY, "--rollouts=2").code == 0
    first = Path("runs/simulation/simulation.json").read_text()
    assert command("simulate", *TINY, "--rollouts=3", "--seeds=7").code == 0
    assert Path("runs/simulation/simulation.json").read_text() != first


@pytest.mark.parametrize(*table(__file__, "bad_input"))
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(*arguments)


def test_a_diverging_simulation_ends_in_one_line() -> None:
    outcome = command(
        "simulate", *TINY, "--rollouts=8", "--optimizer=sgd", "--surrogate=ratio", "--learning-rate=1e300",
        "--reward-correct=1e10",
    )  # fmt: skip
    assert outcome.code == 1
    assert outcome.err.startswith("brorl: the logits are no longer finite after step ")
    assert outcome.err.count("\n") == 1
    assert not Path("runs/simulation").exists()


@pytest.mark.slow
def test_a_full_disk_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("brorl.api.simulate.replace_file", full)
    outcome = command("simulate", *TINY, "--rollouts=8")
    assert outcome.code == 1
    assert "Mass of the correct tokens" in outcome.out  # the table is printed before the files are written
    assert outcome.err == (
        "brorl: could not write runs/simulation: No space left on device; free disk space, then rerun the command\n"
    )
