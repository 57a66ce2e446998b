"""The tables, words and record of a comparison say what plain loops over its runs say."""

import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from comparisons import evaluation_at, findings, levels, score_SP, synthetic, templates, values_of
from scipy import stats

from brorl.comparison import findings as f
from brorl.comparison.answer import MAX_CAVEATS, comparison_record
from brorl.comparison.findings import answer_of, caveats_of, match_of, sentences
from brorl.comparison.results import results_of
from brorl.comparison.scores import Comparison, RunEvaluation
from brorl.comparison.tables import (
    arm_table,
    equal_table,
    frontier_table,
    pair_table,
    paired_table,
    source_table,
    use_table,
)
from brorl.cost import Cost, Unit
from brorl.evaluation.paired import mean_over_runs
from brorl.format import p_value, short


def numbers_in(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"[-+]?\d[\d,]*\.?\d*(?:e-?\d+)?", text)]


def swapped(comparison: Comparison) -> Comparison:
    return replace(comparison, arms=comparison.arms[::-1])


def with_scores(comparison: Comparison, index: int, scores: tuple[RunEvaluation, ...], **changes: object) -> Comparison:
    """Give all runs of an arm these scores."""
    arm = comparison.arms[index]
    runs = tuple(replace(run, scores=scores, **changes) for run in arm.runs)
    arms = [replace(a, runs=runs) if a is arm else a for a in comparison.arms]
    return replace(comparison, arms=tuple(arms))


class TestTables:
    @pytest.fixture
    def comparison(self, rng: np.random.Generator) -> Comparison:
        return synthetic(rng, num_sources=2, num_prompts=30)

    def test_costs_and_scores_at_the_budget(self, comparison: Comparison) -> None:
        rows = arm_table(results_of(comparison)).rows
        start = np.concatenate([score_SP(comparison, arm, 0.0) for arm in comparison.arms]).mean()
        assert rows[0][0] == "start"
        assert numbers_in(rows[0][-1])[0] == pytest.approx(start, abs=5.1e-4)
        for row, arm in zip(rows[1:], comparison.arms, strict=True):
            name, number, prompts, steps, samples, unique, time, score = row
            spent = [evaluation_at(comparison, arm, run, 40.0).cost for run in range(3)]
            assert (name, number, prompts) == (arm.name, str(arm.num_rollouts), "16")
            assert numbers_in(steps) == [round(sum(c.steps for c in spent) / 3)]
            assert samples == short(sum(c.samples for c in spent) / 3)
            assert unique == short(sum(c.unique_tokens for c in spent) / 3)
            assert time == "40.0 s"
            value, low, high = numbers_in(score)
            assert value == pytest.approx(score_SP(comparison, arm, 40.0).mean(), abs=5.1e-4)
            assert low <= value <= high

    def test_use_of_samples(self, comparison: Comparison) -> None:
        first, *rows = use_table(results_of(comparison)).rows
        assert first[:6] == ("start", *["-"] * 5)
        for row, arm in zip(rows, comparison.arms, strict=True):
            runs = arm.runs
            fractions = [run.groups_mixed / run.groups for run in runs]
            generated = [run.cost.samples / run.stage_seconds["generation"] for run in runs]
            assert row[:2] == (arm.name, f"{100 * sum(fractions) / 3:.1f}%")
            assert row[2] == short(sum(run.cost.samples / run.cost.seconds for run in runs) / 3)
            assert row[3] == short(sum(generated) / 3)
            assert row[4] == short(sum(run.cost.unique_tokens / run.cost.seconds for run in runs) / 3)
            ends = [evaluation_at(comparison, arm, run, 40.0) for run in range(3)]
            correct, tokens = (
                sum(int(getattr(s, n).sum()) for s in ends) for n in ("num_correct_P", "sampled_tokens_P")
            )
            assert float(row[6]) == pytest.approx(tokens / (3 * 30 * 32), rel=5e-3)
            assert float(row[7]) == pytest.approx(1000 * correct / tokens, rel=1e-2)

    def test_pass_at_k_of_both_arms(self, comparison: Comparison) -> None:
        rows = pair_table(results_of(comparison)).rows
        assert [row[0] for row in rows] == ["pass@1", "pass@4", "pass@16"]
        a, b = comparison.arms
        for row, k in zip(rows, (1, 4, 16), strict=False):
            at_a, at_b = (score_SP(comparison, arm, 40.0, k).mean() for arm in (a, b))
            assert [float(cell) for cell in row[2:4]] == pytest.approx([at_a, at_b], abs=5.1e-4)
            assert numbers_in(row[4])[0] == pytest.approx(at_b - at_a, abs=5.1e-4)

    def test_paired_tests_are_scipys(self, comparison: Comparison) -> None:
        rows = paired_table(results_of(comparison)).rows
        a, b = comparison.arms
        for first, k in ((0, 1), (3, 16)):
            score_a, score_b = (score_SP(comparison, arm, 40.0, k) for arm in (a, b))
            assert rows[first][:2] == (f"pass@{k}", "over prompts and seeds")
            for row, axis in ((rows[first + 1], 0), (rows[first + 2], 1)):
                greater = stats.ttest_rel(score_b.mean(axis), score_a.mean(axis), alternative="greater")
                both = stats.ttest_rel(score_b.mean(axis), score_a.mean(axis))
                assert numbers_in(row[3]) == pytest.approx([greater.statistic, greater.df], abs=5.1e-3)
                assert row[4:] == (p_value(greater.pvalue), p_value(both.pvalue))
                assert numbers_in(row[2])[0] == pytest.approx((score_b - score_a).mean(), abs=5.1e-4)

    def test_scores_by_budget_with_the_best_marked(self, rng: np.random.Generator) -> None:
        comparison = synthetic(rng, numbers=(16, 64, 512), overshoot={2: 0.2})
        results = results_of(comparison)
        for k in (1, 16):
            for row, eval_point, best in zip(
                frontier_table(results, k).rows, comparison.eval_points, results.best[k], strict=True
            ):
                mark = "**" if best.lead_shown else "*"
                for cell, arm in zip(row[1:], comparison.arms, strict=True):
                    value = f"{score_SP(comparison, arm, eval_point, k).mean():.3f}"
                    expected = {"N=512": f"({value})", best.arm: f"{value}{mark}"}
                    assert cell == expected.get(arm.name, value)

    def test_the_budgets_own_unit_is_made_equal_too(self) -> None:
        """A's steps end at 20 s, B's at 25 s: at 20 s each, B is 60% of the way from 12.5 s to 25 s."""
        comparison = levels([[8, 8], [8, 20]])
        start, *b = comparison.arms[1].runs[0].scores
        early, late = (replace(at, cost=replace(at.cost, seconds=s)) for at, s in zip(b, (12.5, 25.0), strict=True))
        comparison = with_scores(comparison, 1, (start, early, late), cost=late.cost)
        found = results_of(comparison)
        assert [equal.unit for equal in found.at_equal_cost] == ["seconds", "samples", "unique_tokens"]
        arm_and_spent, score, difference, *_ = equal_table(found).rows[0]
        assert (arm_and_spent, score) == ("N=512, 20 s", f"{(8.5 + 12 * 0.6) / 32:.3f}")
        assert difference.startswith(f"+{12 * 0.6 / 32:.3f} [")
        assert f.CHANGES_AT_EQUAL_COST not in templates(findings(comparison))  # N=512 leads there too

    def test_a_lead_that_is_due_to_the_overshoot_is_told(self) -> None:
        """B is level with A for 20 s, and rises only in the step that ends at 21 s."""
        comparison = levels([[8, 8], [8, 20]], num_seeds=2)
        early, last = comparison.arms[1].runs[0].scores[1:]
        scores = (
            comparison.arms[1].runs[0].scores[0],
            early,
            replace(early, cost=replace(last.cost, seconds=19.999)),
            replace(last, cost=replace(last.cost, seconds=20.9)),
        )
        comparison = with_scores(comparison, 1, scores, cost=scores[-1].cost)
        first = comparison.arms[0].runs[0].scores
        slow = replace(first[-1], num_correct_P=first[-1].num_correct_P + np.arange(12) % 3 - 1)
        comparison = with_scores(comparison, 0, (*first[:-1], slow))
        found = findings(comparison)
        assert values_of(f.WON, found)["winner"] == "N=512"
        change = values_of(f.CHANGES_AT_EQUAL_COST, found)
        assert (change["amount"], change["conclusion"]) == ("20 seconds", "no difference shown")
        assert change["spent"] == "20 s with N=16 and 20.9 s with N=512"
        assert f.CHANGES_AT_EQUAL_COST not in templates(findings(levels([[8, 8], [8, 20]])))

    def test_an_arm_that_was_evaluated_late_is_not_measured_against_the_first(self) -> None:
        comparison = levels([[8, 20], [8, 20], [30, 30]], numbers=(16, 16, 512), names=("a", "b", "late"))
        comparison = replace(
            comparison, unit="samples", eval_points=(1.0, float(comparison.arms[0].runs[0].cost.samples))
        )
        table = equal_table(results_of(comparison))
        late = [row for row in table.rows if row[0].startswith("late, ") and row[0].endswith(" samples")]
        assert [row[1:] for row in late] == [("-", "-", "-", "-")]
        assert any(note.startswith("-: ") for note in table.notes)

    def test_the_start_counts_once_for_each_seed(self, rng: np.random.Generator) -> None:
        """Arms of the same seeds begin with the same evaluation: the interval is that of one arm's starts."""
        comparison = synthetic(rng)
        starts = [RunEvaluation(Cost(), *rng.integers(1, 30, (2, 40)), 0.0) for _ in range(3)]
        comparison = replace(comparison, arms=tuple(
            replace(arm, runs=tuple(
                replace(run, scores=(starts[run.seed], *run.scores[1:])) for run in arm.runs
            ))
            for arm in comparison.arms
        ))  # fmt: skip
        found = results_of(comparison)
        for k in found.ks:
            expected = mean_over_runs(score_SP(comparison, comparison.arms[0], 0.0, k))
            assert asdict(found.scores.pass_at["start"][k]) == pytest.approx(asdict(expected), abs=1e-12)
        for source, scores in found.sources.items():
            chosen = [i for i, of_prompt in enumerate(comparison.sources) if of_prompt == source]
            expected = mean_over_runs(score_SP(comparison, comparison.arms[0], 0.0)[:, chosen])
            assert asdict(scores.pass_at["start"][1]) == pytest.approx(asdict(expected), abs=1e-12)

    def test_scores_by_source(self, comparison: Comparison) -> None:
        for k in (1, 16):
            rows = source_table(results_of(comparison), k).rows
            assert [row[0] for row in rows] == ["source-0 (15)", "source-1 (15)"]
            for row, chosen in zip(rows, (slice(15), slice(15, 30)), strict=True):
                means = [score_SP(comparison, arm, 40.0, k)[:, chosen].mean() for arm in comparison.arms]
                assert [float(cell) for cell in row[2:4]] == pytest.approx(means, abs=5.1e-4)
                assert numbers_in(row[4])[0] == pytest.approx(means[1] - means[0], abs=5.1e-4)


class TestAnswer:
    @pytest.mark.parametrize("swap", [False, True])
    def test_the_arm_that_leads_won(self, swap: bool) -> None:
        comparison = levels([[6, 8], [10, 20]])
        found = findings(swapped(comparison) if swap else comparison)
        won = values_of(f.WON, found)
        # 8.5 / 32 and 20.5 / 32 of the responses are correct
        scores = {"N=16": pytest.approx(8.5 / 32), "N=512": pytest.approx(20.5 / 32)}
        assert (won["winner"], won["budget"], won["seeds"]) == ("N=512", "20 seconds", "3 seeds")
        assert (won["score_a"], won["score_b"]) == (scores[won["a"]], scores[won["b"]])
        assert won["difference"].value == pytest.approx((-1 if swap else 1) * 12 / 32)
        ahead = values_of(f.SEEDS_AHEAD, found)
        assert (ahead["b"], ahead["ahead"], ahead["number"]) == (won["b"], 0 if swap else 3, 3)
        assert templates(match_of(results_of(comparison))) == {f.MATCHED}

    def test_the_sentence_names_the_winner_the_budget_both_scores_and_the_interval(self) -> None:
        answer = str(findings(levels([[6, 8], [10, 20]]))[0])
        assert answer.startswith("N=512 won: ")
        for part in ("20 seconds of training each", "0.641", "0.266", "+0.375 [+0.276, +0.474]", "3 seeds"):
            assert part in answer

    def test_nothing_shown(self) -> None:
        found = findings(levels([[6, 8], [6, 8]]))
        assert found[0].template == f.NO_DIFFERENCE
        assert found[0].values["difference"].value == 0
        assert not any(" won" in str(finding) for finding in found)

    def test_one_seed_may_be_reversed(self) -> None:
        found = findings(levels([[6, 8], [10, 20]], num_seeds=1))
        assert values_of(f.WON_WITH_ONE_SEED, found)["seeds"] == "1 seed"
        assert values_of(f.COVERS, found)["covers"] == "other prompts, not for other seeds"
        assert f.ONE_SEED in templates(found)
        assert f.ONE_SEED not in templates(findings(levels([[6, 8], [10, 20]])))

    def test_an_overshoot_is_not_called_matched(self, rng: np.random.Generator) -> None:
        found = findings(synthetic(rng, lift={0: 0.0, 1: 3.0}, overshoot={1: 0.18}, num_prompts=60))
        assert found[0].template == f.SCORED_HIGHER
        assert found[0].values["winner"] == "N=512"
        assert not any(" won" in str(finding) or "Compute-matched" in str(finding) for finding in found)
        over = values_of(f.NOT_MATCHED, found)
        assert (over["arm"], over["spent"], over["budget"]) == ("N=512", "47.2 seconds", "40 seconds")
        assert over["excess"] == pytest.approx(0.18)
        level = findings(synthetic(rng, lift={0: 0.0, 1: 0.0}, overshoot={1: 0.18}, num_seeds=2))
        assert level[0].template == f.NO_DIFFERENCE_UNMATCHED
        assert "*" in arm_table(results_of(synthetic(rng, overshoot={1: 0.18}))).rows[-1][0]

    def test_an_arm_of_a_sweep_that_overshot_is_left_out_and_named(self, rng: np.random.Generator) -> None:
        lift = {0: 0.0, 1: 0.5, 2: 4.0}
        found = findings(synthetic(rng, numbers=(16, 64, 512), lift=lift, overshoot={2: 0.2}))
        assert found[0].values["arm"] == "N=64"
        assert "N=512" in found[0].values["left_out"]
        over = values_of(f.NOT_MATCHED, found)
        assert (over["arm"], over["spent"]) == ("N=512", "48 seconds")
        assert over["excess"] == pytest.approx(0.2)
        assert f.MATCHED not in templates(found)

    def test_the_gravest_caveats_are_told(self, rng: np.random.Generator) -> None:
        comparison = synthetic(rng, overshoot={1: 0.18}, ended_early={(0, 1): 2, (0, 2): 2}, num_prompts=20)
        results = results_of(replace(comparison, notes=("fewer prompts per step",)))
        topics = caveats_of(results)
        assert len(topics) > MAX_CAVEATS
        gravest = [[finding.template for finding in topic] for topic in topics[:2]]
        assert gravest == [[f.NOT_MATCHED], [f.ENDED_EARLY] * 2]
        record = comparison_record(results)
        assert record["summary"] == [*map(str, answer_of(results)), *sentences(topics[:MAX_CAVEATS])]
        assert record["caveats"] == sentences(topics)

    def test_an_early_ending_is_told(self, rng: np.random.Generator) -> None:
        ended = values_of(f.ENDED_EARLY, findings(synthetic(rng, ended_early={(0, 1): 2})))
        assert (ended["arm"], ended["seed"]) == ("N=16", 1)
        assert (ended["spent"], ended["budget"]) == ("20 seconds", "40 seconds")
        assert ended["reason"].startswith("collapsed: pass@1 fell")

    def test_settings_beside_n_are_named(self) -> None:
        comparison = levels([[6, 8], [10, 20]])
        assert not {f.MORE_SETTINGS, f.SEVERAL_SETTINGS} & templates(findings(comparison))
        arms = tuple(
            replace(arm, differs={**arm.differs, "optimizer.learning_rate": str(i)})
            for i, arm in enumerate(comparison.arms)
        )
        found = findings(replace(comparison, arms=arms))
        assert values_of(f.MORE_SETTINGS, found)["settings"] == "optimizer.learning_rate"

    def test_coverage_that_falls_while_pass_at_1_rises(self) -> None:
        comparison = levels([[6, 8], [6, 8]], ks=(1, 32), num_prompts=24)
        scores = comparison.arms[0].runs[0].scores
        sharp = replace(scores[-1], num_correct_P=np.where(np.arange(24) < 16, 32, 0))
        answer = findings(with_scores(comparison, 1, (*scores[:-1], sharp)))[0]
        assert (answer.template, answer.values["winner"]) == (f.WON, "N=512")
        found = results_of(with_scores(comparison, 1, (*scores[:-1], sharp)))
        score, start, at_a, at_b, difference, conclusion = pair_table(found).rows[-1]
        assert (score, start, at_a, at_b, conclusion) == ("pass@32", "1.000", "1.000", "0.667", "N=16 leads")
        assert difference.startswith("-0.333 [")
        assert [(c.arm, c.gained.mean, c.lost.mean) for c in found.coverage][1] == ("N=512", 0, 8)

    def test_a_sure_t_test_over_prompts_does_not_overrule_the_seeds(self) -> None:
        comparison = levels([[6, 8], [6, 8]], num_prompts=100)
        arm = comparison.arms[1]
        runs = []
        for run, more in zip(arm.runs, (-3, 3, 3), strict=True):
            last = replace(run.scores[-1], num_correct_P=run.scores[-1].num_correct_P + more)
            runs.append(replace(run, scores=(*run.scores[:-1], last)))
        found = findings(replace(comparison, arms=(comparison.arms[0], replace(arm, runs=tuple(runs)))))
        assert found[0].template == f.NO_DIFFERENCE
        assert f.T_TEST_DISAGREES in templates(found)

    def test_fewer_than_two_arms_are_refused(self) -> None:
        comparison = levels([[6], [8]])
        with pytest.raises(ValueError, match="at least two arms, got 1"):
            findings(replace(comparison, arms=comparison.arms[:1]))
        with pytest.raises(ValueError, match="different names, not N=16, N=16"):
            findings(replace(comparison, arms=(comparison.arms[0],) * 2))

    @pytest.mark.parametrize(("fraction", "unit", "told"), [
        (0.4, "seconds", True), (0.65, "seconds", True), (0.75, "seconds", False), (0.4, "samples", False)
    ])  # fmt: skip
    @pytest.mark.parametrize("numbers", [(16, 512), (16, 64, 512)])
    def test_a_run_that_was_disturbed_is_told(
        self, rng: np.random.Generator, fraction: float, unit: Unit, told: bool, numbers: tuple[int, ...]
    ) -> None:
        eval_points = (400.0, 800.0) if unit == "seconds" else (4e6, 8e6)
        comparison = synthetic(rng, numbers=numbers, num_seeds=5, unit=unit, eval_points=eval_points)
        arm = comparison.arms[1]
        *others, run = sorted(arm.runs, key=lambda run: run.seed == 3)
        steps = sorted(other.cost.steps for other in others)
        last = run.scores[-1]
        cost = replace(last.cost, steps=int(fraction * steps[1]))
        slow = replace(run, scores=(*run.scores[:-1], replace(last, cost=cost)), cost=cost, path="arms/some/seed-3")
        arms = (comparison.arms[0], replace(arm, runs=(*others, slow)), *comparison.arms[2:])
        found = findings(replace(comparison, arms=arms))
        if told:
            made = {"seed": 3, "arm": arm.name, "steps": cost.steps, "usual": steps[1], "path": "arms/some/seed-3"}
            assert values_of(f.SLOW_RUN, found) == made
        else:
            assert f.SLOW_RUN not in templates(found)


class TestRecord:
    def test_it_is_json_and_its_numbers_are_the_runs(self, rng: np.random.Generator) -> None:
        comparison = synthetic(rng, num_prompts=20)
        results = results_of(comparison)
        record = json.loads(json.dumps(comparison_record(results), allow_nan=False))
        assert record["summary"] == [*map(str, answer_of(results)), *sentences(caveats_of(results))]
        assert record["matched"] is True
        for arm, told in zip(comparison.arms, record["arms"], strict=True):
            for eval_point, at in zip(comparison.eval_points, record["at_eval_points"][arm.name], strict=True):
                for k, estimate in at["pass_at"].items():
                    expected = score_SP(comparison, arm, eval_point, int(k)).mean()
                    assert estimate["value"] == pytest.approx(expected, abs=1e-12)
                spent = [evaluation_at(comparison, arm, run, eval_point).cost.samples for run in range(3)]
                assert at["costs"]["samples"] == {"mean": sum(spent) / 3, "least": min(spent), "most": max(spent)}
            assert set(record["scores"]["pass_at"][arm.name]) == {"1", "4", "16"}
            for run, told_run in zip(arm.runs, told["runs"], strict=True):
                assert len(told_run["scores"]) == len(run.scores)
                last = told_run["scores"][-1]
                assert last["pass_at"]["1"] == pytest.approx(run.scores[-1].num_correct_P.mean() / 32, abs=1e-12)
                assert last["tokens_per_response"] == pytest.approx(run.scores[-1].sampled_tokens_P.mean() / 32)
            for i, prompt in enumerate(record["prompts"]):
                mean = sum(run.scores[-1].num_correct_P[i] for run in arm.runs) / 3 / 32
                assert prompt["arms"][arm.name] == pytest.approx(mean, abs=1e-12)
        difference = record["scores"]["differences"]["N=512"]["1"]["difference"]["value"]
        a, b = (score_SP(comparison, arm, 40.0).mean() for arm in comparison.arms)
        assert difference == pytest.approx(b - a, abs=1e-12)

    def test_numbers_without_a_value_are_null(self) -> None:
        comparison = levels([[6], [8]], num_prompts=1, num_seeds=1, num_sources=1)
        record = json.loads(json.dumps(comparison_record(results_of(comparison)), allow_nan=False))
        difference = record["scores"]["differences"]["N=512"]["1"]
        assert (difference["prompt_test"], difference["covers"]) == (None, "nothing")
        assert values_of(f.COVERS, findings(comparison))["covers"] == "neither other prompts nor other seeds"
        many = json.loads(json.dumps(comparison_record(results_of(levels([[6], [8]]))), allow_nan=False))
        assert many["scores"]["differences"]["N=512"]["1"]["prompt_test"]["t"] is None  # infinite

    def test_a_sweep(self, rng: np.random.Generator) -> None:
        comparison = synthetic(rng, numbers=(16, 64, 256), num_prompts=20)
        record = json.loads(json.dumps(comparison_record(results_of(comparison)), allow_nan=False))
        assert list(record["scores"]["differences"]) == ["N=64", "N=256"]
        assert list(record["best"]) == ["1", "16"]
        for k in (1, 16):
            for best, eval_point in zip(record["best"][str(k)], comparison.eval_points, strict=True):
                means = {arm.name: score_SP(comparison, arm, eval_point, k).mean() for arm in comparison.arms}
                second, first = sorted(means.values())[-2:]
                assert means[best["arm"]] == pytest.approx(first, abs=1e-12)
                assert best["lead"]["value"] == pytest.approx(first - second, abs=1e-12)
