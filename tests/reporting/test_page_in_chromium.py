"""The page in a real browser: it asks for nothing, complains of nothing, draws its charts, and its controls work."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brorl.algorithms.groups import Group
from brorl.format import visible_text
from brorl.reporting.page import make_page
from brorl.runs.run_directory import read_runs
from brorl.runs.stored_rollouts import read_groups
from chromium import Chromium, chromium_or_skip
from made_up_runs import HOSTILE, fruitless_record, make_run

pytestmark = pytest.mark.chromium

Records = list[dict[str, Any]]


def shown(text: str) -> str:
    """What the page makes of a text: line ends and tabs are marked, and stay."""
    return visible_text(text).replace("\n", "↵\n").replace("\t", "⇥\t")


@pytest.mark.slow
def test_the_charts_are_drawn_and_nothing_is_requested(tmp_path: Path, rng: np.random.Generator) -> None:
    records, _ = make_run(tmp_path / "one", rng, steps=5, num_groups=3, num_rollouts=40)
    page = tmp_path / "one.html"
    page.write_text(make_page(read_runs([tmp_path / "one"])), "utf-8")
    with Chromium(chromium_or_skip()) as browser:
        browser.open(page)
        check_charts(browser, records)
        check_legends(browser)
        check_silence(browser, page)


@pytest.mark.slow
def test_the_page_works_in_a_browser(tmp_path: Path, rng: np.random.Generator) -> None:
    name = HOSTILE[0].replace("/", "|")
    one, two, three = (tmp_path / f"{name_}.html" for name_ in ("one", "two", "three"))
    with Chromium(chromium_or_skip()) as browser:
        records, stored = make_run(tmp_path / name, rng, steps=5, num_groups=5, num_rollouts=40)
        others, _ = make_run(tmp_path / "other", rng, steps=3)
        one.write_text(make_page(read_runs([tmp_path / name])), "utf-8")
        two.write_text(make_page(read_runs([tmp_path / "other", tmp_path / name])), "utf-8")

        lines = [json.dumps(record) + "\n" for record in (others[0], fruitless_record(rng, 1))]
        (tmp_path / "other" / "metrics.jsonl").write_text("".join(lines))
        three.write_text(make_page(read_runs([tmp_path / "other"])), "utf-8")

        browser.prefer_dark(False)
        browser.set_width(1400)
        browser.open(one)
        check_held_out_prompts(browser, tmp_path / name)
        check_x_axis(browser, records)
        check_histogram(browser, records)
        check_prompts(browser, stored)
        check_responses(browser, stored)
        check_tree(browser, stored)
        check_themes(browser)
        assert browser.value("document.title") == f"brorl report: {name}"
        finish_page(browser, one)

        browser.open(two)
        check_two_runs(browser, stored)
        finish_page(browser, two)

        browser.open(three)
        finish_page(browser, three)
        check_that_a_request_would_be_seen(browser)


@pytest.mark.slow
def test_results_stand_apart_in_a_browser(tmp_path: Path, rng: np.random.Generator) -> None:
    _, stored = make_run(tmp_path / "run", rng, num_rollouts=40, store_evaluations=False, tools=True)
    page = tmp_path / "page.html"
    page.write_text(make_page(read_runs([tmp_path / "run"])), "utf-8")
    tree, finished = stored[4][0].tree, stored[4][0].tree.finished
    order = sorted(range(tree.num_responses), key=lambda i: -tree.leaf_count[i])[:20]
    with Chromium(chromium_or_skip()) as browser:
        browser.open(page)
        browser.wait_for("document.querySelectorAll('.prompt').length === 4")
        browser.value("document.getElementById('prompt-0').click()")
        shown = browser.value(
            """[...document.querySelectorAll('.response')].map((e) => [e.querySelector('header').textContent,
              [...e.querySelectorAll('.part')].map((p) => [p.dataset.kind, p.querySelectorAll('.tok').length])])"""
        )
        for (header, blocks), i in zip(shown, order, strict=True):
            parts = tree.parts()[i]
            kinds = ["result" if given else "call" for _, given in parts[:-1]]
            kinds.append("answer" if finished[i] else "cut")
            assert blocks == [[kind, len(tokens)] for kind, (tokens, _) in zip(kinds, parts, strict=True)]
            assert f"{tree.length[i]} token" in header
            assert f", {tree.total_length[i] - tree.length[i]} given" in header
            mean = sum(round(x * 1000) for x in tree.logprob[tree.path(int(tree.leaf[i]))]) / 1000 / tree.length[i]
            assert abs(float(header.partition("mean log-prob ")[2].partition(",")[0]) - mean) < 0.001
        result = order[next(at for at, (_, blocks) in enumerate(shown) if len(blocks) > 2)]
        first = next(node for node in tree.path(int(tree.leaf[result])).tolist() if tree.given[node])
        fills = browser.value(
            "[...document.querySelectorAll('.icicle rect')].map((e) => [e.getAttribute('class'), e.style.fill])"
        )
        assert {(name == "given", fill == "") for name, fill in fills} == {(True, True), (False, False)}
        title = "[...document.querySelectorAll('.response .part.given .tok')].map((e) => e.title)"
        assert all("given by a result" in one for one in browser.value(title))
        assert any(f"in {tree.count[first]} rollouts" in one for one in browser.value(title))
        assert browser.value("document.querySelectorAll('.outline .key.given').length") > 0
        called = int(tree.count[tree.first_given].sum())
        assert f"{called} turns with calls, {tree.first_given.size} of them distinct" in browser.value(
            "document.querySelector('.side .facts').textContent"
        )
        calls = browser.value("document.getElementById('chart-calls').data.length")
        assert calls == 2
        finish_page(browser, page)


@pytest.mark.slow
def test_the_summary_of_several_runs_fits_a_laptop(tmp_path: Path, rng: np.random.Generator) -> None:
    paths = [tmp_path / f"a-long-name-of-a-run-with-its-rate-3e-4-and-its-seed-{seed}" for seed in range(3)]
    for path in paths:
        settings = "steps: 100000\nbudget: {limit: 40000000, unit: unique_tokens}\nrollouts_per_prompt: 512\n"
        records, _ = make_run(path, rng, settings=settings)
        for record in records:
            for name, value in record.get("sampling", {}).items():
                if name.startswith(("samples", "sampled_tokens", "unique_tokens")):
                    record["sampling"][name] = value * 1_234_567
            record.get("seconds", {})["total"] = 12_345.6
        (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = tmp_path / "page.html"
    page.write_text(make_page(read_runs(paths)), "utf-8")
    with Chromium(chromium_or_skip()) as browser:
        browser.set_width(1280)
        browser.open(page)
        width, room = browser.value("(e => [e.scrollWidth, e.clientWidth])(document.querySelector('#summary .scroll'))")
        assert 0 < width <= room


def finish_page(browser: Chromium, page: Path) -> None:
    check_legends(browser)
    check_narrow(browser)
    check_silence(browser, page)


def check_silence(browser: Chromium, page: Path) -> None:
    assert browser.requests() == []
    assert browser.files_opened() == [page.as_uri()]
    assert browser.complaints() == []


def check_that_a_request_would_be_seen(browser: Chromium) -> None:
    assert browser.value("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert any("Content Security Policy" in said for said in browser.complaints())


def check_charts(browser: Chromium, records: Records) -> None:
    drawn = browser.value(
        """[...document.querySelectorAll('.chart')].map((e) => ({
          name: e.id, traces: e.data.length, svg: e.querySelectorAll('svg.main-svg').length,
          shown: e.querySelectorAll('.scatterlayer .trace, .barlayer .trace').length,
          points: e.querySelectorAll('.point').length, bars: e.querySelectorAll('.errorbar').length,
          fault: e.querySelectorAll('.plotly-notifier').length}))"""
    )
    charts = {chart["name"]: chart for chart in drawn}
    assert {"chart-reward", "chart-pass1", "chart-passk", "chart-success", "chart-held_out_check"} <= set(charts)
    assert len(charts) >= 18
    for chart in drawn:
        assert chart["svg"] >= 1, chart
        assert chart["shown"] == chart["traces"] > 0, chart
    assert charts["chart-pass1"]["points"] == charts["chart-pass1"]["bars"] == 2
    assert charts["chart-passk"]["points"] == charts["chart-passk"]["bars"] == 6  # 3 k at the start and at the end
    ends = [records[at]["evaluation"]["prompts"]["num_correct"] for at in (0, -1)]
    assert charts["chart-held-out"]["points"] == len(set(zip(*ends, strict=True)))
    assert charts["chart-held_out_check"]["points"] == 1
    assert charts["chart-success"]["points"] == 12
    rewards = browser.value("document.getElementById('chart-reward').data[0].y")
    assert rewards == pytest.approx([r["sampling"]["reward"] for r in records[1:]], rel=1e-6)
    resets = browser.value("document.getElementById('chart-entropy').layout.shapes.map((s) => s.x0)")
    assert resets == [2]


def check_legends(browser: Chromium) -> None:
    """Every line has an entry of its own; points that share a line's name and group stand under that entry."""
    charts = browser.value(
        """[...document.querySelectorAll('.chart')].map((e) => ({
          name: e.id, legend: [...e.querySelectorAll('.legendtext')].map((t) => t.textContent),
          lines: e.data.filter((t) => t.showlegend !== false).map((t) => t.name),
          hidden: e.data.filter((t) => t.showlegend === false).map((t) => t.legendgroup),
          groups: e.data.filter((t) => t.showlegend !== false).map((t) => t.legendgroup),
          shapes: e.layout.shapes.map((s) => s.name)}))"""
    )
    assert charts
    for chart in charts:
        assert all(chart["lines"]), chart
        assert all(chart["shapes"]), chart
        assert set(chart["hidden"]) <= set(chart["groups"]), chart
        assert len(chart["legend"]) == len(chart["lines"]) + len(set(chart["shapes"])), chart
        assert len(set(chart["legend"])) == len(chart["legend"]), chart


def check_held_out_prompts(browser: Chromium, run: Path) -> None:
    """The same prompt stands before and after training, each time with its own rollouts."""
    before, after = ({g.prompt.id: g for g in read_groups(run, step, "evaluations")} for step in (0, 5))
    assert browser.value("document.getElementById('browser-folder').value") == "evaluations"
    headings = "[...document.querySelectorAll('.side h3:first-child')].map((e) => e.textContent)"
    expected = ["Tree of its rollouts, before training", "Tree of its rollouts, after step 5 (best)"]
    browser.wait_for("document.querySelectorAll('.prompt').length === 3")
    for place, prompt_id in enumerate(after):
        browser.value(f"document.getElementById('prompt-{place}').click()")
        assert browser.value(headings) == expected
        facts = browser.value(
            "[...document.querySelectorAll('.side')].map((e) => e.querySelector('.facts').textContent)"
        )
        pair = [before[prompt_id], after[prompt_id]]
        for said, group in zip(facts, pair, strict=True):
            assert said.startswith(f"{group.num_correct} of {group.tree.num_rollouts} rollouts correct")
        meters = f"[...document.querySelectorAll('#prompt-{place} .meter')].map((e) => e.textContent)"
        assert browser.value(meters) == [f"{g.num_correct}/{g.tree.num_rollouts}" for g in pair]
        assert browser.value("document.querySelector('.prompt-text').textContent") == shown(pair[0].prompt.text)
        most = [max(g.tree.leaf_count.tolist()) for g in pair]
        firsts = "[...document.querySelectorAll('.side')].map((e) => e.querySelector('.response b').textContent)"
        assert browser.value(firsts) == [f"\u00d7{count}" for count in most]
        # A click in one tree points at its own list, not at that of the other.
        browser.value(
            "document.querySelectorAll('.side')[1].querySelector('.icicle rect').dispatchEvent(new MouseEvent('click'))"
        )
        here = "[...document.querySelectorAll('.side')].map((e) => e.querySelectorAll('.here').length)"
        assert browser.value(here) == [0, 1]
    browser.choose("browser-step", "5")
    browser.wait_for(f"JSON.stringify({headings}) === JSON.stringify({[expected[1]] * 2!r})")
    browser.choose("browser-folder", "rollouts")
    browser.wait_for("document.querySelectorAll('.side').length === 1")


def check_x_axis(browser: Chromium, records: Records) -> None:
    x = "document.getElementById('chart-pass1').data[0].x"
    assert browser.value(x) == [0, 5]
    steps = records[1:]
    browser.choose("x-unit", "unique_tokens")
    amounts = [r["sampling"]["unique_tokens"] for r in steps]
    assert browser.value("document.getElementById('chart-reward').data[0].x") == list(accumulate(amounts))
    browser.choose("x-unit", "step")
    assert browser.value(x) == [0, 5]


def check_histogram(browser: Chromium, records: Records) -> None:
    for place in (0, 3):
        browser.value(
            f"(() => {{ const s = document.getElementById('histogram-step'); s.value = {place};"
            "s.dispatchEvent(new Event('input')); })()"
        )
        assert browser.value("document.getElementById('histogram-output').textContent") == f"step {place + 1}"
        y = browser.value("document.getElementById('chart-success').data[0].y")
        counted = records[place + 1]["coverage"]["prompts"]["num_correct"]
        assert sum(y) == len(counted)
        assert y[0] == counted.count(0)
    browser.value("document.querySelector('.numbers[data-chart=success]').open = true")
    browser.wait_for("document.querySelectorAll('.numbers[data-chart=success] tr').length === 13")


def check_prompts(browser: Chromium, stored: dict[int, list[Group]]) -> None:
    rows = "[...document.querySelectorAll('.prompt')]"
    chosen = "document.querySelector('.prompt[aria-selected=true]').id"
    assert browser.value("document.getElementById('browser-step').value") == "4"
    for step in (2, 4):
        browser.choose("browser-step", str(step))
        expected = sorted(f"{g.num_correct}/{g.tree.num_rollouts}" for g in stored[step])
        browser.wait_for(f"{rows}.length === 5 && document.getElementById('browser-step').value === '{step}'")
        meters = f"{rows}.map((r) => r.querySelector('.meter').textContent)"
        browser.wait_for(f"JSON.stringify({meters}.sort()) === JSON.stringify({expected!r})")
    browser.choose("browser-order", "descending")
    fractions = [int(m.partition("/")[0]) for m in browser.value(meters)]
    assert fractions == sorted(fractions, reverse=True)
    browser.choose("browser-order", "sampled")
    assert browser.value(f"{rows}.map((r) => r.id)") == [f"prompt-{i}" for i in range(5)]
    browser.value("document.getElementById('prompts').focus()")
    browser.press("Home")
    assert browser.value(chosen) == "prompt-0"
    browser.press("ArrowDown")
    assert browser.value(chosen) == "prompt-1"
    browser.press("ArrowUp")
    assert browser.value(chosen) == "prompt-0"
    assert shown(stored[4][0].prompt.text) == browser.value("document.querySelector('.prompt-text').textContent")


def check_responses(browser: Chromium, stored: dict[int, list[Group]]) -> None:
    group = stored[4][0]
    texts = group.texts
    verdicts = group.verdicts
    order = sorted(range(len(texts)), key=lambda i: -group.tree.leaf_count[i])[:20]
    cards = browser.value(
        """[...document.querySelectorAll('.response')].map((e) => ({
          count: e.querySelector('b').textContent, badge: e.querySelector('.badge').textContent,
          kind: e.querySelector('.badge').className, tokens: e.querySelectorAll('.tok').length,
          text: e.querySelectorAll('.text')[1].textContent, head: e.querySelector('header').textContent}))"""
    )
    assert [c["text"] for c in cards] == [shown(texts[i]) for i in order]
    assert [c["count"] for c in cards] == [f"\u00d7{group.tree.leaf_count[i]}" for i in order]
    assert [c["badge"] for c in cards] == [visible_text(verdicts[i].reason, one_line=True) for i in order]
    assert [c["tokens"] for c in cards] == [group.tree.length[i] for i in order]
    assert [c["kind"] == "badge right" for c in cards] == [verdicts[i].correct for i in order]
    for filter_, kept in (
        ("right", group.correct_L), ("wrong", ~group.correct_L), ("cut", ~group.tree.finished),
        ("all", np.ones(len(texts), bool)),
    ):  # fmt: skip
        browser.choose("browser-filter", filter_)
        if kept.any():
            browser.value("document.getElementById('prompt-0').click()")
            assert browser.value("document.querySelectorAll('.response').length") == min(int(kept.sum()), 20)
        else:
            assert browser.value("document.getElementById('prompt-0')") is None

    browser.value("document.getElementById('prompt-0').click()")
    browser.value("document.querySelector('.response .text').focus()")
    browser.press("ArrowRight")
    first = group.tree.path(int(group.tree.leaf[order[0]]))[0]
    said = browser.value("document.querySelector('.token-line').textContent")
    assert f"log-prob {group.tree.logprob[first]:.3f}" in said
    assert f"in {group.tree.count[first]} rollouts" in said
    browser.value("document.getElementById('prompt-3').click()")  # the one without log-probs
    assert "log-probs unknown" in browser.value("document.querySelector('.response header').textContent")


def check_tree(browser: Chromium, stored: dict[int, list[Group]]) -> None:
    tree = stored[4][0].tree
    browser.value("document.getElementById('prompt-0').click()")
    counts = "[...document.querySelectorAll('.outline > ul > li')].map((e) => e.querySelector('.count').textContent)"
    roots = sorted((int(c) for c, p in zip(tree.count, tree.parent, strict=True) if p < 0), reverse=True)
    assert [int(count.partition("/")[0]) for count in browser.value(counts)] == roots
    assert browser.value("document.querySelectorAll('.icicle rect').length") >= len(roots)
    opened = browser.value(
        """(async () => {
          for (;;) {
            const closed = document.querySelector('.outline details:not([open])');
            if (!closed) break;
            closed.querySelector('summary').click();
            await new Promise((done) => setTimeout(done));
          }
          const ends = [...document.querySelectorAll('.outline .end .count')];
          return ends.reduce((sum, e) => sum + parseInt(e.textContent), 0);
        })()"""
    )
    assert opened == tree.num_rollouts  # every rollout ends in exactly one row
    browser.set_width(800)
    clipped = browser.value(
        """(() => {
          const right = document.querySelector('.outline').getBoundingClientRect().right + 1;
          const badges = [...document.querySelectorAll('.outline .badge')];
          return [badges.length, badges.filter((e) => e.getBoundingClientRect().right > right).length];
        })()"""
    )
    assert clipped[0] >= tree.num_responses
    assert clipped[1] == 0  # every verdict can be read without scrolling to the side
    browser.set_width(1400)
    browser.value("document.querySelector('.icicle rect').dispatchEvent(new MouseEvent('click'))")
    assert browser.value("document.querySelectorAll('.outline .here').length") == 1


def check_themes(browser: Chromium) -> None:
    state = """[document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor,
      document.querySelector('#chart-entropy .xtick text').style.fill,
      document.querySelector('#chart-entropy .js-line').style.stroke]"""
    light = browser.value(state)
    browser.prefer_dark(True)
    browser.wait_for("document.documentElement.dataset.theme === 'dark'")
    dark = browser.value(state)
    assert light[0] == "light"
    assert all(a != b for a, b in zip(light, dark, strict=True))
    browser.choose("theme", "light")
    assert browser.value(state) == light


def check_narrow(browser: Chromium) -> None:
    cell = "getComputedStyle(document.querySelector('.stacking td')).display"
    assert browser.value(cell) == "table-cell"
    browser.set_width(390)
    # Charts follow the width once the browser tells them of it.
    browser.wait_for(
        "[...document.querySelectorAll('.chart')].every((e) =>"
        "Math.abs(e.querySelector('.main-svg').getBoundingClientRect().width - e.clientWidth) < 2)"
    )
    wide = "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1 "
    wide += "&& !e.closest('.numbers .scroll, .outline, svg')).map((e) => `${e.tagName} ${e.id} ${e.className}`)"
    assert browser.value(wide) == []
    assert browser.value("document.documentElement.scrollWidth") <= 390
    assert browser.value(cell) == "block"
    named = "[...document.querySelectorAll('.stacking td')].every((e) => e.dataset.label)"
    assert browser.value(named)
    browser.set_width(1400)


def check_two_runs(browser: Chromium, stored: dict[int, list[Group]]) -> None:
    names = browser.value("document.getElementById('chart-pass1').data.map((t) => t.name)")
    assert names[0] == "other"
    assert "&lt;script&gt;" in names[1]
    legend = browser.value("[...document.querySelectorAll('#chart-pass1 .legendtext')].map((e) => e.textContent)")
    resets = [f"{name} \u00b7 reference reset" for name in ("other", HOSTILE[0].replace("/", "|"))]
    assert sorted(legend) == sorted(["other", HOSTILE[0].replace("/", "|"), *resets])
    browser.choose("browser-folder", "rollouts")
    browser.wait_for("document.getElementById('browser-step').options.length === 1")
    browser.choose("browser-run", "1")
    browser.wait_for(f"document.getElementById('browser-step').options.length === {len(stored)}")
    browser.wait_for("document.querySelectorAll('.prompt').length === 5")
