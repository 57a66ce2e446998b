"""`brorl.plan_cluster`: what a step costs on 1 to 512 GPUs, computed without a GPU and without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brorl
from brorl.api.recipe import resolve_checkpoint, resolve_config
from brorl.api.runs_folder import make_output_folder
from brorl.config.reading import ConfigOrPath, builtin_recipes, flat_settings
from brorl.config.settings import TrainConfig
from brorl.console.screen import Screen
from brorl.errors import UserError
from brorl.planning.cluster.hardware import ENGINES, Engine, parse_cluster
from brorl.runs import RUNS
from brorl.storage import replace_file, storage_errors
from brorl.table import Result

if TYPE_CHECKING:
    from brorl.planning.cluster.cluster_plan import ClusterPlan

RECIPE = "brorl"


@dataclass(frozen=True, eq=False, repr=False)
class ClusterPlanResult(Result):
    """A cluster plan that was written."""

    path: Path  # the folder of `plan.json` and `plan.png`
    plan: ClusterPlan  # the plan

    @property
    def json_file(self) -> Path:
        """All numbers of the plan, with the origin of every unit cost."""
        return self.path / "plan.json"

    @property
    def figure_file(self) -> Path:
        """The plan as a figure."""
        return self.path / "plan.png"

    def parts(self) -> Iterator[Any]:
        """Yield the advice, the tables and the files."""
        from brorl.planning.cluster.cluster_report import advice, tables, work_line

        yield work_line(self.plan)
        yield from (f"- {line}" for line in advice(self.plan))
        for table in tables(self.plan):
            yield from ("", table)
        yield f"\nwritten: {self.json_file}, {self.figure_file}"

    def __repr__(self) -> str:
        from brorl.planning.cluster.cluster_report import advice

        return f"ClusterPlanResult({str(self.path)!r}: {advice(self.plan)[0]})"


def plan_cluster(
    cluster: str,
    checkpoint: str | Path | None = None,
    *,
    recipe: ConfigOrPath | None = None,
    engine: Engine | None = None,
    response_tokens: float | None = None,
    distinct_fraction: float | None = None,
    model_shape: Mapping[str, float] | None = None,
    group_parts: int = 1,
    output_dir: str | Path = RUNS / "plan",
    progress: bool = True,
    **overrides: Any,
) -> ClusterPlanResult:
    """Plan a step on a cluster, and write `plan.json` and `plan.png`. Nothing is measured.

    Args:
        cluster: `NxGPU`, such as 8xH200, or `NxNAME:figure=number,...`.
        checkpoint: A recipe; or a model, a run, or a checkpoint in a run (default: the recipe's model).
        recipe: Built-in recipe or YAML file; also nested settings or a config (default: the run's, or brorl).
        engine: Engine that samples, `native` or `vllm` (default: engine.kind).
        response_tokens: Mean tokens of a response (default: those of the run, or half of sampling.max_new_tokens).
        distinct_fraction: Distinct tokens over sampled tokens (default: that of the run, or a formula).
        model_shape: Sizes of the model instead of its config: `parameters`, `layers`, `hidden`, `kv_heads`,
            `vocabulary`, and more.
        group_parts: Parts of a group that may run on different rollout workers, >= 1.
        output_dir: Folder of the files; an earlier plan in it is replaced.
        progress: Print the output of the command.
        overrides: Settings that replace those of the recipe, nested or by dotted name.

    Raises:
        UserError: If an argument is wrong, or the sizes of the model are not known.
    """
    if engine not in (None, *ENGINES):
        raise UserError(f"engine must be one of {', '.join(ENGINES)}, got {engine}")
    if group_parts < 1:
        raise UserError(f"group_parts must be at least 1, got {group_parts}")
    gpus = parse_cluster(cluster)
    config, run = _resolve(checkpoint, recipe, flat_settings(overrides))

    with Screen(silent=not progress) as screen:
        from brorl.assemble.cluster_job import build_job, build_shape
        from brorl.planning.cluster.cluster_plan import QueueSettings, make_cluster_plan
        from brorl.planning.cluster.cluster_report import cluster_record, draw_cluster_plan
        from brorl.runs.run_directory import RunDirectory

        job = build_job(
            config,
            gpus.gpu,
            build_shape(config.model, model_shape),
            engine=engine,
            mean_length=response_tokens,
            distinct_fraction=distinct_fraction,
            metrics=[] if run is None else RunDirectory(run).read_metrics(),
        )
        folder = Path(output_dir).expanduser()
        make_output_folder(folder)
        screen.console.print(
            f"brorl {brorl.__version__}: a plan for {config.model} ({job.model.parameters:,} parameters) on "
            f"{gpus.name}, {job.engine} engine",
            soft_wrap=True,
            markup=False,
        )
        settings = QueueSettings(group_parts, config.cluster.max_staleness, seed=config.seed)
        result = ClusterPlanResult(folder, make_cluster_plan(config.model, job, gpus, settings))
        with storage_errors(folder):
            replace_file(result.json_file, json.dumps(cluster_record(result.plan), indent=2).encode())
            draw_cluster_plan(result.plan, result.figure_file)
        screen.console.print(result, soft_wrap=True)
        return result


def _resolve(
    source: str | Path | None, recipe: ConfigOrPath | None, given: Mapping[str, Any]
) -> tuple[TrainConfig, Path | None]:
    """Return the config, and the directory of the run that was named."""
    name = None if source is None else str(source)
    if name is not None and recipe is None and (name in builtin_recipes() or name.endswith((".yaml", ".yml"))):
        return resolve_config(name, given), None
    if name is None:
        return resolve_config(recipe or RECIPE, given), None
    if "model" in given:
        raise UserError(f"{name} and --model both name a model; give one of them")
    model, run_config = resolve_checkpoint(name)
    run = run_config.parent if run_config is not None else None
    return resolve_config(recipe or run_config or RECIPE, {**given, "model": model}), run
