"""The arms of a tuning and the rules of its race: rungs, standings and clock. `tune.json` stores them.

Every arm's settings contain the whole budget, because learning rates and orders decay over it. Arms pause at rungs: a
quarter, a half and all of the budget. Arms that stay resume from the pause rather than restarting. If more arms are
left than the next rung has room for, those with the best projected final scores stay. Objectives take turns in this
choice, because a falling order lowers pass@1 first and raises it last. The user's arm always stays.

The projection is a power law in the cost with an exponent of at most 1, fitted through the start and the evaluations at
half the rung and at the rung. If an arm's score has reversed direction, it is projected to stay the same. This keeps
arms that start slowly but are still rising.

Source: successive halving (Jamieson and Talwalkar, arXiv 1502.07943); the projection is ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from math import ceil, log2, sqrt
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from brorl.algorithms.settings import AdvantageSettings
from brorl.comparison.arm_recipes import ArmRecipe, run_config
from brorl.comparison.scores import PlannedRun
from brorl.comparison.spec import ComparisonSpec, read_fields, write_spec
from brorl.config.reading import dump_yaml, with_settings
from brorl.config.settings import TrainConfig
from brorl.cost import Budget
from brorl.format import Estimate, exact, plain
from brorl.runs.run_directory import TUNE_FILE
from brorl.storage import replace_file, storage_errors
from brorl.tuning import Aim

RUNGS = (0.25, 0.5, 1.0)  # fractions of the budget; runs are evaluated at each and at half of each


def room_after(rung: int, num_arms: int) -> int:
    """Return how many arms may stay after a rung, including the user's; at least 2 if there are 2."""
    return min(max(2, ceil(num_arms / (2 << rung))), num_arms)


@dataclass(frozen=True)
class RungStanding:
    """An arm at a rung: its mean scores on the tuning prompts, and whether it stays."""

    arm: str
    objective: str  # until the end, scores are comparable only within an objective
    start: float  # score at the start
    half: float  # score at half the rung's cost
    score: float  # score at the rung
    dropped: str | None = None  # why the arm was dropped; None if it stays

    def projected(self, fraction: float) -> float:
        """Project the score to the end of the budget, from a rung at this fraction of it."""
        if (self.half - self.start) * (self.score - self.half) <= 0:
            return self.score
        exponent = min(log2((self.score - self.start) / (self.half - self.start)), 1.0)
        return min(max(self.start + (self.score - self.start) * float(fraction**-exponent), 0.0), 1.0)


def decide_rung(reached: Sequence[RungStanding], fraction: float, room: int, own: str) -> tuple[RungStanding, ...]:
    """Decide which `room` arms stay at a rung, including the user's arm `own`; return all arms, best projection first.

    The objectives take turns, each adding its remaining arm with the best projection. An arm behind the user's arm and
    with the same objective stays only if room is left. At the end of the budget, arms are compared across objectives.
    """
    projected = {standing.arm: standing.projected(fraction) for standing in reached}
    own_first = sorted(reached, key=lambda standing: (standing.arm != own, -projected[standing.arm]))
    own_objective = own_first[0].objective
    # Rank within the objective: each objective's best arm has rank 0, its second best 1, and so on.
    next_rank = defaultdict[str, Iterator[int]](count)
    rank = {standing.arm: next(next_rank[standing.objective if fraction < 1 else ""]) for standing in own_first}

    def turn(standing: RungStanding) -> tuple[bool, int]:
        is_behind = standing.objective == own_objective and projected[standing.arm] < projected[own]
        return is_behind, rank[standing.arm]

    staying = {standing.arm for standing in sorted(own_first, key=turn)[:room]}
    return tuple(
        standing
        if standing.arm in staying
        else replace(standing, dropped=f"no room: its projected end is {projected[standing.arm]:.3f}")
        for standing in sorted(reached, key=lambda standing: -projected[standing.arm])
    )


OWN = "yours"
ROLLOUTS = (128, 16, 512)  # try these N, in this order
# MaxRL's order at the end of a long run, from docs/explanation/study.md; None if the order does not fall.
_FINAL_ORDERS: Mapping[Aim, int | None] = {"pass@1": 1, "pass@k": 16, "coverage": None}
_FALLING = {"optimizer.schedule": "cosine"}


def candidates(config: TrainConfig, prompts: Mapping[int, int], aim: Aim) -> list[ArmRecipe]:
    """Return at most nine arms: the user's recipe first, then the most promising candidates.

    Each candidate is the user's recipe with a different N, objective or learning rate, and with a rate that decays over
    the budget; docs/explanation/study.md gives the reasons. A gradient from fewer prompts is noisier, however many
    rollouts they have, so the rate scales with the square root of the number of prompts. Each N is tried at this rate
    and at three times this rate, because a pretrained model's rate may already be as high as it can go.

    `prompts` maps each N that fits to the number of prompts for a step as long as the recipe's.
    """
    objective = _objective(aim)
    sizes = [n for n in ROLLOUTS if n in prompts]
    settings_by_n = [[_settings(config, factor, objective, n, prompts[n]) for factor in (1, 3)] for n in sizes]
    own = {} if config.phases else {"advantage": config.advantage.model_dump(mode="json")}
    higher, highest = (_settings(config, f, own, config.rollouts_per_prompt, config.prompts_per_step) for f in (3, 10))
    wanted = [*chain(*settings_by_n[:1]), higher, *chain(*settings_by_n[1:]), highest]
    arms = [ArmRecipe(OWN, config, title=_title(config))]
    for settings in wanted:
        arm = with_settings(config, settings, "a candidate")
        if all(arm != other.config for other in arms):
            arms.append(ArmRecipe(f"candidate {len(arms)}", arm, title=_title(arm)))
    return arms


def _settings(
    config: TrainConfig, factor: int, objective: Mapping[str, Any], num_rollouts: int, num_prompts: int
) -> dict[str, Any]:
    steady = sqrt(num_prompts / config.prompts_per_step)
    rate = float(f"{factor * steady * config.optimizer.learning_rate:.6g}")
    changed = {"rollouts_per_prompt": num_rollouts, "prompts_per_step": num_prompts, "optimizer.learning_rate": rate}
    return changed | ({"phases": []} | dict(objective) if objective else {}) | _FALLING


def _objective(aim: Aim) -> dict[str, Any]:
    """Return the settings of the objective that the study found best for an aim: MaxRL, ending at the aim's order."""
    return {"advantage": AdvantageSettings(estimator="maxrl", final_order=_FINAL_ORDERS[aim]).model_dump(mode="json")}


def _title(config: TrainConfig) -> str:
    advantage = config.advantage
    optimizer = config.optimizer
    objective = " then ".join(phase.advantage.estimator for phase in config.phases) or advantage.estimator
    falls = f", order falls to {advantage.final_order}" if advantage.final_order else ""
    schedule = "" if optimizer.schedule == "constant" else f", {optimizer.schedule}"
    batch = f"N = {config.rollouts_per_prompt} x {config.prompts_per_step}"
    return f"{batch}, {objective}{falls}, rate {plain(optimizer.learning_rate)}{schedule}"


_TUNING_SEED = 1000  # seed of all runs in the race; the final uses seeds 0, 1, 2, ...
_POINTS = (RUNGS[0] / 2, *RUNGS)  # evaluate at each rung and at half of each
NUM_EVALUATIONS = 1 + len(_POINTS)  # evaluations in a full run; the first is at the start


@dataclass(frozen=True)
class TuningSpec:
    """The definition of a tuning."""

    aim: Aim
    k: int  # raise pass@k for this k
    seconds: float  # budget of the whole command
    run_seconds: float  # budget per run
    seeds: int  # runs of each arm in the final
    jobs: int  # runs in parallel
    machine: str
    start: Mapping[int, Estimate]  # k -> held-out pass@k of the start
    tuning_prompts: tuple[int, int]  # evaluation.skip_prompts and num_prompts of the race
    arms: tuple[ArmRecipe, ...]  # the user's first
    evaluation_seconds: float = 0.0  # time of one evaluation
    used_seconds: float = 0.0  # part of `seconds` used by the pilot and earlier calls

    @property
    def own(self) -> ArmRecipe:
        """The user's recipe."""
        return self.arms[0]

    def arm(self, name: str) -> ArmRecipe:
        """Return the arm with this name."""
        return next(arm for arm in self.arms if arm.name == name)

    def final(self, winner: ArmRecipe, run_seconds: float, seeds: int) -> ComparisonSpec:
        """Return the spec of the comparison between the winner and the user's recipe."""
        points = tuple(run_seconds * fraction for fraction in _POINTS)
        return ComparisonSpec(
            (self.own, winner), "seconds", run_seconds, points, seeds, machine=self.machine, jobs=self.jobs
        )

    def race_run(self, folder: Path, arm: ArmRecipe, fraction: float) -> PlannedRun:
        """Write the recipe for an arm's run in the race, and return the run up to `fraction` of its budget."""
        directory = folder / "race" / arm.name.replace(" ", "_")
        points = tuple(self.run_seconds * fraction for fraction in _POINTS)
        config = run_config(arm, _TUNING_SEED, directory, Budget("seconds", self.run_seconds, points))
        rung = self.run_seconds * fraction
        pause = None if fraction == 1 else rung
        skip, num_prompts = self.tuning_prompts
        changed = {"evaluation.skip_prompts": skip, "evaluation.num_prompts": num_prompts, "budget.pause_at": pause}
        recipe = directory.with_suffix(".yaml")
        with storage_errors(folder):
            recipe.parent.mkdir(parents=True, exist_ok=True)
            replace_file(recipe, dump_yaml(with_settings(config, changed, arm.name)).encode())
        resume = f"--budget.pause_at={'null' if pause is None else exact(pause)}"
        budget = Budget("seconds", rung, (rung / 2, rung))
        return PlannedRun(arm.name, _TUNING_SEED, recipe, directory, budget, (resume,))

    def write(self, folder: Path) -> None:
        """Write `tune.json`."""
        with storage_errors(folder):
            write_spec(self, folder / TUNE_FILE)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the spec in a folder."""
        content = read_fields(folder / TUNE_FILE, "tuning")
        content["start"] = {int(k): Estimate(**estimate) for k, estimate in content["start"].items()}
        return cls(**content)


USED = 0.85  # fraction of non-evaluation time spent training; the rest is startup and final steps
MIN_SEEDS = 2  # a final needs at least this many
_CONCLUDING = 0.03  # fraction of the whole budget reserved for the answer's tables and figures
_MIN_FRACTION = 0.5  # runs in the final get at least this fraction of their planned budget; drop seeds if necessary
_FIRST_EVALUATIONS = 3  # evaluations in a run up to the first rung; later rungs have one each


@dataclass
class TuneClock:
    """Divides the remaining budget, and measures how much time runs take in addition to training."""

    spec: TuningSpec
    deadline: float  # `time.perf_counter` time by which all runs must end
    extra: float | None = None  # seconds, beyond training, of a run up to the first rung; None until measured

    @classmethod
    def start(cls, spec: TuningSpec) -> TuneClock:
        """Start a clock with the budget left by earlier calls."""
        return cls(spec, perf_counter() + spec.seconds * (1 - _CONCLUDING) - spec.used_seconds)

    @property
    def left(self) -> float:
        """Seconds left for runs; negative after the deadline."""
        return self.deadline - perf_counter()

    @property
    def left_to_race(self) -> float:
        """Seconds left for the race after setting aside time for a short final."""
        return self.left - self.final_seconds(_MIN_FRACTION)

    def rung_seconds(self, rung: int) -> float:
        """Return the expected duration of a rung."""
        entering = room_after(rung - 1, len(self.spec.arms)) if rung else len(self.spec.arms)
        length = RUNGS[rung] - (RUNGS[rung - 1] if rung else 0.0)
        return ceil(entering / self.spec.jobs) * self._run_seconds(length, 1 if rung else _FIRST_EVALUATIONS)

    def final_seconds(self, fraction: float = 1.0) -> float:
        """Return the expected duration of the final if each run gets this fraction of its planned budget."""
        return self._waves(self.spec.seeds) * self._run_seconds(fraction, NUM_EVALUATIONS)

    @property
    def whole_seconds(self) -> float:
        """Expected duration of the race and the final."""
        return sum(map(self.rung_seconds, range(len(RUNGS)))) + self.final_seconds()

    def observe(self, seconds: float) -> None:
        """Compute `extra` from the seconds that the first rung took."""
        waves = ceil(len(self.spec.arms) / self.spec.jobs)
        self.extra = max(seconds / waves - RUNGS[0] * self.spec.run_seconds, 0.0)

    def size_of_final(self) -> tuple[float, int] | None:
        """Return (budget per run, seeds) for a final that fits in the time left; None if none fits."""
        for seeds in range(self.spec.seeds, MIN_SEEDS - 1, -1):
            seconds_per_run = self.left / self._waves(seeds)
            shortest, longest = (self._run_seconds(fraction, NUM_EVALUATIONS) for fraction in (_MIN_FRACTION, 1.0))
            if seconds_per_run >= shortest:
                # above `_MIN_FRACTION`, a run's duration is linear in its budget
                position = min((seconds_per_run - shortest) / (longest - shortest), 1.0)
                fraction = _MIN_FRACTION + (1 - _MIN_FRACTION) * position
                return float(f"{fraction * self.spec.run_seconds:.4g}"), seeds
        return None

    def _waves(self, seeds: int) -> int:
        return ceil(2 * seeds / self.spec.jobs)

    def _run_seconds(self, fraction: float, evaluations: int) -> float:
        """Return the duration of a run with this fraction of its planned budget; linear for fractions above 1/4."""
        training = fraction * self.spec.run_seconds
        if self.extra is None:
            return training / USED + evaluations * self.spec.evaluation_seconds
        more = evaluations / _FIRST_EVALUATIONS
        if self.spec.own.config.engine.clock == "cpu":  # `extra` then includes time spent waiting for a core
            more = max(more, fraction / RUNGS[0])
        return training + max(more, 1.0) * self.extra
