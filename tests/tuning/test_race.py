"""Races whose outcome is known, their figure, and their budget on machines of any speed."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

import brorl
from brorl.comparison import findings
from brorl.comparison.answer import FinishedComparison
from brorl.comparison.arm_recipes import ArmRecipe
from brorl.comparison.results import results_of
from brorl.config.reading import make_config, read_recipe
from brorl.evaluation.paired import paired_difference
from brorl.format import Estimate
from brorl.tuning import answer
from brorl.tuning import race as module
from brorl.tuning.answer import make_race_figure
from brorl.tuning.spec import NUM_EVALUATIONS, RUNGS, RungStanding, TuneClock, TuningSpec, decide_rung, room_after
from comparison.comparisons import levels

PROMPTS = 192
Curve = Callable[[float], float]


class Simulation:
    """Arms whose mean score is a function of the fraction of the budget, with noise of prompts, seeds and sampling."""

    objectives: dict[str, str]  # of arms with another objective than the others

    def __init__(self, curves: dict[str, Curve], rng: np.random.Generator, seed_noise: float = 0.01) -> None:
        self.objectives = {}
        self.curves, self.rng, self.seed_noise, self.spent = curves, rng, seed_noise, 0.0
        self.difficulty_P = rng.normal(0, 1.0, PROMPTS)
        self.run = {arm: rng.normal(0, seed_noise) for arm in curves}

    def scores(self, arm: str, fraction: float, shift: float | None = None) -> np.ndarray:
        mean = self.curves[arm](fraction) + (self.run[arm] if shift is None else shift)
        rate_P = np.clip(mean + 0.03 * self.difficulty_P, 0.001, 0.999)
        return self.rng.binomial(256, rate_P) / 256

    def race(self, own: str) -> str:
        arms, number = list(self.curves), len(self.curves)
        for rung, fraction in enumerate(RUNGS):
            before = RUNGS[rung - 1] if rung else 0.0
            self.spent += len(arms) * (fraction - before)
            reached = [
                RungStanding(
                    a, self.objectives.get(a, ""), *(self.scores(a, at).mean() for at in (0.0, fraction / 2, fraction))
                )
                for a in arms
            ]
            found = decide_rung(reached, fraction, room_after(rung, number), own)
            assert sorted(s.arm for s in found) == sorted(arms)
            arms = [s.arm for s in found if s.dropped is None]
            assert own in arms
        return found[0].arm

    def claims(self, own: str, other: str, num_seeds: int = 5) -> bool:
        """Fresh prompts and fresh seeds decide whether the winner is better."""
        self.difficulty_P = self.rng.normal(0, 1.0, PROMPTS)
        sides = [
            np.stack([self.scores(a, 1.0, self.rng.normal(0, self.seed_noise)) for _ in range(num_seeds)])
            for a in (own, other)
        ]
        return paired_difference(*sides, seeds_paired=True).conclusion == "B leads"


def rising(end: float, speed: float = 1.0) -> Curve:
    return lambda fraction: 0.1 + (end - 0.1) * fraction**speed


def test_a_planted_better_arm_wins(rng: np.random.Generator) -> None:
    wins = 0
    for _ in range(40):
        race = Simulation(
            {"own": rising(0.3), **{f"arm {i}": rising(0.3) for i in range(7)}, "best": rising(0.42)}, rng
        )
        wins += (winner := race.race("own")) == "best" and race.claims("own", winner)
        assert race.spent <= 9 / 4 + 5 / 4 + 3 / 2
    assert wins >= 36


@pytest.mark.slow
def test_of_equal_arms_no_winner_is_claimed_in_95_of_100_races(rng: np.random.Generator) -> None:
    claimed = 0
    for _ in range(100):
        race = Simulation({name: rising(0.3) for name in ("own", "a", "b", "c", "d", "e")}, rng)
        winner = race.race("own")
        claimed += winner != "own" and race.claims("own", winner)
    assert claimed <= 8  # at most 2.5 are expected: an interval of 95% excludes 0 on this side in 2.5 of 100


def test_an_arm_that_starts_slowly_and_ends_best_wins(rng: np.random.Generator) -> None:
    def early(end: float) -> Curve:
        return lambda fraction: end - (end - 0.1) * np.exp(-12 * fraction)

    wins = 0
    for _ in range(40):
        race = Simulation({"own": early(0.3), **{f"fast {i}": early(0.31) for i in range(4)}, "slow": rising(0.5)}, rng)
        assert race.curves["slow"](RUNGS[0]) < race.curves["own"](RUNGS[0]) - 0.05
        wins += race.race("own") == "slow"
    assert wins >= 36


def test_an_objective_that_falls_first_and_ends_best_wins(rng: np.random.Generator) -> None:
    def dipping(end: float) -> Curve:
        return lambda fraction: 0.3 - 0.5 * fraction + (end + 0.2) * fraction**2  # from .3 below .3, and up to the end

    wins = 0
    for _ in range(40):
        falling = {f"falling {i}": dipping(end) for i, end in enumerate((0.2, 0.25, 0.45))}
        constant = {f"constant {i}": lambda fraction: 0.3 + 0.02 * fraction for i in range(3)}
        race = Simulation({"own": lambda fraction: 0.3 + 0.01 * fraction, **constant, **falling}, rng, seed_noise=0.005)
        race.objectives = dict.fromkeys(falling, "falling order")
        wins += race.race("own") == "falling 2"
        assert race.spent <= 7 / 4 + 4 / 4 + 2 / 2
    assert wins >= 36


def test_a_rung_drops_what_has_no_room_by_its_projected_end() -> None:
    reached = [RungStanding("lead", "", 0.1, 0.30, 0.40), RungStanding("close", "", 0.1, 0.30, 0.398),
               RungStanding("slow", "", 0.1, 0.12, 0.2), RungStanding("turned", "", 0.1, 0.5, 0.39),
               RungStanding("own", "", 0.1, 0.1, 0.1)]  # fmt: skip
    found = {s.arm: s for s in decide_rung(reached, 0.25, 3, "own")}
    assert list(found) == ["lead", "close", "slow", "turned", "own"]  # by projected end
    ends = {"close": 0.1 + 0.298 * 4 ** np.log2(0.298 / 0.2), "slow": 0.1 + 0.1 * 4, "turned": 0.39}
    for arm, end in ends.items():
        dropped = f"no room: its projected end is {min(end, 1):.3f}"
        assert found[arm].dropped == (None if arm == "close" else dropped)
    assert found["lead"].dropped is found["own"].dropped is None


def test_an_arm_of_the_own_objective_that_is_behind_takes_no_room() -> None:
    reached = [RungStanding("own", "", 0.16, 0.16, 0.164), RungStanding("collapsed", "", 0.16, 0.05, 0.03),
               RungStanding("ahead", "", 0.16, 0.17, 0.18), RungStanding("best", "other", 0.16, 0.18, 0.19),
               RungStanding("second", "other", 0.16, 0.17, 0.175),
               RungStanding("third", "other", 0.16, 0.1, 0.09)]  # fmt: skip
    for room, expected in ((4, "own ahead best second"), (5, "own ahead best second third")):
        assert {s.arm for s in decide_rung(reached, 0.25, room, "own") if s.dropped is None} == {*expected.split()}
    behind = [standing for standing in reached if standing.arm != "ahead"]
    found = {s.arm for s in decide_rung(behind, 0.25, 4, "own") if s.dropped is None}
    assert found == {"own", "best", "second", "third"}  # "third" may rise: other objectives are not compared


def test_about_half_of_the_arms_go_on() -> None:
    assert [room_after(rung, 9) for rung in range(3)] == [5, 3, 2]
    assert [room_after(0, number) for number in (1, 2, 3)] == [1, 2, 2]


def random_race(rng: np.random.Generator) -> list[list[RungStanding]]:

    def rung(names: str, dropped: str) -> list[RungStanding]:
        return [RungStanding(n, "", 0.1, 0.1, rng.random(), "no room" if n in dropped else None) for n in names]

    return [rung("abcd", "cd"), rung("ab", "b"), rung("a", "")]


def test_the_lines_are_the_scores_at_the_rungs(rng: np.random.Generator) -> None:
    race = random_race(rng)
    axis: Axes
    (axis,) = make_race_figure(race, 0.1, 40.0, "pass@1").axes
    lines = {str(line.get_label()): line for line in axis.lines if line.get_label() in tuple("abcd")}
    for name, line in lines.items():
        scores = [s.score for rung in race for s in rung if s.arm == name]
        assert np.asarray(line.get_ydata()).tolist() == [0.1, *scores]
        assert np.asarray(line.get_xdata()).tolist() == [0.0, *(40.0 * f for f in RUNGS[: len(scores)])]
    assert sorted(lines) == list("abcd")
    crosses = [line for line in axis.lines if line.get_marker() == "x"]
    ends = [s.score for rung in race for s in rung if s.dropped]
    assert sorted(float(np.asarray(line.get_ydata())[0]) for line in crosses) == sorted(ends)
    texts = {text.get_text() for text in axis.texts}
    assert {f"{s.arm}  {s.score:.3f} dropped" for rung in race for s in rung if s.dropped} <= texts


def spec_of(
    seconds: float, run_seconds: float, arms: int = 4, seeds: int = 3, jobs: int = 2, **more: Any
) -> TuningSpec:
    config = make_config(read_recipe("quickstart"), {"engine.clock": more.pop("clock", "wall")}, "")
    recipes = [ArmRecipe("yours", config, title="mine")] + [ArmRecipe(f"candidate {i}", config) for i in range(1, arms)]
    start = {1: Estimate(0.1, 0.05, 0.15), 256: Estimate(0.9, 0.8, 0.95)}
    return TuningSpec("pass@1", 1, seconds, run_seconds, seeds, jobs, "here", start, (16, 16), tuple(recipes), **more)


@pytest.mark.parametrize("startup", [0.0, 2.0, 20.0, 60.0])
@pytest.mark.parametrize("clock_setting", ["wall", "cpu"])
@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_the_race_and_the_final_end_before_the_deadline(
    startup: float, clock_setting: str, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that starts slowly, and on which a second of the processor takes longer than a second."""
    now, stretch, ends = 0.0, 1.0 + startup / 20 * (clock_setting == "cpu"), []
    monkeypatch.setattr("brorl.tuning.spec.perf_counter", lambda: now)

    def wave(fraction: float, evaluations: int) -> float:
        return startup + fraction * spec.run_seconds * stretch + evaluations * 2 * spec.evaluation_seconds

    for seconds in (300.0, 1800.0):
        spec = spec_of(seconds, seconds / 12, 8, jobs=jobs, clock=clock_setting, evaluation_seconds=1.0)
        now, left = 0.0, len(spec.arms)
        clock = TuneClock.start(spec)
        for rung, fraction in enumerate(RUNGS):
            if rung and clock.rung_seconds(rung) > clock.left_to_race:
                break
            before = (0.0, *RUNGS)[rung]
            took = ceil(left / jobs) * wave(fraction - before, 1 if rung else 3)
            now += min(took, clock.left_to_race if rung else clock.left)
            if not rung:
                clock.observe(took)
            left = room_after(rung, len(spec.arms))
        size = clock.size_of_final()
        if size is None:
            assert startup >= 20
            continue
        run_seconds, seeds = size
        assert 2 <= seeds <= 3
        assert spec.run_seconds / 2 <= run_seconds <= spec.run_seconds
        now += ceil(2 * seeds / jobs) * wave(run_seconds / spec.run_seconds, NUM_EVALUATIONS)
        assert now <= clock.deadline * 1.001 <= seconds  # amounts are rounded to four digits
        ends.append(now)
    if startup <= 2:
        assert len(ends) == 2  # a quick machine has its final


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "slots_for", lambda *_: [])
    monkeypatch.setattr(module, "machine_of", lambda *_: "here")
    (tmp_path / "out").mkdir()
    spec_of(300.0, 20.0, used_seconds=30.0).write(tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.slow
def test_a_race_that_is_stopped_in_its_first_part_has_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "finish_runs", lambda *_: False)
    result = brorl.tune(str(folder), progress=False)
    assert result.answer.startswith("No answer within 5m00s: the first part of the race is not complete; continue with")
    assert result.answer.endswith(f"brorl tune {folder} --budget 10m")
    assert (result.race, result.final, result.page) == ((), None, None)
    assert json.loads((folder / "tune.json").read_text())["used_seconds"] >= 30.0
    brorl.tune(str(folder), budget="20m", progress=False)
    assert json.loads((folder / "tune.json").read_text())["seconds"] == 1200


@pytest.mark.parametrize(("complete", "seeds"), [([2, 2], 2), ([3, 2], 2), ([3, 3], 3), ([1, 0], 0), ([0, 3], 0)])
def test_a_final_that_is_stopped_has_the_seeds_that_are_complete_in_both_arms(
    complete: list[int], seeds: int, folder: Path
) -> None:
    spec = spec_of(300.0, 20.0)
    compared = spec.final(spec.arms[1], 20.0, 3)
    assert (compared.machine, compared.jobs) == ("here", 2)
    line = {"step": 1, "sampling": {"samples": 1, "sampled_tokens": 1, "unique_tokens": 1}}
    for run in compared.runs_in(folder / "final"):
        run.directory.mkdir(parents=True)
        ends = run.seed < complete[run.arm == "candidate 1"]
        line["seconds"] = {"total": 21.0 if ends else 5.0}
        (run.directory / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert module._complete_seeds(compared, folder / "final") == seeds


RACE = [[RungStanding("candidate 1", "", 0.1, 0.2, 0.4), RungStanding("yours", "", 0.1, 0.2, 0.3)]]


@pytest.mark.parametrize(
    ("level_AM", "overshoot", "expected"),
    [
        ([[6, 8], [10, 20]], 1.0, [answer.WON]),
        ([[6, 8], [6, 8]], 1.0, [answer.NOT_SHOWN]),
        ([[10, 20], [6, 8]], 1.0, [answer.NOT_SHOWN]),
        ([[6, 8], [10, 20]], 1.2, [answer.WON, findings.NOT_MATCHED]),
    ],
)
def test_the_final_decides_between_the_winner_and_the_users_recipe(
    level_AM: list[list[int]], overshoot: float, expected: list[str]
) -> None:
    compared = levels(level_AM, ks=(1, 16))
    arms = []
    for arm in compared.arms:
        seconds = [(s, s.cost.seconds * (overshoot if arm is compared.arms[1] else 1.0)) for s in arm.runs[0].scores]
        scores = tuple(replace(score, cost=replace(score.cost, seconds=spent)) for score, spent in seconds)
        arms.append(replace(arm, runs=tuple(replace(run, scores=scores) for run in arm.runs)))
    final = FinishedComparison(**vars(results_of(replace(compared, arms=tuple(arms)))), path=Path("final"))
    spec = replace(spec_of(300.0, 20.0), start={1: Estimate(0.1, 0.05, 0.15), 16: Estimate(0.9, 0.8, 0.95)})
    found = answer.findings_of(spec, RACE, spec.arms[1], final, "brorl tune")
    assert [finding.template for finding in found] == expected
    difference = final.scores.pass_at["N=512"][1].value - final.scores.pass_at["N=16"][1].value
    assert f"{difference:+.3f} [" in found[0].values["measured"]
    assert all(map(str, found))


def test_without_a_final_the_answer_says_why() -> None:
    spec = spec_of(300.0, 20.0)
    for race, winner, template in (
        ([], spec.own, answer.NO_RACE),
        (RACE, spec.own, answer.NONE_AHEAD),
        (RACE, spec.arms[1], answer.NO_FINAL),
    ):
        (finding,) = answer.findings_of(spec, race, winner, None, "brorl tune out --budget 10m")
        assert finding.template == template
        assert str(finding)
