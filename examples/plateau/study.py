"""The study (docs/explanation/study.md): train arms on all cores, tune them, judge them, and print the tables.

    python examples/plateau/study.py three tries       # train the arms of a stage of examples/plateau/study.yaml
    python examples/plateau/study.py three verdict     # compare the arms of a stage over seeds
    python examples/plateau/study.py                   # the tables of all results
    python examples/plateau/study.py figure FILE.png STAGE   # the figure of a stage's verdicts, one row per task

`python scripts/print_tables.py study` also prints the tables whose runs were not kept.

Input: `study.yaml`, which lists each task's stages with their budget, seeds, held-out puzzles and arms. Output: runs
in runs/plateau/TASK/STAGE, and one line per finished run in examples/plateau/results, from which the tables are made.
A stopped stage resumes where it stopped; finished runs are not repeated. Seconds are CPU seconds of one thread. Tuning
stages use different seeds and held-out puzzles from judging stages, whose names begin with "verdict".
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from equal_score import at_equal_score

from brorl.arrays import FloatArray
from brorl.comparison.results import costs_at, coverage_change, equal_amount, scores_at_cost
from brorl.comparison.scores import Arm, Comparison, FinishedRun, RunEvaluation, scores_at, start_scores
from brorl.config.reading import parse_yaml
from brorl.cost import Cost, Unit, short_amount
from brorl.evaluation.paired import (
    conclusion_of,
    corrected_level,
    mean_over_runs,
    paired_difference,
    seeds_needed,
)
from brorl.format import Estimate, counted, interval, short, signed
from brorl.reporting.figure import draw_curve, style
from brorl.runs.run_directory import RunDirectory
from brorl.table import Table

HERE = Path(__file__).parent
ROOT = Path(os.environ.get("OUT", "runs/plateau"))
RESULTS = Path(os.environ.get("RESULTS", HERE / "results"))
COLORS = {16: "#cc7417", 64: "#b3382c", 128: "#2e8b6a", 512: "#1f5fa8"}
Settings = dict[str, Any]
_LOCK = Lock()


def study() -> dict[str, Any]:
    """Return all stages, by task."""
    file = Path(os.environ.get("STUDY", HERE / "study.yaml"))
    tasks: dict[str, Any] = parse_yaml(file.read_text("utf-8"), str(file))
    return {name: task for name, task in tasks.items() if name != "common"}


def run_stages(task: str, stages: list[str]) -> None:
    """Train all unfinished runs of the given stages, one per core, in the order of `study.yaml`.

    The file is read again before each run, so arms can be added during training.
    """
    make_model(task)
    taken = {(stage, run["arm"], run["seed"]) for stage in stages for run in results(task, stage)}
    failed: list[str] = []

    def work(core: int) -> None:
        while True:
            with _LOCK:
                runs = ((stage, *run) for stage in stages for run in runs_of(task, stage))
                one = next((run for run in runs if run[:3] not in taken), None)
                if one is None:
                    return
                taken.add(one[:3])
            try:
                train(task, *one, core=core)
            except subprocess.CalledProcessError:
                failed.append(f"{one[0]}: {one[1]}, seed {one[2]}")

    cores = sorted(os.sched_getaffinity(0))[: int(os.environ.get("JOBS", "0")) or None]
    with ThreadPoolExecutor(len(cores)) as pool:
        list(pool.map(work, cores))
    if failed:
        sys.exit(f"{', '.join(failed)} did not finish; the logs have the reasons, and the same command continues them")


def runs_of(task: str, stage: str) -> Iterator[tuple[str, int, Settings]]:
    """Yield the name, seed and settings of each run of a stage, all arms of one seed before the next seed."""
    table = study()[task]
    spec = table["stages"][stage]
    for seed in spec["seeds"]:
        for name, arm in spec["arms"].items():
            settings = {"model": table["model"]} | spec["settings"] | arm
            if isinstance(settings["model"], dict):
                settings["model"] = checkpoint(task, **settings["model"])
            yield name, seed, settings


def checkpoint(task: str, stage: str, arm: str, seed: int, step: int) -> str:
    """Return the checkpoint in another stage's run from which a stage starts."""
    return str(folder_of(task, stage, arm, seed) / "checkpoints" / f"step-{step:06d}")


def folder_of(task: str, stage: str, arm: str, seed: int) -> Path:
    """Return the directory of a run."""
    return ROOT / task / stage / arm.replace(" ", "_") / f"seed-{seed}"


def train(task: str, stage: str, name: str, seed: int, settings: Settings, core: int) -> None:
    """Train or resume one run in a process on one core; record its evaluations once it is finished."""
    folder = folder_of(task, stage, name, seed)
    settings = dict(settings)
    objective = settings.pop("objective", None)  # of objectives.py
    brorl = [str(Path(sys.executable).with_name("brorl"))]
    if objective is not None:
        brorl = [sys.executable, str(HERE / "objectives.py"), objective]
    if (folder / "config.yaml").exists():
        command = [*brorl, "resume", str(folder)]
    else:
        options = [
            f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()
        ]
        command = [*brorl, "train", str(HERE / f"{task}.yaml"), f"--output_dir={folder}", f"--seed={seed}", *options]
    print(f"{task} {stage}: {name}, seed {seed}", flush=True)
    log = folder.parent / f"seed-{seed}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        one_core = ["taskset", "-c", str(core), *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(one_core, stdout=output, stderr=output, env=environment, check=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    with _LOCK, (RESULTS / f"{task}-{stage}.jsonl").open("a") as file:
        recorded = settings if objective is None else {**settings, "objective": objective}
        file.write(json.dumps(result_of(folder, name, seed, recorded)) + "\n")


def result_of(folder: Path, name: str, seed: int, settings: Settings) -> Settings:
    """Return what the tables need from a finished run: each evaluation's cost and counts."""
    cost, evaluations, groups, mixed, correct = Cost(), [], 0, 0, 0.0
    for record in RunDirectory(folder).read_metrics():
        cost += record.cost
        if sampling := record.sampling:
            groups += sampling.groups
            mixed += sampling.groups_mixed
            correct += sampling.accuracy * sampling.samples
        if record.evaluation is None:
            continue
        spent = {"steps": cost.steps, "seconds": cost.seconds, "samples": cost.samples, "tokens": cost.unique_tokens}
        scores = {
            kind: {str(k): estimate.value for k, estimate in evaluation.pass_at.items()}
            for kind, evaluation in (("pass_at", record.evaluation), ("ema_pass_at", record.ema_evaluation))
            if evaluation
        }
        counts = record.evaluation.prompts.num_correct
        sampled = {"mixed": mixed, "groups": groups, "correct": round(correct)}
        evaluations.append({**spent, **scores, **sampled, "num_correct": counts})
    return {"arm": name, "seed": seed, "settings": settings, "evaluations": evaluations}


def results(task: str, stage: str) -> list[Settings]:
    """Return the finished runs of a stage."""
    file = RESULTS / f"{task}-{stage}.jsonl"
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def make_model(task: str) -> None:
    """Make a task's model, unless it is shipped."""
    table = study()[task]
    if "numbers" in table and not Path(table["model"]).is_dir():
        command = [sys.executable, "scripts/make_quickstart_model.py", "--output", table["model"]]
        puzzle = ["--num-numbers", str(table["numbers"]), "--max-number", str(table["largest"])]
        subprocess.run([*command, *puzzle, "--steps", str(table["model_steps"])], check=True)


def stage_table(task: str, stage: str) -> Table:
    """Return a row for each run: its cost, and pass@k along the way, at the best pass@1 and at the end."""
    rows = []

    def best(kind: str) -> str:
        scored = [e for e in points if kind in e]
        if not scored:
            return ""
        found = max(scored, key=lambda e: e[kind]["1"])
        return f"{digits(found[kind].values())} at {found['seconds']:.0f} s"

    for run in results(task, stage):
        points = [e for e in run["evaluations"] if e["steps"]]
        thirds = [points[round(len(points) * i / 3) - 1] for i in (1, 2, 3)]
        spent = (f"{points[-1]['seconds']:.0f}", f"{points[-1]['steps']:,}", short(points[-1]["tokens"]))
        rows.append(
            (run["arm"], str(run["seed"]), *spent, *map(scores, thirds), *map(best, ("pass_at", "ema_pass_at")))
        )
    start = scores(results(task, stage)[0]["evaluations"][0])
    columns = (
        "arm", "seed", "seconds", "steps", "tokens", "a third", "two thirds", "end", "best", "best, averaged weights"
    )  # fmt: skip
    title = f"`{task}`, {stage}: pass@1/16/256 on the way; at the start {start}"
    return Table(title, columns, tuple(rows), words=frozenset({0}))


def scores(evaluation: Settings) -> str:
    """Return an evaluation's pass@k for all k, with three digits each."""
    return digits(evaluation["pass_at"].values())


def digits(values: Iterable[float]) -> str:
    """Format scores with three digits each: .434/.577/.672."""
    return "/".join(f"{value:.3f}".lstrip("0") for value in values)


def verdict_of(task: str, stage: str) -> Comparison | None:
    """Return a stage's runs as a comparison, with the seeds finished by all arms; None if there are none."""
    spec, runs = study()[task]["stages"][stage], results(task, stage)
    by_arm = {arm: {run["seed"]: run for run in runs if run["arm"] == arm} for arm in spec["arms"]}
    seeds = sorted(set.intersection(*(set(of_arm) for of_arm in by_arm.values())))
    if not seeds:
        return None
    first = next(iter(by_arm.values()))[seeds[0]]
    arms = tuple(
        Arm(
            name=name, title="", num_rollouts=of_arm[seeds[0]]["settings"]["rollouts_per_prompt"],
            prompts_per_step=of_arm[seeds[0]]["settings"]["prompts_per_step"], differs={},
            runs=tuple(_scores_of(of_arm[seed]) for seed in seeds),
        )
        for name, of_arm in by_arm.items()
    )  # fmt: skip
    settings, (start, *_) = first["settings"], first["evaluations"]
    prompts = tuple(map(str, range(len(start["num_correct"]))))
    limit, marks = settings["budget.limit"], settings["budget.eval_points"]
    num_samples = max(map(int, start["pass_at"]))
    return Comparison(
        checkpoint=settings["model"], unit=settings["budget.unit"], budget=limit,
        eval_points=tuple(sorted({*marks, limit})), prompts=prompts, sources=(task,) * len(prompts),
        num_samples=num_samples, ks=tuple(map(int, start["pass_at"])), arms=arms, machine="",
    )  # fmt: skip


def _scores_of(run: Settings) -> FinishedRun:
    """Return the evaluations of a run. Their tokens are not recorded, because no table here needs them."""
    scores = [
        RunEvaluation(
            Cost(e["steps"], e["seconds"], e["samples"], unique_tokens=e["tokens"]),
            np.array(e["num_correct"]), np.zeros(len(e["num_correct"]), np.int64), truncation_rate=0.0,
        )
        for e in run["evaluations"]
    ]  # fmt: skip
    end = run["evaluations"][-1]
    return FinishedRun(run["seed"], tuple(scores), scores[-1].cost, {}, end["groups"], end["mixed"], None, run["arm"])


def verdict_tables(task: str, stage: str, verdict: Comparison) -> Iterator[Table]:
    """Yield tables of the arms, their scores over time, and the stage's differences at equal cost and equal pass@1."""
    arms = {arm.name: arm for arm in verdict.arms}
    budget, ks, what = verdict.budget, verdict.ks, f"`{task}`, {stage}, {counted(len(verdict.arms[0].runs), 'seed')}"
    start = digits(start_scores(verdict, k).mean() for k in ks)
    names = tuple(f"pass@{k}" for k in ks)

    rows = []
    for arm in verdict.arms:
        costs, change = costs_at(arm, verdict.unit, budget), coverage_change(verdict, arm, budget, ks[-1])
        spent = (short(costs[name].mean) for name in ("steps", "samples", "unique_tokens"))
        ends = (interval(mean_over_runs(scores_at(verdict, arm, budget, k))) for k in ks)
        rows.append((arm.name, *spent, *ends, f"{change.gained.mean:.1f} / {change.lost.mean:.1f}"))
    columns = ("arm", "steps", "samples", "unique tokens", *names, "puzzles gained / lost")
    yield Table(f"{what}: after {budget:g} {verdict.unit}; at the start {start}", columns, tuple(rows))

    rows = [
        (name, *(digits(scores_at(verdict, arm, at, k).mean() for k in ks) for at in verdict.eval_points))
        for name, arm in arms.items()
    ]
    columns = ("arm", *(short_amount(at, verdict.unit) for at in verdict.eval_points))
    yield Table(f"{what}: pass@1/16/256 on the way", columns, tuple(rows))

    runs = [run for run in results(task, stage) if run["seed"] in {one.seed for one in verdict.arms[0].runs}]
    rows = [(name, *_in_training([run["evaluations"] for run in runs if run["arm"] == name])) for name in arms]
    title = f"{what}: in training, since the evaluation before: correct rollouts / mixed groups"
    yield Table(title, columns, tuple(rows))

    pairs = [(arms[b], arms[a]) for b, a in study()[task]["stages"][stage].get("differences", ())]
    if not pairs:
        return
    units: list[Unit] = ["seconds", "samples", "unique_tokens"]
    rows = [
        (f"{b.name} minus {a.name}", label, *_stars(differences, len(pairs) * len(ks) * (1 + len(units))))
        for b, a in pairs
        for label, differences in _differences(verdict, b, a, units)
    ]
    notes = ("`*` excludes 0; `**` does after correction for all intervals of this table.", *_needed(verdict, pairs))
    yield Table(f"{what}: differences at equal cost", ("arms", "at", *names), tuple(rows), notes)

    for b, a in pairs:
        if (equal := at_equal_score(verdict, a, b, ks[-1])) is not None:
            reached = f"{equal.spent[0]:.0f} s ({a.name}) and {equal.spent[1]:.0f} s ({b.name})"
            text = f"{what}: pass@{ks[-1]} at a pass@1 of {equal.level:.3f}, at {reached}"
            yield Table(text, ("arms", f"pass@{ks[-1]}"), ((f"{b.name} minus {a.name}", signed(equal.difference)),))


def _needed(verdict: Comparison, pairs: list[tuple[Arm, Arm]]) -> Iterator[str]:
    """Yield the seeds and puzzles needed to show a difference of .02 in pass@1 at the end, if known."""
    for b, a in pairs:
        ends = (scores_at(verdict, arm, verdict.budget) for arm in (a, b))
        if needed := seeds_needed(paired_difference(*ends, seeds_paired=True).parts):
            size = f"{needed.seeds} seeds and {needed.prompts:,} puzzles"
            yield f"A difference of {needed.half_width:g} in pass@1, {b.name} minus {a.name}, takes {size}."


def _in_training(runs: list[list[Settings]]) -> Iterator[str]:
    """Yield the fractions of correct rollouts and of mixed groups between evaluations, averaged over runs."""
    for last, now in pairwise(zip(*runs, strict=True)):
        parts = ("correct", "samples"), ("mixed", "groups")
        means = (
            float(np.mean([(b[part] - a[part]) / (b[of] - a[of]) for a, b in zip(last, now, strict=True)]))
            for part, of in parts
        )
        yield " / ".join(f"{mean:.0%}" for mean in means)


def _differences(
    verdict: Comparison, b: Arm, a: Arm, units: list[Unit]
) -> Iterator[tuple[str, list[Callable[[float], Estimate]]]]:
    """Yield what is held equal and, for each k, the difference b minus a as a function of the interval's level.

    The last line compares the end of b with the evaluation at which a had its best mean pass@1. That evaluation is
    chosen on the same puzzles, which favors a.
    """
    for unit in units:
        amount = equal_amount((a, b), unit)
        sides = [[scores_at_cost(verdict, arm, unit, amount, k) for arm in (a, b)] for k in verdict.ks]
        known = [(x, y) for x, y in sides if x is not None and y is not None]
        if len(known) == len(verdict.ks):
            yield (
                short_amount(amount, unit) + ("" if unit == "seconds" else f" {unit.replace('_', ' ')}"),
                [_level(x, y) for x, y in known],
            )
    best = max(verdict.eval_points, key=lambda at: float(scores_at(verdict, a, at).mean()))
    yield (
        f"best of the second, {short_amount(best, verdict.unit)}",
        [_level(scores_at(verdict, a, best, k), scores_at(verdict, b, verdict.budget, k)) for k in verdict.ks],
    )


def _level(a_SP: FloatArray, b_SP: FloatArray) -> Callable[[float], Estimate]:
    return lambda level: paired_difference(a_SP, b_SP, seeds_paired=True).at_level(level)


def _stars(differences: list[Callable[[float], Estimate]], number: int) -> list[str]:
    """Return differences with 95% intervals, starring those that are shown."""

    def shown(level: float, at: Callable[[float], Estimate]) -> bool:
        return conclusion_of(at(level)) != "no difference shown"

    return [
        f"{signed(at(0.95))} {'*' * (shown(0.95, at) + shown(corrected_level(number), at))}".strip()
        for at in differences
    ]


def draw(verdicts: dict[str, Comparison], path: str) -> None:
    """Draw pass@1 and pass@k, averaged over runs, and one against the other, with a row for each task."""
    figure, axes = plt.subplots(
        len(verdicts), 3, figsize=(13, 4.1 * len(verdicts)), layout="constrained", squeeze=False
    )
    for (title, verdict), (of_1, of_k, plane) in zip(verdicts.items(), axes, strict=True):
        points, k = (0.0, *verdict.eval_points), verdict.ks[-1]
        short_names = [
            ", ".join((f"N = {arm.num_rollouts}", *re.findall(r"gate \S+", arm.name))) for arm in verdict.arms
        ]
        for arm, short_name in zip(verdict.arms, short_names, strict=True):
            name = short_name if short_names.count(short_name) == 1 else arm.name
            curves = [
                np.stack([scores_at(verdict, arm, at, i).mean(1) for at in points]) for i in (1, k)
            ]  # [T, S] each
            dashed = "paper" in arm.name or "gate" in arm.name
            look = {"color": COLORS[arm.num_rollouts or 0], "linestyle": "--" if dashed else "-"}
            for axis, curve_TS in zip((of_1, of_k), curves, strict=True):
                draw_curve(axis, np.array(points), curve_TS.mean(1), band=(curve_TS.min(1), curve_TS.max(1)),
                           label=name, small=True, **look)  # fmt: skip
            x_T, y_T = (curve_TS.mean(1) for curve_TS in curves)
            draw_curve(plane, x_T, y_T, small=True, **look)
            plane.annotate(name, (x_T[-1], y_T[-1]), xytext=(6, -2), textcoords="offset points", fontsize=9,
                           color=look["color"])  # fmt: skip
        plane.plot(x_T[0], y_T[0], "o", color="black", markerfacecolor="white", markersize=8, zorder=5)
        for axis, name in ((of_1, "pass@1"), (of_k, f"pass@{k}")):
            axis.set(xlabel=f"CPU {verdict.unit} of training", ylabel=name, title=f"{title}: {name}")
        plane.set(xlabel="pass@1", ylabel=f"pass@{k}", title=f"{title}: coverage against pass@1")
        plane.margins(x=0.2)
        of_1.legend(frameon=False)
        for axis in (of_1, of_k, plane):
            style(axis)
    figure.savefig(path, dpi=120, facecolor="white")


def all_verdicts() -> Iterator[tuple[str, str, Comparison]]:
    """Yield the task, stage and runs of each verdict with results."""
    for task, table in study().items():
        for stage in table["stages"]:
            if stage.startswith("verdict") and (verdict := verdict_of(task, stage)) is not None:
                yield task, stage, verdict


def tables() -> Iterator[str]:
    """Yield the tables of all results."""
    for task, table in study().items():
        for stage in table["stages"]:
            if results(task, stage) and not stage.startswith("verdict"):
                yield stage_table(task, stage).markdown()
    for task, stage, verdict in all_verdicts():
        for one in verdict_tables(task, stage, verdict):
            yield one.markdown()


def main(arguments: list[str]) -> None:
    """Train the stages of a task, draw the figure, or print the tables of all results."""
    if arguments[:1] == ["figure"]:
        _, path, wanted = arguments
        verdicts = {f"{task} numbers": verdict for task, stage, verdict in all_verdicts() if stage == wanted}
        if not verdicts:
            sys.exit(f"no stage {wanted} has finished runs of all arms; run it with: study.py TASK {wanted}")
        draw(verdicts, path)
        return
    if arguments:
        task, *stages = arguments
        known = {name: table["stages"] for name, table in study().items()}
        if task not in known or not {*stages} <= {*known[task]}:
            stages_of_all = ", ".join(f"{name} {stage}" for name, named in known.items() for stage in named)
            sys.exit(f"{' '.join(arguments)} is not in the table, which has: {stages_of_all}")
        run_stages(task, stages or [*known[task]])
        return
    for text in tables():
        print(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
