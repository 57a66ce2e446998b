"""Races whose outcome is known: a better arm, equal arms, and an arm that starts slowly and ends best."""

from collections.abc import Callable

import numpy as np

from brorl.evaluation.paired import conclusion_of, difference_interval
from brorl.tuning.spec import RUNGS, Course, room_after, standings

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
            courses = [
                Course(
                    a, self.objectives.get(a, ""), *(self.scores(a, at).mean() for at in (0.0, fraction / 2, fraction))
                )
                for a in arms
            ]
            found = standings(courses, fraction, room_after(rung, number), own)
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
        return conclusion_of(difference_interval(*sides, seeds_paired=True)) == "B leads"


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
    courses = [Course("lead", "", 0.1, 0.30, 0.40), Course("close", "", 0.1, 0.30, 0.398),
               Course("slow", "", 0.1, 0.12, 0.2), Course("turned", "", 0.1, 0.5, 0.39),
               Course("own", "", 0.1, 0.1, 0.1)]  # fmt: skip
    found = {s.arm: s for s in standings(courses, 0.25, 3, "own")}
    assert list(found) == ["lead", "close", "turned", "slow", "own"]  # by score
    ends = {"close": 0.1 + 0.298 * 4 ** np.log2(0.298 / 0.2), "slow": 0.1 + 0.1 * 4, "turned": 0.39}
    for arm, end in ends.items():
        dropped = f"no room: its projected end is {min(end, 1):.3f}"
        assert found[arm].dropped == (None if arm == "close" else dropped)
    assert found["lead"].dropped is found["own"].dropped is None


def test_about_half_of_the_arms_go_on() -> None:
    assert [room_after(rung, 9) for rung in range(3)] == [5, 3, 2]
    assert [room_after(0, number) for number in (1, 2, 3)] == [1, 2, 2]
