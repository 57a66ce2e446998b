"""The long runs of the study (docs/explanation/study.md): tables of arms, trained two at a time, tuned and then judged.

    python examples/plateau/study.py three tries       # train each arm of a stage of examples/plateau/long.yaml
    python examples/plateau/study.py three verdict     # compare the arms of a stage over seeds
    python examples/plateau/study.py                   # the tables of all results

In: `long.yaml`, which has for each task its stages, with their budget, seeds, held-out puzzles and arms. Out: runs
under runs/plateau/TASK/STAGE, and one line for each finished run in examples/plateau/results, from which the tables are
made. A stopped stage continues where it was; a finished run is not made again. Seconds are CPU seconds of one thread. A
stage that tunes has other seeds and other held-out puzzles than the one that judges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from brorl.config.reading import parse_yaml
from brorl.cost import Cost, cost_of_step
from brorl.runs.run_directory import RunDirectory
from brorl.table import Table

HERE = Path(__file__).parent
ROOT = Path(os.environ.get("OUT", "runs/plateau"))
RESULTS = Path(os.environ.get("RESULTS", HERE / "results"))
Settings = dict[str, Any]
_LOCK = Lock()


def study() -> dict[str, Any]:
    """Return the table of all stages, by task."""
    file = Path(os.environ.get("STUDY", HERE / "long.yaml"))
    tasks: dict[str, Any] = parse_yaml(file.read_text("utf-8"), str(file))
    return {name: task for name, task in tasks.items() if name != "common"}


def run_stages(task: str, stages: list[str]) -> None:
    """Train all runs of some stages that are not finished, one on each core, in the order of the table.

    The table is read again before each run, so that arms can be added while it trains.
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
    """Yield the name, the seed and the settings of each run of a stage; all arms of a seed before the next one."""
    table = study()[task]
    spec = table["stages"][stage]
    for seed in spec["seeds"]:
        for name, arm in spec["arms"].items():
            yield name, seed, {"model": table["model"]} | spec["settings"] | arm


def train(task: str, stage: str, name: str, seed: int, settings: Settings, core: int) -> None:
    """Train one run, or continue it, in a process on one core; record its evaluations once it is finished."""
    folder = ROOT / task / stage / name.replace(" ", "_") / f"seed-{seed}"
    brorl = [str(Path(sys.executable).with_name("brorl"))]
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
        file.write(json.dumps(result_of(folder, name, seed, settings)) + "\n")


def result_of(folder: Path, name: str, seed: int, settings: Settings) -> Settings:
    """Return what the tables need of a finished run: the cost and the counts of each evaluation."""
    cost, evaluations, groups, mixed = Cost(), [], 0, 0
    for record in RunDirectory(folder).read_metrics():
        cost += cost_of_step(record)
        groups += record.get("sampling", {}).get("groups", 0)
        mixed += record.get("sampling", {}).get("groups_mixed", 0)
        if "evaluation" not in record:
            continue
        spent = {"steps": cost.steps, "seconds": cost.seconds, "samples": cost.samples, "tokens": cost.unique_tokens}
        scores = {
            kind: {k: estimate["value"] for k, estimate in record[key]["pass_at"].items()}
            for kind, key in (("pass_at", "evaluation"), ("ema_pass_at", "ema_evaluation"))
            if key in record
        }
        counts = record["evaluation"]["prompts"]["num_correct"]
        evaluations.append({**spent, **scores, "mixed": mixed, "groups": groups, "num_correct": counts})
    return {"arm": name, "seed": seed, "settings": settings, "evaluations": evaluations}


def results(task: str, stage: str) -> list[Settings]:
    """Return the finished runs of a stage."""
    file = RESULTS / f"{task}-{stage}.jsonl"
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def make_model(task: str) -> None:
    """Make the model of a task, unless it is shipped."""
    table = study()[task]
    if "numbers" in table and not Path(table["model"]).is_dir():
        command = [sys.executable, "scripts/make_quickstart_model.py", "--output", table["model"]]
        puzzle = ["--num-numbers", str(table["numbers"]), "--max-number", str(table["largest"])]
        subprocess.run([*command, *puzzle, "--steps", str(table["model_steps"])], check=True)


def stage_table(task: str, stage: str) -> Table:
    """Return a row for each run: its cost, and pass@k on the way, at its best pass@1 and at the end."""
    rows = []
    for run in results(task, stage):
        points = [e for e in run["evaluations"] if e["steps"]]
        thirds = [points[round(len(points) * i / 3) - 1] for i in (1, 2, 3)]
        best, end = max(points, key=lambda e: e["pass_at"]["1"]), points[-1]
        averaged = end.get("ema_pass_at")
        rows.append(
            (
                run["arm"], str(run["seed"]), f"{end['seconds']:.0f}", str(end["steps"]), f"{end['tokens']:.2e}",
                *map(scores, thirds), f"{scores(best)} at {best['seconds']:.0f} s",
                scores({"pass_at": averaged}) if averaged else "",
            )
        )  # fmt: skip
    start = scores(results(task, stage)[0]["evaluations"][0])
    columns = ("arm", "seed", "seconds", "steps", "tokens", "a third", "two thirds", "end", "best", "end, averaged")
    title = f"`{task}`, {stage}: pass@1/16/256 on the way; at the start {start}"
    return Table(title, columns, tuple(rows), words=frozenset({0}))


def scores(evaluation: Settings) -> str:
    """Return pass@k of an evaluation for all k, in three digits each."""
    return "/".join(f"{value:.3f}".lstrip("0") for value in evaluation["pass_at"].values())


def main(arguments: list[str]) -> None:
    """Train the stages of a task, or print the tables of all."""
    if arguments:
        task, *stages = arguments
        known = {name: table["stages"] for name, table in study().items()}
        if task not in known or not {*stages} <= {*known[task]}:
            stages_of_all = ", ".join(f"{name} {stage}" for name, named in known.items() for stage in named)
            sys.exit(f"{' '.join(arguments)} is not in the table, which has: {stages_of_all}")
        run_stages(task, stages or [*known[task]])
        return
    for task, table in study().items():
        for stage in table["stages"]:
            if results(task, stage):
                print(stage_table(task, stage).markdown() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
