"""What a plan looks like: tables that fit, sentences with the right numbers, JSON without holes."""

import json
import re
from dataclasses import replace
from io import StringIO
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from brorl.format import Estimate
from brorl.planning.advice import (
    PlanResult,
    advice_lines,
    budget_table,
    format_noise,
    fraction_table,
    pilot_line,
    plan_record,
)
from brorl.planning.gradient_noise import GradientProducts, NoiseMoments
from brorl.planning.pass_rates import PassRates
from brorl.planning.pilot import PilotCounts, PilotSummary, PlanMeasurements
from brorl.planning.recommendation import PlanRow, RolloutPlan, StepSettings
from brorl.planning.step_cost import StepCost, StepTiming, Work
from brorl.training.settings import DynamicSamplingSettings

SETTINGS = StepSettings(num_rollouts=64, prompts_per_step=16, mini_batches=4, dynamic_sampling=True, max_prompts=999)


def row(num_rollouts: int, prompts: int, to_best: float) -> PlanRow:
    fraction = 1 - 1 / num_rollouts**0.5
    phases = {"generation": 0.1, "verification": 0.02, "training": 0.2, "storing": 0.01, "diagnostics": 0.0}
    seconds = {n: s * num_rollouts**0.3 for n, s in phases.items()}
    return PlanRow(
        num_rollouts=num_rollouts,
        extrapolated=num_rollouts > 32,
        kept=Estimate(fraction, fraction - 0.05, fraction + 0.02),
        solved=Estimate(fraction + 0.01, fraction - 0.04, fraction + 0.03),
        unique_tokens=Estimate(10 * num_rollouts**0.5, 9 * num_rollouts**0.5, 11 * num_rollouts**0.5),
        unique_fraction=1.2 / num_rollouts**0.5,
        trained_nodes=11 * num_rollouts**0.5,
        seconds={**seconds, "total": sum(seconds.values())},
        budget_prompts=prompts,
        budget_seconds=1.0,
        budget_noise=Estimate(2.0 * to_best, 1.0 * to_best, inf),
        to_best=Estimate(to_best, 0.9 * to_best, 1.2 * to_best),
    )


def report(**changes: object) -> PlanResult:
    plan = RolloutPlan(
        rows=[row(16, 40, 1.5), row(64, 20, 1.0), row(256, 10, 1.04), row(1024, 0, nan)],
        budget=1.0,
        recipe=1,
        best=1,
        tied=[1, 2],
        chosen=2,
        pass_rates=PassRates(0.5, 2.0, 0.1),
        moments=NoiseMoments(np.array(0.1), np.array(1.0), np.array(9.0)),
        p_value=0.001,
        time_error=0.08,
    )
    plan = replace(plan, **changes)
    wanted = np.array([16, 64, 256, 1024])
    empty = np.ones((8, 4))
    measured = PlanMeasurements(
        counts=PilotCounts(
            32, np.arange(8), np.ones(8), wanted, empty, empty, empty,
            GradientProducts(np.eye(8), np.ones(8), np.ones(8), 16),
        ),
        summary=PilotSummary(8, 32, 0.2, 0.5, 7.0, 0.01, 0.3, 12_345.0),
        cost=StepCost({"generation": (0.1, 0.2, 0.3)}, {"generation": 1.0}, 0.01),
        timings=[StepTiming(16, Work(1, 2, 3, 4, 5, 6, 7), {"generation": 0.5})],
    )  # fmt: skip
    return PlanResult(plan, measured, SETTINGS, "quickstart", "cpu", Path("runs/plan"))


def shown(renderable: object, width: int = 80) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(renderable)
    return console.export_text()


def test_tables_fit_into_80_columns() -> None:
    fractions, budget = (shown(table(report())) for table in (fraction_table, budget_table))
    for text in (fractions, budget):
        assert "…" not in text
    assert "256*" in fractions
    assert "64*" in fractions
    assert "16*" not in fractions
    assert "beyond the pilot's 32 rollouts" in fractions
    assert "0.94 [0.89, 0.96]" in fractions
    assert "2 [1, inf]" in budget
    assert "for a step with 16 prompts" in fractions
    lines = {line.split()[0]: line for line in budget.splitlines() if line.strip()[:1].isdigit()}
    assert "use this, tied" in lines["256*"]
    assert "tied, recipe" in lines["64*"]
    assert "does not fit" in lines["1,024*"]
    assert "tied" not in lines["16"]
    assert re.search(r" 1\.50 +1\.50 \[1\.35, 1\.80\]", lines["16"])  # against the recipe's N = 64, which has the least


def test_a_limit_of_the_pass_rate_is_named() -> None:
    plain = report()
    counts = replace(plain.measured.counts, dynamic_sampling=DynamicSamplingSettings(max_pass_rate=0.5))
    limited = replace(plain, measured=replace(plain.measured, counts=counts))
    note = "with a pass rate of at most 0.5"
    assert note not in shown(fraction_table(plain))
    assert note in shown(fraction_table(limited))


def numbers(line: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", line)


def test_sentences_have_the_numbers_of_the_plan() -> None:
    lines = advice_lines(report())
    assert [numbers(line) for line in lines] == [
        ["1", "256"],  # pass@1, N
        ["10", "1", "64", "20"],  # prompts, seconds, the recipe's N and its prompts in the same time
        ["64", "256", "8", "10"],  # tied N, timing error and allowed noise in percent
        ["95", "8", "32"],  # interval in percent, prompts of the pilot, and of a larger one
        [],
    ]
    text = " ".join(shown(report(), 400).split())
    assert text.startswith(lines[0])
    assert all(text.count(line) == 1 for line in lines)

    alone = advice_lines(report(tied=[1], chosen=1))
    assert numbers(alone[1]) == ["20", "1", "16"]  # the recipe's N is its own: its prompts per step instead
    assert numbers(alone[2]) == ["256", "1.04", "0.94", "1.25"]  # the next best N and its noise / the least
    slow = [replace(other, budget_prompts=0) if other.num_rollouts == 64 else other for other in report().plan.rows]
    assert numbers(advice_lines(report(rows=slow))[1]) == ["10", "1", "64"]
    assert " - " in shown(budget_table(report(rows=slow)))


def test_each_uncertainty_has_its_numbers() -> None:
    assert numbers(advice_lines(report(p_value=0.3))[3]) == ["8", "0", "32"]  # |G| may be 0 with 8 prompts
    assert numbers(advice_lines(report(tied=[0, 1, 2]))[3]) == ["3", "32"]
    rows = report().plan.rows
    wide = replace(rows[2], kept=Estimate(0.7, 0.5, 0.9))
    assert numbers(advice_lines(report(rows=[*rows[:2], wide, rows[3]]))[3]) == ["256", "0.70", "0.50", "0.90", "32"]


def test_nothing_fits() -> None:
    rows = [replace(r, budget_prompts=0) for r in report().plan.rows]
    (line,) = advice_lines(report(rows=rows, chosen=None, best=None, tied=[]))
    assert "No N fits in 1 s" in line
    assert "4 prompts" in line
    assert "seconds_per_step" in line
    shown(budget_table(report(rows=rows, chosen=None, best=None, tied=[])))


def test_json_holds_everything_and_nothing_else() -> None:
    text = json.dumps(plan_record(report()), allow_nan=False)
    record = json.loads(text)
    assert record["recommendation"]["rollouts_per_prompt"] == 256
    assert record["recommendation"]["prompts_per_step"] == 10
    assert record["recommendation"]["tied"] == [64, 256]
    assert record["recommendation"]["least_noise"] == 64
    assert len(record["recommendation"]["lines"]) == 5
    assert record["rows"][0]["budget_noise"] == {"value": 3.0, "low": 1.5, "high": None}
    assert record["rows"][3]["to_best"]["value"] is None
    assert record["gradient"]["between_prompts"] == pytest.approx(0.9)
    assert record["probes"][0]["work"]["unique_tokens"] == 2


def test_numbers_without_an_end() -> None:
    assert format_noise(Estimate(inf, 2.34, inf)) == "above 2.3"
    assert format_noise(Estimate(2.34, 1.26, 5.0)) == "2.3 [1.3, 5]"
    assert format_noise(Estimate(nan, nan, nan)) == ""
    assert "12,345 sampled tokens/s" in pilot_line(report())
