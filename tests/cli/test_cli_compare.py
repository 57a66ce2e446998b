"""`brorl compare` as a user calls it: real runs on a tiny budget, and everything that is refused before any."""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from brorl.comparison import answer as comparison_report
from brorl.comparison.arm_recipes import ArmRecipe, check_arms, differences, run_config, short_names, sweep_arms
from brorl.comparison.run_processes import (
    ComparisonView,
    Slot,
    cpu_slots,
    fitted,
    gpu_slots,
    machine_of,
    slots_for,
)
from brorl.comparison.scores import PlannedRun, progress_of
from brorl.comparison.spec import ComparisonRequest, arm_folders, read_comparison, spec_for, spec_in
from brorl.config.settings import TrainConfig
from brorl.console.screen import Screen
from brorl.cost import Budget
from brorl.errors import UserError
from brorl.format import counted
from brorl.runs.run_directory import RunDirectory
from brorl.runs.step_record import total_cost
from case_tables import table
from run_support import SMALL, Outcome, command, refused

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

OTHER = ("--rollouts_per_prompt", "--prompts_per_step", "--evaluation.every", "--report")
TINY = (*(s for s in SMALL if not s.startswith(OTHER)), "--prompts_per_step=2")
JOBS = len(cpu_slots(None, 1)[:2])
SWEEP = (
    "--sweep=rollouts_per_prompt=8,16", "--match=steps", "--budget=8", "--eval-points=2", "--seeds=2", f"--jobs={JOBS}"
)  # fmt: skip


class Compared(NamedTuple):
    folder: Path
    outcome: Outcome


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = tmp_path_factory.mktemp("compare") / "out"
    outcome = command("compare", "quickstart", *SWEEP, *TINY, "--output-dir", folder)
    assert outcome.code == 0, outcome.err
    return Compared(folder, outcome)


@pytest.fixture(autouse=True)
def figures_of_the_first_comparison_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure takes seconds; `compared` is made before this and draws its own."""
    monkeypatch.setattr(comparison_report, "make_figure", lambda *_: Figure())


refusal = partial(refused, "compare")


@pytest.mark.slow
def test_every_run_starts_at_the_same_place_and_gets_the_same(compared: Compared) -> None:
    runs = sorted(p.parent for p in compared.folder.glob("arms/*/*/metrics.jsonl"))
    assert [str(r.relative_to(compared.folder)) for r in runs] == [
        f"arms/N={n}/seed-{seed}" for n in (16, 8) for seed in (0, 1)
    ]
    started = {}
    for run in runs:
        records = records_of(run)
        assert [r["step"] for r in records] == list(range(9))
        assert [r["step"] for r in records if "evaluation" in r] == [0, round(8 / 2**0.5), 8]
        started[run] = records[0]["evaluation"]["prompts"]
    for seed in (0, 1):  # the same model, prompts and draws
        assert len({str(p) for run, p in started.items() if run.name == f"seed-{seed}"}) == 1


@pytest.mark.slow
def test_what_is_read_is_what_the_runs_measured(compared: Compared) -> None:
    comparison = read_comparison(compared.folder)
    assert [arm.name for arm in comparison.arms] == ["N=8", "N=16"]
    assert [arm.differs for arm in comparison.arms] == [{"rollouts_per_prompt": "8"}, {"rollouts_per_prompt": "16"}]
    for arm in comparison.arms:
        assert [run.seed for run in arm.runs] == [0, 1]
        for run in arm.runs:
            records = records_of(Path(run.path))
            steps = [r for r in records if "sampling" in r]
            assert run.cost.samples == sum(r["sampling"]["samples"] for r in steps)
            assert run.cost.seconds == pytest.approx(sum(r["seconds"]["total"] for r in steps))
            assert (run.groups, run.groups_mixed) == tuple(
                sum(r["sampling"][name] for r in steps) for name in ("groups", "groups_mixed")
            )
            assert run.end_reason is None
            evaluations = [r["evaluation"] for r in records if "evaluation" in r]
            for score, evaluation in zip(run.scores, evaluations, strict=True):
                assert score.num_correct_P.tolist() == evaluation["prompts"]["num_correct"]
            assert run.scores[-1].cost == run.cost
    assert len(comparison.prompts) == 2


def test_the_result_is_said_and_written(compared: Compared) -> None:
    said = compared.outcome.said
    assert "4 runs" in said
    assert all(name in said for name in ("comparison.json", "comparison.png", "comparison.html"))
    (answer, *_) = json.loads((compared.folder / "comparison.json").read_text())["summary"]
    assert " ".join(answer.split()) in " ".join(said.split())
    assert imread(compared.folder / "comparison.png").std() > 0.05  # something is drawn


def test_a_complete_comparison_is_only_shown_again(compared: Compared) -> None:
    before = {p: p.stat().st_mtime_ns for p in compared.folder.glob("arms/*/*/*")}
    outcome = command("compare", compared.folder)
    assert outcome.code == 0, outcome.err
    assert "4 of 4 runs are already complete" in outcome.said
    assert {p: p.stat().st_mtime_ns for p in compared.folder.glob("arms/*/*/*")} == before
    again = command("compare", "quickstart", *SWEEP, *TINY, "--output-dir", compared.folder)
    assert again.code == 0, again.err


def test_another_comparison_is_not_mixed_in(compared: Compared) -> None:
    said = refusal("quickstart", *SWEEP, "--budget=9", *TINY, "--output-dir", compared.folder)
    assert "contains a comparison with budget 8.0, not 9.0; choose a different `output_dir`" in said
    said = refusal("quickstart", *SWEEP, *TINY, "--optimizer.learning_rate=1e-4", "--output-dir", compared.folder)
    assert "contains a comparison of different arms (N=8, N=16) or with different settings" in said
    assert "which `budget` cannot change" in refusal(compared.folder, "--budget=3")
    assert "`seeds` can only add" in refusal(compared.folder, "--seeds=1")


@pytest.mark.slow
def test_a_killed_comparison_goes_on_to_the_same_result(compared: Compared, tmp_path: Path) -> None:
    """One run is gone, one is cut off behind its checkpoint; in samples the rest is bit by bit the same."""
    folder = tmp_path / "out"
    shutil.copytree(compared.folder, folder, symlinks=True)
    shutil.rmtree(folder / "arms/N=8/seed-0")
    (folder / "arms/N=8/seed-0").mkdir()
    (folder / "arms/N=8/seed-0/.config.yaml.tmp").touch()
    cut = folder / "arms/N=16/seed-1"
    (last, *_) = sorted((cut / "checkpoints").glob("step-*"), reverse=True)
    shutil.rmtree(last)
    begun = (cut / "begun.json").read_text()
    (cut / "begun.json").write_text(begun.replace('"has_checkpoint": true', '"has_checkpoint": false'))
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:50])
    for file in [*folder.glob("arms/*/*.yaml"), *folder.glob("arms/*/*/config.yaml")]:
        file.write_text(file.read_text().replace(str(compared.folder), str(folder)))
    outcome = command("compare", folder)
    assert outcome.code == 0, outcome.err
    assert "2 of 4 runs are already complete" in outcome.said
    assert len(records_of(cut)) == len(lines)
    for arm_a, arm_b in zip(read_comparison(compared.folder).arms, read_comparison(folder).arms, strict=True):
        for a, b in zip(arm_a.runs, arm_b.runs, strict=True):
            assert [s.num_correct_P.tolist() for s in a.scores] == [s.num_correct_P.tolist() for s in b.scores]


def test_progress_follows_a_run_that_goes_back_to_a_checkpoint(compared: Compared, tmp_path: Path) -> None:
    run = shutil.copytree(compared.folder / "arms/N=8/seed-0", tmp_path / "run", symlinks=True)
    progress = progress_of(PlannedRun("N=8", 0, tmp_path / "r.yaml", run, Budget("samples", 10_000)))
    records = RunDirectory(run).read_metrics()
    assert progress.spent.steps == len(records) - 1
    RunDirectory(run).rewind(2)
    progress.update()
    assert progress.spent.steps == 2
    for record in records[3:]:
        RunDirectory(run).append_metrics(record)
    progress.update()
    assert progress.spent == total_cost(records)


def test_seeds_can_be_added_and_it_is_remembered(compared: Compared, tmp_path: Path) -> None:
    shutil.copytree(compared.folder, tmp_path / "out", symlinks=True)
    spec_file = tmp_path / "out/compare.json"
    plan = spec_in(tmp_path / "out", ComparisonRequest(seeds=4))
    assert (plan.seeds, plan.seeds_before) == (4, (2,))
    spec_file.write_text("{")
    assert "is damaged" in refusal(tmp_path / "out")


@pytest.mark.slow
def test_a_run_that_collapses_ends_there_and_keeps_its_score(tmp_path: Path) -> None:
    """An entropy limit that the first steps are below for certain ends every run."""
    folder = tmp_path / "out"
    stop = ("--collapse.stop=true", "--collapse.entropy_fraction=0.99")
    outcome = command("compare", "quickstart", *SWEEP, "--budget=100000", "--seeds=1", *TINY, *stop,
                      "--output-dir", folder)  # fmt: skip
    assert outcome.code == 0, outcome.err
    for arm in read_comparison(folder).arms:
        (run,) = arm.runs
        record = records_of(Path(run.path))[-1]
        assert run.end_reason == record["end_reason"] == record["collapse"]
        assert run.scores[-1].num_correct_P.tolist() == record["evaluation"]["prompts"]["num_correct"]
        assert run.cost.samples < 100_000
    assert "ended early" in outcome.said
    assert "runs are already complete" in command("compare", folder).said


@pytest.mark.slow
def test_ctrl_c_saves_the_runs_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    runs = [folder / "arms" / name / "seed-0" for name in ("N=8", "N=16")]

    def interrupt() -> None:
        while not all(num_steps(run) for run in runs):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        settings = (*SWEEP[:2], "--budget=1000000", "--seeds=1", "--jobs=2", *TINY)
        outcome = command("compare", "quickstart", *settings, "--output-dir", folder)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.code == 130, outcome
    assert f"more up to their last checkpoint; continue with: brorl compare {folder}" in outcome.said
    for run in runs:  # each ended after a step, with a checkpoint of it
        assert (run / f"checkpoints/step-{num_steps(run):06d}/COMMIT").is_file()


def num_steps(run: Path) -> int:
    """Count the whole metrics records after that of the start."""
    metrics = run / "metrics.jsonl"
    return max(metrics.read_bytes().count(b"\n") - 1, 0) if metrics.is_file() else 0


@pytest.mark.parametrize(*table(__file__, "what_cannot_be_compared_is_refused_in_one_line"))
def test_what_cannot_be_compared_is_refused_in_one_line(arguments: list[str], words: str) -> None:
    assert words in refusal(*arguments)
    assert not any(Path().iterdir())


def test_runs_on_a_cluster_are_made_one_after_another_with_all_cores() -> None:
    settings = {"cluster.nodes": 2, "engine.threads": 1}
    sweep = {"rollouts_per_prompt": [4, 8]}
    plan = spec_for(None, ComparisonRequest(("quickstart",), sweep, match="steps", budget=2, overrides=settings))
    (slot,) = slots_for(None, plan.arms)
    assert slot == cpu_slots(1, 0)[0]
    assert machine_of([slot], plan.arms).endswith("1 run at a time, each on a cluster of 2 machines")
    alone = spec_for(
        None, ComparisonRequest(("quickstart",), sweep, match="steps", budget=2, overrides={"engine.threads": 1})
    )
    assert slots_for(None, alone.arms) == cpu_slots(None, 1)
    timed = spec_for(None, ComparisonRequest(("quickstart",), sweep, budget=2, overrides={"engine.clock": "cpu"}))
    assert machine_of([slot], timed.arms).endswith(", in CPU seconds")


def test_a_cluster_without_ray_is_refused_before_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brorl.distributed.remote_parts.find_spec", lambda _: None)
    folder = tmp_path / "out"
    options = (*TINY, "--sweep=rollouts_per_prompt=8,16", "--match=steps", "--budget=2", "--cluster.nodes=1")
    assert "pip install 'brorl[ray]'" in refusal("quickstart", *options, "--output-dir", folder)
    assert not folder.exists()


@pytest.mark.slow
def test_the_memory_of_a_cluster_is_not_that_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brorl.comparison.arm_recipes.available_bytes", lambda _: 1)
    settings = {"data.sources": {"task": "countdown", "num_numbers": 3, "max_number": 7}, "data.held_out_fraction": 0.2}
    arms = sweep_arms("quickstart", settings | {"cluster.nodes": 1}, {"rollouts_per_prompt": [4, 8]})
    check_arms(arms, "steps", seeds=1, jobs=1)
    with pytest.raises(UserError, match="of memory, but only 0 MiB"):
        check_arms(sweep_arms("quickstart", settings, {"rollouts_per_prompt": [4, 8]}), "steps", seeds=1, jobs=1)


@pytest.mark.slow
def test_a_disk_that_is_too_small_for_the_checkpoints_is_refused(
    compared: Compared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least that they need is what a run writes, without the tokenizer."""
    (checkpoint,) = next(compared.folder.glob("arms/*/seed-0")).glob("checkpoints/step-*")
    written = sum((checkpoint / name).stat().st_size for name in ("model.safetensors", "trainer_state.pt"))
    settings = {"data.sources": {"task": "countdown", "num_numbers": 3, "max_number": 7}, "data.held_out_fraction": 0.2}
    arms = sweep_arms("quickstart", settings, {"rollouts_per_prompt": [4, 8]})
    free = {}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free[path]))
    free[tmp_path] = 6 * written
    check_arms(arms, "steps", 3, 1, tmp_path / "new" / "folder")
    free[tmp_path] = int(6 * 0.9 * written)
    with pytest.raises(UserError, match=r"6 runs keep at least .* of checkpoints, but only .*; free some"):
        check_arms(arms, "steps", 3, 1, tmp_path / "new" / "folder")
    check_arms(arms, "steps", 3, 1)  # a folder that exists already has some of them


@pytest.mark.parametrize(("given", "kept"), [(3, 1), (1, 1), (0, 0)])
def test_a_run_of_a_comparison_keeps_its_last_checkpoint(given: int, kept: int, tmp_path: Path) -> None:
    arm = sweep_arms("quickstart", {"keep_checkpoints": given}, {"rollouts_per_prompt": [4, 8]})[0]
    assert run_config(arm, 0, tmp_path, Budget("steps", 3)).keep_checkpoints == kept


@pytest.mark.slow
def test_arms_that_are_measured_differently_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "other.yaml"
    for text, words in (
        (
            "evaluation: {num_prompts: 192, rollouts_per_prompt: 8, ks: [1]}",
            "evaluation.rollouts_per_prompt is 256 for N=512 and 8 for N=16",
        ),
        (
            "data: {split_seed: 5, held_out_fraction: 0.2, "
            "sources: [{task: countdown, num_numbers: 3, max_number: 12}]}\n"
            "evaluation: {num_prompts: 192, ks: [1, 16, 256]}\nsampling: {max_new_tokens: 12}",
            "holds out different prompts from N=512",
        ),
    ):
        recipe.write_text(f"rollouts_per_prompt: 16\nprompts_per_step: 8\n{text}\n")
        said = refusal("quickstart", recipe, "--budget=9", "--output-dir", tmp_path / "out")
        assert words in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_nobody_else_works_in_the_folder_meanwhile(compared: Compared, tmp_path: Path) -> None:
    folder = shutil.copytree(compared.folder, tmp_path / "out", symlinks=True)
    shutil.rmtree(folder / "arms/N=8/seed-0")
    with RunDirectory(folder).locked():
        assert f"another process is working on {folder}" in refusal(folder)


@pytest.mark.parametrize("jobs", sorted({1, JOBS}))
def test_seconds_are_not_gone_on_with_on_another_machine(compared: Compared, tmp_path: Path, jobs: int) -> None:
    """As many runs are in progress as before."""
    folder = shutil.copytree(compared.folder, tmp_path / "out", symlinks=True)
    spec = json.loads((folder / "compare.json").read_text())
    assert spec["jobs"] == JOBS
    changed = {"unit": "seconds", "budget": 1e6, "machine": "a faster one", "jobs": jobs}
    (folder / "compare.json").write_text(json.dumps(spec | changed))
    said = refusal(folder)
    assert f"{folder} was started on a faster one, but this is" in said
    assert f"{counted(jobs, 'run')} at a time" in said
    assert "on the machine it started on" in said


def test_settings_in_which_arms_differ_are_found_whatever_they_hold() -> None:
    plain = TrainConfig()
    rewards = plain.rewards.model_copy(update={"domain_weights": {"math": 2.0}})
    weighted = plain.model_copy(update={"rewards": rewards, "seed": 7, "rollouts_per_prompt": 16})
    assert differences([plain, weighted]) == [
        {"rollouts_per_prompt": "512", "rewards.domain_weights": "{}"},
        {"rollouts_per_prompt": "16", "rewards.domain_weights": "{'math': 2.0}"},
    ]
    assert differences([plain, plain]) == [{}, {}]


def test_the_status_line_has_the_runs_that_measure_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can take minutes; their lines are not printed."""
    shown = []

    def finish(runs: Sequence[PlannedRun], _slots: object, view: ComparisonView) -> None:
        one, two = (
            SimpleNamespace(run=run, fraction=at, ended=False) for run, at in zip(runs, (0.5, 0.25), strict=True)
        )
        view.runs_progressed([one, two])
        shown.append(screen.describe(None))

    monkeypatch.setattr("brorl.comparison.run_processes.finish_runs", finish)
    arguments = ComparisonRequest(("quickstart",), {"rollouts_per_prompt": [4, 8]}, budget=60)
    screen = Screen(silent=True)
    spec = spec_for(None, arguments)
    assert fitted(spec, arguments, tmp_path / "out", cpu_slots(1, 0), screen) == spec
    assert len(shown) == 1
    assert re.match(r"N=4 seed 0 50%, N=8 seed 0 25%; about .* left", shown[0])


@pytest.mark.slow
def test_without_arguments_n_16_and_n_512_broaden_and_sharpen_from_the_plateau() -> None:
    plan = spec_for(None, ComparisonRequest())
    few, many = (arm.config for arm in plan.arms)
    assert few.model == many.model == "plateau"
    assert (few.rollouts_per_prompt, many.rollouts_per_prompt) == (16, 512)
    for arm in (few, many):
        assert [phase.name for phase in arm.phases] == ["broaden", "sharpen"]
    check_arms(plan.arms, plan.unit, plan.seeds, jobs=1)
    assert [different["phases"] for different in differences([few, many])] == [
        "broaden until 0.5 (maxrl, order N-1), then sharpen (reinforce_pp_baseline, learning rate 1.0e-04)",
        "broaden until 0.4 (maxrl, order N-1), then sharpen (grpo, learning rate 5.0e-04)",
    ]
    assert len(plan.eval_points) < len(
        spec_for(None, ComparisonRequest(("plateau-16", "plateau-512"), budget=30)).eval_points
    )


def test_a_folder_does_not_hide_a_recipe_of_its_name() -> None:
    Path("quickstart").mkdir()
    assert "expected an amount above 0" in refusal("quickstart", "quickstart-16", "--budget=0")


def test_every_arm_has_a_folder_of_its_own() -> None:
    def folders(*names: str) -> list[str]:
        config = TrainConfig()
        return list(arm_folders([ArmRecipe(name, config) for name in names]).values())

    assert folders("N=8", "N=16") == ["arms/N=8", "arms/N=16"]
    assert folders("template={p} ?", "template={p} !") == ["arms/1-template=_p___", "arms/2-template=_p___"]
    assert all(len(Path(name).name) < 100 for name in folders("a" * 300, "b" * 300))
    assert folders("../x", "y")[0] == "arms/.._x"


def test_arms_have_short_names_and_titles_where_these_are_letters() -> None:
    def told(sweep: dict[str, list[Any]]) -> list[tuple[str, str]]:
        return [(arm.name, arm.title) for arm in sweep_arms("quickstart", {}, sweep)]

    assert told({"rollouts_per_prompt": [8, 16], "optimizer.learning_rate": [1e-4, 3e-4]}) == [
        ("N=8", ""),
        ("N=16", ""),
    ]
    assert told({"loss.kind": ["ppo", "cispo"]}) == [("kind=ppo", ""), ("kind=cispo", "")]
    assert told({"optimizer.learning_rate": [1e-4, 3e-4], "optimizer.mini_batches": [1, 4]}) == [
        ("A", "learning_rate=0.0001, mini_batches=1"), ("B", "learning_rate=0.0003, mini_batches=4")
    ]  # fmt: skip
    letters = [name for name, _ in short_names([f"a name that is too long {i}" for i in range(54)])]
    assert letters[:2] + letters[25:28] + letters[51:54] == ["A", "B", "Z", "AA", "AB", "AZ", "BA", "BB"]
    assert len({*letters}) == 54


def test_gpus_are_those_that_this_process_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert [slot.device for slot in gpu_slots(None)] == ["2", "5"]
    assert [slot.device for slot in gpu_slots(1)] == ["2"]
    with pytest.raises(UserError, match="this process may use 2 GPUs"):
        gpu_slots(3)


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5, 6, 7, 8}, raising=False)
    assert [s.cores for s in cpu_slots(None, 2)] == [{0, 1}, {2, 5}, {6, 7}]
    assert [s.cores for s in cpu_slots(None, 0)] == [{0, 1, 2, 5, 6, 7, 8}]
    assert [s.cores for s in cpu_slots(2, 1)] == [{0, 1, 2}, {5, 6, 7}]
    with pytest.raises(UserError, match="each run would get 2"):
        cpu_slots(3, 4)
    assert cpu_slots(None, 16) == [Slot(frozenset({0, 1, 2, 5, 6, 7, 8}))]


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    job = PlannedRun("N=8", 0, tmp_path / "r.yaml", tmp_path, Budget("samples", 100))
    line = json.dumps({"step": 1, "sampling": {"samples": 60, "sampled_tokens": 1, "unique_tokens": 1},
                       "seconds": {"total": 1.0}})  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(line[:20])
    progress = progress_of(job)
    assert (progress.spent.samples, progress.ended) == (0, False)
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n{line}\n{line[:9]}")
    progress.update()
    assert (progress.spent.samples, progress.ended, progress.fraction) == (120, True, 1.0)


@pytest.mark.slow
def test_a_budget_in_which_no_step_fits_is_raised(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    unit = ("--match=samples", "--budget=100", "--seeds=1", "--eval-points=1")
    outcome = command("compare", "quickstart", *SWEEP, *unit, *TINY, "--output-dir", folder)
    assert outcome.code == 0, outcome
    (budget,) = re.findall(r"the budget is ([\d,]+) \w+ instead of 100 \w+, because a step of N=16 takes", outcome.said)
    assert int(budget.replace(",", "")) > 100
