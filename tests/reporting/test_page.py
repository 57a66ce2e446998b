"""The page's numbers are those of the metrics, its rollouts those of the files, and no text can become markup."""

import base64
import gzip
import json
import re
from collections import Counter
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from itertools import combinations
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brorl.algorithms.groups import Group
from brorl.comparison.answer import comparison_page
from brorl.comparison.findings import answer_of, caveats_of, match_of, sentences
from brorl.comparison.results import results_of
from brorl.comparison.tables import tables_of
from brorl.errors import UserError
from brorl.format import visible_text
from brorl.prompts.prompt import Prompt
from brorl.reporting import charts as page_charts
from brorl.reporting.charts import Chart
from brorl.reporting.frame import compressed, fill, page_json, resource
from brorl.reporting.page import ROLLOUT_BYTES, event_marks, left_out, make_page
from brorl.reporting.page_rollouts import (
    choose_evaluations,
    choose_rollouts,
    encode_step,
    evenly_spaced,
)
from brorl.reporting.summary import COSTS, TOOLS, cost_row, run_notes, steps_done, tools_rows
from brorl.reporting.tokens import token_text, tokenizer_of_run
from brorl.runs.run_directory import RunDirectory, StoredRun, differing_settings, read_run, read_runs
from brorl.tree import RolloutTree
from brorl.verdict import Verdict
from comparison.comparisons import synthetic
from made_up_runs import HOSTILE, evaluation, held_out_answers, make_run, random_step, run_of, step_record, typed

Records = list[dict[str, Any]]


def charts_of(*runs: StoredRun) -> dict[str, Chart]:
    made = [chart for some in page_charts.charts_of(runs).values() for chart in some]
    assert len({chart.name for chart in made}) == len(made)
    return {chart.name: chart for chart in made}


def embedded(page: str) -> Any:
    """The data that the page's script reads."""
    return json.loads(page.partition('id="data">')[2].partition("</script>")[0])


@pytest.fixture
def made(tmp_path: Path, rng: np.random.Generator) -> tuple[StoredRun, Records]:
    records, _ = make_run(tmp_path / "one", rng)
    return read_run(tmp_path / "one"), records


def test_lines_hold_the_numbers_of_the_metrics(made: tuple[StoredRun, Records]) -> None:
    run, records = made
    charts = charts_of(run)
    steps = [(at, r) for at, r in enumerate(records) if "sampling" in r]
    update = {"entropy": ["entropy"], "kl": ["reference_kl", "old_policy_kl"], "gradient": ["grad_norm"]}
    update |= {"clip": ["clip_high_fraction", "clip_low_fraction"]}
    sampled = {"reward": ["reward"], "length": ["mean_length"], "truncated": ["truncation_rate"]}
    for section, names in (("update", update), ("sampling", sampled)):
        for name, keys in names.items():
            traces = [t for t in charts[name].traces if "mean of" not in t["name"]]
            assert all(t["name"] for t in traces)
            assert [t["y"] for t in traces] == [[r[section][key] for _, r in steps] for key in keys], name
            assert all(t["meta"]["at"] == [at for at, _ in steps] for t in traces)
    saved = [[r["sampling"][a] / r["sampling"][b] for _, r in steps] for a, b in (
        ("unique_tokens", "sampled_tokens"), ("distinct_responses", "samples"))]  # fmt: skip
    assert [t["y"] for t in charts["sharing"].traces] == saved
    lost = [[r["sampling"][f"{a}_dropped"] / r["sampling"][a] for _, r in steps] for a in ("samples", "unique_tokens")]
    assert [t["y"] for t in charts["dropped"].traces] == lost
    pooled = [[r["coverage"]["pooled"][n] for _, r in steps] for n in ("unsampled", "unsampled_correct")]
    unsampled = [[value for value in values if value is not None] for values in pooled]
    assert [t["y"] for t in charts["unsampled"].traces] == unsampled
    mixed = [r["sampling"]["groups_mixed"] / r["sampling"]["groups"] for _, r in steps]
    assert charts["mixed"].traces[0]["y"] == mixed
    phases = {t["name"]: t["y"] for t in charts["seconds"].traces}
    assert phases == {p: [r["seconds"][p] for _, r in steps] for p in phases}
    assert len(phases) == 5
    assert charts["lost"].traces == () or any(r["sampling"]["verifier_timeouts"] for _, r in steps)


def test_the_chart_and_the_table_of_calls(tmp_path: Path, rng: np.random.Generator) -> None:
    records, _ = make_run(tmp_path / "run", rng, tools=True)
    make_run(tmp_path / "plain", rng)
    run, plain = read_runs([tmp_path / "run", tmp_path / "plain"])
    steps = [r for r in records if "sampling" in r]
    per_rollout = [(r["tools"]["calls"] / r["sampling"]["samples"], sum(r["tools"]["failures"].values()) /
                    r["sampling"]["samples"]) for r in steps]  # fmt: skip
    calls, failed = charts_of(run)["calls"].traces
    assert (calls["y"], failed["y"]) == tuple(map(list, zip(*per_rollout, strict=True)))
    assert calls["meta"]["at"] == failed["meta"]["at"] == [1, 2, 3, 4, 5]
    shared = [r["tools"]["distinct_calls"] / r["tools"]["calls"] for r in steps]
    assert charts_of(run)["sharing"].traces[-1]["y"] == shared
    assert [trace["name"] for trace in charts_of(run, plain)["calls"].traces] == [
        "run \u00b7 calls",
        "run \u00b7 failed calls",
    ]
    page, (cells,) = make_page([run, plain]), tools_rows(run)
    row = dict(zip(TOOLS, cells, strict=True))
    made, distinct = (sum(r["tools"][name] for r in steps) for name in ("calls", "distinct_calls"))
    failures = sum(per_step * r["sampling"]["samples"] for (_, per_step), r in zip(per_rollout, steps, strict=True))
    assert (row["calls"], row["distinct"]) == (f"{made:,}", f"{distinct:,} ({distinct / made:.1%})")
    assert row["failed"].startswith(f"{failures:,.0f} ({failures / made:.1%}): ")
    assert all(f">{cell}<" in page for cell in cells)
    assert (tools_rows(plain), "calls" in charts_of(plain)) == ([], False)
    assert "turns per rollout" not in make_page([plain])


def test_x_values_are_what_was_spent(made: tuple[StoredRun, Records]) -> None:
    run, records = made
    x = embedded(make_page([run], 1000))["runs"][0]["x"]
    spent = {"step": 0, "seconds": 0.0, "samples": 0, "unique_tokens": 0}
    for at, record in enumerate(records):
        spent["step"] = record["step"]
        if "sampling" in record:
            spent["seconds"] += record["seconds"]["total"]
            spent["samples"] += record["sampling"]["samples"]
            spent["unique_tokens"] += record["sampling"]["unique_tokens"]
        assert {unit: x[unit][at] for unit in x} == pytest.approx(spent, rel=1e-6)


def test_points_with_intervals(made: tuple[StoredRun, Records]) -> None:
    run, records = made
    charts = charts_of(run)
    for name, rows in (
        ("pass1", [(i, r["evaluation"]["pass_at"]["1"]) for i, r in enumerate(records) if "evaluation" in r]),
        ("held_out_check", [(3, {k: records[3]["held_out_check"][f"change{k}"] for k in ("", "_low", "_high")})]),
    ):
        (trace,) = charts[name].traces
        value, low, high = ("value", "low", "high") if name == "pass1" else ("", "_low", "_high")
        assert trace["meta"]["at"] == [at for at, _ in rows]
        assert trace["y"] == [v[value] for _, v in rows]
        up, down = trace["error_y"]["array"], trace["error_y"]["arrayminus"]
        np.testing.assert_allclose([y + u for y, u in zip(trace["y"], up, strict=True)], [v[high] for _, v in rows])
        np.testing.assert_allclose([y - d for y, d in zip(trace["y"], down, strict=True)], [v[low] for _, v in rows])


def test_pass_at_k_curves_are_means_over_all_draws(made: tuple[StoredRun, Records]) -> None:
    run, records = made
    traces = charts_of(run)["passk"].traces
    evaluations = [r["evaluation"] for r in records if "evaluation" in r]
    points, curves = traces[::2], traces[1::2]
    assert len(points) == len(curves) == len(evaluations) == 2
    for point, curve, measured in zip(points, curves, evaluations, strict=True):
        assert dict(zip(point["x"], point["y"], strict=True)) == {
            int(k): v["value"] for k, v in measured["pass_at"].items()
        }
        n = measured["num_samples"]
        assert curve["x"] == [1, 2, 4, 8]
        for k, y in zip(curve["x"], curve["y"], strict=True):
            hit = [
                np.mean([min(draw) < c for draw in combinations(range(n), k)])
                for c in measured["prompts"]["num_correct"]
            ]
            assert y == pytest.approx(float(np.mean(hit)), abs=1e-12)


def test_held_out_prompts_before_and_after(made: tuple[StoredRun, Records]) -> None:
    run, records = made
    (trace,) = charts_of(run)["held-out"].traces
    first, last = records[0]["evaluation"]["prompts"], records[-1]["evaluation"]["prompts"]
    expected = Counter((a / 8, b / 8) for a, b in zip(first["num_correct"], last["num_correct"], strict=True))
    areas = [(size / 6) ** 2 for size in trace["marker"]["size"]]
    assert dict(zip(zip(trace["x"], trace["y"], strict=True), areas, strict=True)) == pytest.approx(dict(expected))
    assert [int(text.split(" ")[0]) for text in trace["text"]] == list(expected.values())
    shown = [text.replace("<br>", "") for text in trace["text"]]
    assert not any("<" in text or "\x1b" in text or "\u202e" in text for text in shown)


def test_a_point_shows_questions_without_their_template(made: tuple[StoredRun, Records]) -> None:
    run, _ = made
    texts = tuple(f"system\nWhat is {3 + i} + 4? Answer in a box.\nassistant" for i in range(12))
    (trace,) = charts_of(replace(run, held_out=texts))["held-out"].traces
    for text in trace["text"]:
        counted, *questions = text.split("<br>")
        number = int(counted.split()[0])
        assert questions[3:] == ["..."] * (number > 3)
        assert set(questions[:3]) <= {str(3 + i) for i in range(12)}


def test_a_step_that_sampled_nothing_has_no_mean(rng: np.random.Generator) -> None:
    records = [step_record(rng, s, random_step(rng, 3, 8)) for s in range(1, 4)]
    records[1]["sampling"] |= {"samples": 0, "mean_length": 0.0, "reward": 0.9}
    charts = charts_of(run_of(records))
    for name, key in (("length", "mean_length"), ("reward", "reward")):
        assert charts[name].traces[0]["y"] == [records[at]["sampling"][key] for at in (0, 2)]


def test_fractions_at_other_n_weigh_groups_alike(rng: np.random.Generator) -> None:
    records = [step_record(rng, s, random_step(rng, int(rng.integers(2, 6)), 20)) for s in range(1, 31)]
    charts = charts_of(run_of(records))
    for chart, name in (("mixed-n", "mixed_fraction_at"), ("unsampled-n", "unsampled_correct_at")):
        last = [r for r in records if r["coverage"]["pooled"][name]][-25:]
        (trace,) = charts[chart].traces
        assert {16, 20} <= set(trace["x"])
        for n, y in zip(trace["x"], trace["y"], strict=True):
            values = [v for r in last for v in [r["coverage"]["pooled"][name][str(n)]] * r["sampling"]["groups"]]
            assert y == pytest.approx(np.mean(values), rel=1e-12)
    smaller = {t["name"]: t for t in charts["mixed"].traces}
    assert smaller["N = 16"]["y"] == [r["coverage"]["pooled"]["mixed_fraction_at"]["16"] for r in records]


def test_the_bold_reward_is_the_moving_mean(rng: np.random.Generator) -> None:
    rewards = rng.normal(size=30)
    records = [{"step": i, "sampling": {"reward": float(r), "samples": 1}} for i, r in enumerate(rewards)]
    thin, bold = charts_of(run_of(records))["reward"].traces
    assert thin["y"] == rewards.tolist()
    np.testing.assert_allclose(bold["y"], [rewards[max(i - 2, 0) : i + 3].mean() for i in range(30)])


@pytest.mark.parametrize("num_rollouts", [12, 40])
def test_histogram_counts_every_prompt(rng: np.random.Generator, num_rollouts: int) -> None:
    records = [step_record(rng, s, random_step(rng, 6, num_rollouts)) for s in range(1, 4)]
    made = charts_of(run_of(records))["success"].histogram
    assert made is not None
    assert made["runs"][0]["steps"] == [1, 2, 3]
    for record, counts in zip(records, made["runs"][0]["counts"], strict=True):
        prompts = record["coverage"]["prompts"]
        expected: Counter[int] = Counter()
        for k, n in zip(prompts["num_correct"], prompts["num_rollouts"], strict=True):
            assert n == num_rollouts
            if num_rollouts == 12:
                expected[k] += 1
                continue
            edges = [0.0, *(0.1 * i for i in range(1, 10))]
            inner = next((i for i, e in enumerate(edges) if k / n <= e + 1e-12), 10)
            expected[11 if k == n else inner] += 1
        assert dict(expected) == {i: c for i, c in enumerate(counts) if c}
        assert len(counts) == len(made["labels"])


def test_several_runs_overlay_and_differ(tmp_path: Path, rng: np.random.Generator) -> None:
    make_run(tmp_path / "a" / "same", rng)
    make_run(tmp_path / "b" / "same", rng, steps=4, settings="steps: 4\nloss: {kind: ppo, clip_high: 0.3}\nseed: 1\n")
    runs = read_runs([tmp_path / "a" / "same", tmp_path / "b" / "same"])
    assert [run.name for run in runs] == ["a/same", "b/same"]
    expected = {"steps", "rollouts_per_prompt", "prompts_per_step", "loss.clip_high", "seed"}
    assert set(differing_settings(runs)) == expected
    charts = charts_of(*runs)
    assert [t["meta"]["run"] for t in charts["entropy"].traces] == [0, 1]
    assert len({t["meta"]["color"] for t in charts["entropy"].traces}) == 2
    bars = charts["seconds"].traces
    for trace in bars:
        means = [np.mean([getattr(r.seconds, trace["name"]) for r in run.steps]) for run in runs]
        np.testing.assert_allclose(trace["y"], means)
    page = make_page(runs)
    assert page.count("<tr class=differs>") == len(expected)


def test_what_was_not_measured_is_said_and_not_drawn() -> None:
    charts = charts_of(run_of([{"step": 0}]))
    assert all(chart.traces == () and chart.histogram is None and chart.empty for chart in charts.values())
    update = {"entropy": nan, "reference_kl": None, "grad_norm": float("inf")}
    records = [{"step": 1, "update": update}, {"step": 2, "update": {"entropy": 0.5}}]
    charts = charts_of(run_of(records))
    assert [t["y"] for t in charts["entropy"].traces] == [[0.5]]
    assert charts["kl"].traces == charts["gradient"].traces == ()
    page = make_page([run_of(records)])
    assert "Training: There are no responses in run/rollouts." in page
    assert "The metrics contain no such number." in page


def test_summary_adds_up(made: tuple[StoredRun, Records]) -> None:
    run, records = made
    row = dict(zip(COSTS, cost_row(run), strict=True))
    steps = [r for r in records if "sampling" in r]
    sampled, unique = (sum(r["sampling"][n] for r in steps) for n in ("sampled_tokens", "unique_tokens"))
    assert row["rollouts"] == f"{sum(r['sampling']['samples'] for r in steps):,}"
    assert row["tokens sampled"] == f"{sampled:,}"
    assert row["computed"] == f"{unique:,} ({100 * unique / sampled:.1f}%)"
    assert row["prompts x N"] == "4 x 12"
    lost = sum(r["sampling"]["samples_dropped"] for r in steps)
    assert row["dropped"] == f"{lost:,} ({100 * lost / sum(r['sampling']['samples'] for r in steps):.1f}%)"
    assert row["steps"] == "5"


def test_phases_are_marked_and_noted(made: tuple[StoredRun, Records]) -> None:
    records = made[1]
    for step, record in enumerate(r for r in records if "update" in r):
        record["objective"] = {"phase": 1 + (step >= 3), "name": "<b>sharpen" if step >= 3 else "broaden"}
        if step in (0, 3):
            record["objective"]["begins"] = f"phase {record['objective']['phase']} of 2"
    run = run_of(records)
    at = next(i for i, r in enumerate(run.records) if r.objective and r.objective.phase == 2)
    assert event_marks(run)[-1] == {"at": at, "label": "&lt;b&gt;sharpen begins"}
    assert f"From step {run.records[at].step}: phase 2 of 2." in run_notes(run)
    charts = charts_of(run)
    assert charts["pass1"].marks
    assert charts["coverage"].marks
    assert not charts["clip"].marks


def test_a_fall_of_coverage_is_noted(rng: np.random.Generator) -> None:
    first, last = evaluation(rng), evaluation(rng)
    first["pass_at"]["8"] = {"value": 0.9, "low": 0.85, "high": 0.95}
    last["pass_at"]["8"] = {"value": 0.8, "low": 0.75, "high": 0.849}
    records = [{"step": 0, "evaluation": first}, {"step": 9, "evaluation": last}]
    assert "pass@8 went from 0.900 to 0.800" in " ".join(run_notes(run_of(records)))
    last["pass_at"]["8"]["high"] = 0.851
    assert not run_notes(run_of(records))


def test_embedded_json_is_the_value_and_never_markup(rng: np.random.Generator) -> None:
    characters = [*"<>&'\"/\\!-{}\x00\x1b\n\u2028\u2029\u202e\ud800", "</script>", "<!--", "\U0001f600", "a"]
    for _ in range(50):
        text = "".join(rng.choice(characters, 12).tolist())
        value = {text: [text, 3, None, True, {"x": 0.25}]}
        made = page_json(value)
        assert json.loads(made) == value
        assert made.isascii()
        assert not set("<>&'") & set(made)
        assert json.loads(gzip.decompress(base64.b64decode(compressed(value)))) == value
    assert page_json([nan, float("inf"), 1 / 3]) == "[null,null,0.3333333]"


def test_parts_are_filled_in_once() -> None:
    assert fill("{{A}}-{{B}}", {"A": "{{B}}", "B": r"\1{{A}}"}) == r"{{B}}-\1{{A}}"


def test_acting_characters_are_written_out() -> None:
    text = "a\x1b[1m\u202e\x9b\n\t\r\U000e0041\ud800é"
    assert visible_text(text) == "a\\x1b[1m\\u202e\\x9b\n\t\\r\\U000e0041\\ud800é"
    assert visible_text("a\n\tb", one_line=True) == "a\\n\\tb"


class Elements(HTMLParser):
    """Counts the elements of a page, and collects its handlers and what a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.handlers: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


@pytest.mark.parametrize("name", [h.replace("/", "|").replace("\x00", "") for h in HOSTILE[:5]])
def test_no_name_or_text_becomes_markup(tmp_path: Path, rng: np.random.Generator, name: str) -> None:
    seed = int(rng.integers(1 << 30))
    make_run(tmp_path / name[:80], np.random.default_rng(seed), steps=3)
    settings = "steps: 5\nprompt: {template: \"</code><script>1</script>\", system_prompt: '<img src=x onerror=1>'}\n"
    (tmp_path / name[:80] / "config.yaml").write_text(settings)

    make_run(tmp_path / "plain", np.random.default_rng(seed), steps=3)
    parsed = []
    for path in (tmp_path / name[:80], tmp_path / "plain"):
        page = make_page([read_run(path)])
        elements = Elements()
        elements.feed(page.replace(page[page.index("</noscript>") : page.index("<footer>")], ""))
        whole = Elements()
        whole.feed(page)
        parsed.append(elements.seen)
        assert not whole.handlers
        assert whole.seen["img"] == whole.seen["iframe"] == 0
        # theme, data, one step of rollouts, two evaluations, plotly, the page's own
        assert whole.seen["script"] == 7
        assert whole.seen["link"] == 1  # an empty icon, so that none is asked for
        assert "default-src 'none'" in page
    assert parsed[0] == parsed[1]


@pytest.mark.slow
def test_the_page_of_a_long_run_is_small(rng: np.random.Generator) -> None:
    record = step_record(rng, 1, random_step(rng, 3, 40))
    prompts = {n: v * 40 if isinstance(v, list) else v for n, v in record["coverage"]["prompts"].items()}
    record["coverage"]["prompts"] = prompts
    records = [{**record, "step": step, "evaluation": evaluation(rng)} for step in range(500)]
    size = len(make_page([run_of(records)]).encode())
    assert size + ROLLOUT_BYTES < 10_000_000


@pytest.mark.parametrize("number", range(12))
def test_steps_are_evenly_spaced(number: int) -> None:
    steps = [3, 4, 9, 10, 20, 30, 31, 40]
    chosen = evenly_spaced(steps, number) if number else []
    assert len(chosen) == min(number, len(steps))
    assert chosen == sorted(set(chosen))
    if chosen:
        assert chosen[-1] == 40
        places = [steps.index(s) for s in chosen]
        gaps = np.diff(places)
        assert number == 1 or (places[0] == 0 and gaps.max() - gaps.min() <= 1)


def unpacked(data: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(data)))
    return value


def test_rollouts_on_the_page_are_those_stored(tmp_path: Path, rng: np.random.Generator) -> None:
    _, kept = make_run(tmp_path / "one", rng, steps=6)
    assert tokenizer_of_run(tmp_path / "one") is None
    chosen = choose_rollouts(tmp_path / "one", token_text(None), 10_000_000, 40)
    assert [step.step for step in chosen] == [2, 4, 6]
    for step in chosen:
        data, stored = unpacked(step.data), kept[step.step]
        assert step.responses == step.all_responses == sum(g.tree.num_responses for g in stored)
        for made, group in zip(data["groups"], stored, strict=True):
            tree = group.tree
            assert [data["tokenIds"][i] for i in made["token"]] == tree.token.tolist()
            assert made["depth"] == [len(tree.path(i)) - 1 for i in range(tree.num_unique_tokens)]
            assert made["count"] == tree.count.tolist()
            right = np.zeros(tree.num_unique_tokens, int)
            for leaf, count, verdict in zip(tree.leaf, tree.leaf_count, group.verdicts, strict=True):
                right[tree.path(int(leaf))] += count * verdict.correct
            assert made["rightBelow"] == right.tolist()
            logprob = [None if x == 1 else x / 1000 for x in made["logprob"]]
            for x, y in zip(logprob, tree.logprob.tolist(), strict=True):
                assert (x is None and np.isnan(y)) or abs(x - y) <= 0.000501
            assert made["text"] == group.texts
            assert made["extracted"] == [v.extracted for v in group.verdicts]
            assert made["reason"] == [v.reason for v in group.verdicts]
            np.testing.assert_allclose(made["reward"], group.reward_L, rtol=1e-6)
            assert (made["rollouts"], made["right"]) == (tree.num_rollouts, group.num_correct)


def test_the_page_knows_who_wrote_a_token(tmp_path: Path, rng: np.random.Generator) -> None:
    _, stored = make_run(tmp_path / "run", rng, tools=True, num_groups=2, num_rollouts=60)
    groups = unpacked(encode_step(tmp_path / "run", 4, token_text(None), 10_000_000).data)["groups"]
    for group, kept in zip(groups, stored[4], strict=True):
        tree = kept.tree
        assert group["given"] == tree.given.tolist()
        assert group["called"] == [tree.num_turns - tree.num_rollouts, len(tree.first_given)]
        assert all(text is not None for text in group["text"])  # no made-up text is that of its tokens
    small = unpacked(encode_step(tmp_path / "run", 4, token_text(None), 3_000).data)["groups"]
    places = {group["id"]: group for group in groups}
    assert any(len(group["given"]) < len(places[group["id"]]["given"]) for group in small)
    for group in small:
        assert len(group["given"]) == len(group["token"])
        assert group["called"] == places[group["id"]]["called"]


def test_a_stored_text_that_is_the_last_turn_is_not_repeated(tmp_path: Path) -> None:
    tree = RolloutTree.from_responses((1,), [(5, 6, 7), (5, 6, 8)], given=[[False, True, False]] * 2)
    verdicts = [Verdict(True, 1.0, None, "correct", 0.0)] * 2
    group = Group.from_verdicts(Prompt("p", "text", (1,), "ref", "math"), tree, verdicts)
    stored = replace(group, texts=["[7]", "[5][8]"])
    RunDirectory(tmp_path).write_responses("rollouts", 1, [stored])
    (encoded,) = unpacked(encode_step(tmp_path, 1, token_text(None), 10_000).data)["groups"]
    assert encoded["text"] == [None, "[5][8]"]


def test_evaluations_on_the_page_are_the_first_the_best_and_the_last(tmp_path: Path, rng: np.random.Generator) -> None:
    run = tmp_path / "one"
    records, _ = make_run(run, rng, steps=4, store_evaluations=False)
    scores = {0: 0.9, 1: 0.2, 2: 0.6, 3: 0.6, 4: 0.4}  # that of the start is not a result of training
    for record in records:
        record["evaluation"] = evaluation(rng)
        record["evaluation"]["pass_at"]["1"]["value"] = scores[record["step"]]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prompts = [group.prompt for group in random_step(rng, 3, 2)[:2]]
    stored = {step: held_out_answers(rng, prompts, 12) for step in scores}
    for step, answers in stored.items():
        RunDirectory(run).write_responses("evaluations", step, answers)
    chosen = choose_evaluations(read_run(run), token_text(None), 1_000_000)
    assert [step.step for step in chosen] == [0, 2, 4]
    for step in chosen:
        groups = unpacked(step.data)["groups"]
        assert [group["id"] for group in groups] == [prompt.id for prompt in prompts]
        assert [group["right"] for group in groups] == [group.num_correct for group in stored[step.step]]
    labels = [entry["label"] for entry in embedded(make_page([read_run(run)]))["runs"][0]["evaluations"]]
    assert labels == ["before training", "after step 2 (best)", "after step 4"]
    small = make_page([read_run(run)], 12_000)
    packed = re.findall(r'<script type="application/gzip"[^>]*>(.*?)</script>', small)
    assert 0 < sum(map(len, packed)) <= 12_000
    assert choose_evaluations(read_run(run), token_text(None), 3) == ()


@pytest.mark.slow
def test_a_large_step_keeps_its_most_frequent_responses(tmp_path: Path, rng: np.random.Generator) -> None:
    run = tmp_path / "one"
    make_run(run, rng, steps=3, num_groups=20, num_rollouts=60)
    whole = unpacked(encode_step(run, 2, token_text(None), 10_000_000).data)
    small = encode_step(run, 2, token_text(None), 6_000)
    assert len(small.data) <= 6_000
    data = unpacked(small.data)
    assert 0 < len(data["groups"]) == small.prompts <= small.all_prompts == 20
    assert small.responses == sum(len(g["leaf"]) for g in data["groups"]) < small.all_responses
    complete = [(group, counts_by_prefix(whole, group)) for group in whole["groups"]]
    for group in data["groups"]:
        # Counts are those of all rollouts, whatever was left out.
        counts = counts_by_prefix(data, group)
        (same,) = [g for g, all_counts in complete if g["id"] == group["id"] and counts.items() <= all_counts.items()]
        shown = sorted(group["leafCount"], reverse=True)
        assert shown == sorted(same["leafCount"], reverse=True)[: len(shown)]


def counts_by_prefix(data: dict[str, Any], group: dict[str, Any]) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return for each prefix of tokens its count and how many of these rollouts are correct."""
    found, prefix = {}, ()
    for place, depth, count, right in zip(
        group["token"], group["depth"], group["count"], group["rightBelow"], strict=True
    ):
        prefix = (*prefix[:depth], data["tokenIds"][place])
        found[prefix] = (count, right)
    return found


@pytest.mark.parametrize("budget", [0, 3_000, 12_000, 60_000])
def test_rollouts_keep_to_the_budget(tmp_path: Path, rng: np.random.Generator, budget: int) -> None:
    run = tmp_path / "one"
    make_run(run, rng, steps=9, num_groups=3, num_rollouts=30, store_every=1)
    chosen = choose_rollouts(run, token_text(None), budget, 7)
    steps = [step.step for step in chosen]
    assert sum(len(step.data) for step in chosen) <= budget
    assert len(steps) <= 7
    assert steps == (evenly_spaced(range(1, 10), len(steps)) if steps else [])
    assert budget < 60_000 or len(steps) == 7
    said = left_out(read_run(run), chosen)
    assert f"{len(steps)} of 9 stored steps" in said
    assert "brorl samples" in said


def test_tokens_are_named_by_the_saved_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"</script>": 0, "\u2581hi": 1, "<0xE2>": 2, "\x1b": 3, "<end>": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="\x1b"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["<end>"])
    folder = tmp_path / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text_of = token_text(tokenizer_of_run(tmp_path))
    expected = [("</script>", False), (" hi", False), ("\ufffd", False), ("\x1b", False), ("<end>", True)]
    assert [text_of(i) for i in range(5)] == expected
    assert text_of(99) == ("[99]", False)
    (folder / "tokenizer.json").write_text("{")
    assert tokenizer_of_run(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "is not a run directory"),
        ({"config.yaml": "steps: 1\n"}, "contains no metrics yet"),
        ({"metrics.jsonl": '{"step": 0}\n{"step"\n'}, "metrics.jsonl line 2 is not JSON"),
        ({"metrics.jsonl": "[1]\n"}, "metrics.jsonl line 1 is not a metrics record"),
        ({"metrics.jsonl": '{"step": 0}\n', "config.yaml": "a: [\n"}, "config.yaml is not YAML"),
        ({"metrics.jsonl": '{"step": 0}\n', "env.json": "{"}, "env.json is not JSON"),
    ],
)
def test_what_is_not_a_run_is_refused(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said) as error:
        read_run(tmp_path)
    assert "\n" not in str(error.value)


def test_a_run_is_read_while_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "x": NaN}\n{"step": 1, "samp')
    run = read_run(tmp_path)
    assert [r.step for r in run.records] == [0]
    with pytest.raises(UserError, match="listed twice"):
        read_runs([tmp_path, tmp_path / "."])
    with pytest.raises(UserError, match="there is no run directory"):
        read_run(tmp_path / "none")


def test_a_budget_stands_in_place_of_a_number_of_steps(tmp_path: Path) -> None:
    settings = {"budget.limit": "30000.0", "budget.unit": "unique_tokens", "steps": "1000000"}
    run = StoredRun(
        tmp_path, "run", settings, {}, typed([{"step": 0}, {"step": 7, "update": {}}, {"step": 8, "end_reason": "x"}])
    )
    assert steps_done(run) == "7, budget 30,000 unique tokens"
    assert steps_done(replace(run, settings={"budget.limit": "null", "steps": "9"})) == "7 of 9"


def test_the_page_is_one_file_with_the_answer_first_and_the_next_command_last(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    arm = "<script>x</script>"
    comparison = synthetic(rng, names=("plain", arm))
    results = results_of(comparison)
    tables, answer = tables_of(results), list(map(str, answer_of(results)))
    caveats = sentences(caveats_of(results)[:3])
    figure = tmp_path / "comparison.png"
    figure.write_bytes(b"\x89PNG picture")
    page = comparison_page(results, [figure], ("to go on", f"brorl compare '{arm}'"))

    order = [answer[0], str(match_of(results)[0]), tables[0].title, "data:image/png;base64,", tables[1].title,
             tables[-1].title, caveats[-1], f"brorl compare '{arm}'"]  # fmt: skip
    body = page[page.index("<main>") :]
    places = [body.index(escape(part)) for part in order]
    assert places == sorted(places)
    assert all(escape(line) in page for line in (*answer, *caveats))
    assert all(escape(cell) in page for table in tables for row in table.rows for cell in row)

    (picture,) = re.findall(r"data:image/png;base64,([^\"]*)", page)
    assert base64.b64decode(picture) == figure.read_bytes()
    links = Elements()
    links.feed(page)
    assert links.seen["script"] == 1  # the theme; the arm's name is none
    assert all(source.startswith(("#", "data:")) for source in links.sources)
    assert "default-src 'none'" in page


# What color-blind readers see of linear RGB: Machado et al., IEEE TVCG 15 (2009), severity 1.
_SEEN = {
    "all": np.eye(3),
    "protan": np.array([
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]),
    "deutan": np.array([
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]),
}  # fmt: skip
_TO_LMS = np.array([[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.6806995, 0.10739696],
                    [0.08830246, 0.28171884, 0.62997870]])  # fmt: skip
_TO_OKLAB = np.array([[0.21045426, 0.79361779, -0.00407205], [1.9779985, -2.42859221, 0.4505937],
                      [0.0259040, 0.78277177, -0.80867577]])  # fmt: skip


def test_ordered_lines_have_colors_that_everybody_tells_apart() -> None:
    """In Oklab, where the nearest of the four blues before were 0.04 apart."""
    scales = [theme["sequence"] for theme in json.loads(resource("colors.json")).values()]
    assert [len(scale) for scale in scales] == [5, 5]
    for scale in scales:
        srgb_S3 = np.array([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in scale])
        linear_S3 = np.where(srgb_S3 <= 0.04045, srgb_S3 / 12.92, ((srgb_S3 + 0.055) / 1.055) ** 2.4)
        for kind, matrix in _SEEN.items():
            lab_S3 = np.cbrt(np.clip(linear_S3 @ matrix.T, 0, 1) @ _TO_LMS.T) @ _TO_OKLAB.T
            nearest = min(np.linalg.norm(a - b) for a, b in combinations(lab_S3, 2))
            assert nearest > 0.1, (scale, kind, nearest)
    places = [page_charts.sequence_color(place, 5) for place in (1, 3, 5)]
    assert places == ["sequence:0.000", "sequence:0.500", "sequence:1.000"]
