"""`brorl.train`, `brorl train` and `brorl resume`: turn a recipe into a run, train to its end, return the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from brorl.api.arguments import (
    check_cheaply,
    make_run_directory,
    recipe_name,
    refuse_in_worker,
    refuse_used_folder,
    resolve_config,
)
from brorl.config.reading import ConfigOrPath
from brorl.config.settings import TrainConfig
from brorl.console.screen import Screen, in_notebook
from brorl.cost import Cost, total_cost
from brorl.errors import STOPPED, LearnerLostError, UserError
from brorl.format import Estimate
from brorl.table import Result, Table

if TYPE_CHECKING:
    from brorl.api.in_memory import Rewards
    from brorl.reporting.figure import ResultFigure
    from brorl.runs.run_directory import Record
    from brorl.training.loop import Ending


@dataclass(frozen=True, eq=False, repr=False)
class TrainingResult(Result):
    """A run that ended, or was interrupted and can be resumed."""

    path: Path  # the run directory
    ending: Ending  # why the run ended
    message: str  # a sentence: why the run ended, and after how many steps
    metrics: tuple[Record, ...]  # the lines of metrics.jsonl; step 0 is the evaluation before training
    checkpoints: tuple[Path, ...]  # complete checkpoints, oldest first; each loads with transformers
    best_checkpoint: Path | None  # has the best held-out pass@k; None if no checkpoint was kept
    report: Path | None  # HTML file; None if the run has no report
    hints: tuple[str, ...] = ()  # lines on where the charts are, and the commands that continue the run

    @property
    def cost(self) -> Cost:
        """Cost of all steps, in every unit."""
        return total_cost(self.metrics)

    @property
    def first_evaluation(self) -> dict[int, Estimate]:
        """Held-out pass@k at the first evaluation, k -> value with a 95% interval; empty without an evaluation."""
        return next(iter(self._evaluations()), {})

    @property
    def last_evaluation(self) -> dict[int, Estimate]:
        """Held-out pass@k at the last evaluation, k -> value with a 95% interval; empty without an evaluation."""
        return next(reversed(self._evaluations()), {})

    def _evaluations(self) -> list[dict[int, Estimate]]:
        evaluations = [record["evaluation"]["pass_at"] for record in self.metrics if record.get("evaluation")]
        return [{int(k): Estimate(**estimate) for k, estimate in pass_at.items()} for pass_at in evaluations]

    def figure(self) -> ResultFigure:
        """Return a matplotlib figure: the mean reward, held-out pass@k, and the fraction of mixed groups, by step."""
        from brorl.reporting.figure import run_figure

        return run_figure(self.metrics)

    def __repr__(self) -> str:
        return f"TrainingResult({self.message}; run directory: {self.path})"

    def parts(self) -> Iterator[Any]:
        """Yield the tables of a run, why it ended, and what to do next, with commands to copy."""
        from brorl.console.tables import held_out_check_lines, result_tables
        from brorl.evaluation.evaluator import coverage_note

        yield from result_tables(self.metrics)
        yield f"\n{self.message}; run directory: {self.path}"
        evaluations = [record["evaluation"] for record in self.metrics if "evaluation" in record]
        yield from (*held_out_check_lines(self.metrics), *coverage_note(evaluations), *self.hints)

    def show_on(self, screen: Screen) -> None:
        """Write the parts; commands are not wrapped. A notebook shows the result itself, so they are only logged."""
        screen.ending = f"{self.message}; run directory: {self.path}"
        for part in self.parts():
            if in_notebook():
                screen.log(*([""] if isinstance(part, Table) else []), part)
            elif isinstance(part, Table):
                screen.show(part)
            else:
                screen.echo(part, is_command=part in self.hints)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0, 130 if the run was stopped, 1 if it ended because no group was mixed."""
        return {"NO_MIXED_GROUPS": 1, "UNVERIFIED": 1, "INTERRUPTED": STOPPED}.get(self.ending.name, 0)


_RECIPE = "quickstart"


def train(
    config_or_path: ConfigOrPath | None = None,
    *,
    reward: Rewards | None = None,
    resume: bool = False,
    progress: bool = True,
    **overrides: Any,
) -> TrainingResult:
    """Train a model and return the result; the files are in the run directory.

    Ctrl-C, the interrupt of a notebook and SIGTERM stop the run: it saves a checkpoint and returns. A second one
    discards the step in progress and raises KeyboardInterrupt. Outside of the main thread, signals have no effect.

    Args:
        config_or_path: Name of a built-in recipe, path of a YAML file, nested settings, or a config; None is
            `quickstart`. With `resume`, a run directory.
        reward: A function that verifies responses, for all domains of the data (`verification.functions`): with TRL's
            signature, `reward(completions, **columns) -> list[float]`, or `verify(response, reference)`. Several terms
            are a mapping, `{"right": right, "brief": (brief, 0.2)}`: the first decides what is correct, and the
            weighted sum is the reward. Worker processes import the file of a function; the source of one of a notebook
            is written into the run directory.
        resume: Continue a run from its last checkpoint. Settings such as `steps` can change
            (`brorl.config.reading.CHANGEABLE_ON_RESUME`).
        progress: Print the output of the command; run.log has it in any case.
        overrides: Settings that replace those of the recipe, nested or by dotted name:
            `train("quickstart", steps=30, evaluation={"every": 5}, **{"sampling.top_k": 0})`. Among them are
            `output_dir` (default: a new directory in `runs/`), `report`, and `tracking`. `data` may also be rows: a
            `datasets.Dataset`, a list of dicts, a data frame or a table. Their columns are guessed as `brorl init`
            does, and they are stored in the run directory. Without a recipe, the other settings are those that `brorl
            init` writes. `tools` may also be a list of functions that responses can call, with types and a docstring.

    Returns:
        The result. It shows as tables in terminals and notebooks.

    Raises:
        UserError: If a setting, the data, the model or the machine's memory does not fit; nothing is left on the disk.
    """
    refuse_in_worker()
    if resume:
        if not isinstance(config_or_path, str | Path):
            raise UserError("resume=True needs a run directory as the first argument")
        if reward is not None:
            raise UserError("a resumed run keeps its reward; leave out reward, or start a new run with it")
        if isinstance(overrides.get("tools"), list | tuple):
            raise UserError("a resumed run keeps its tools; leave out tools, or start a new run with them")
        return _resume(config_or_path, overrides, progress)
    from brorl.api.in_memory import FOLDER, resolve_in_memory

    with TemporaryDirectory(prefix="brorl-given-") as scratch:
        folder = Path(scratch) / FOLDER
        recipe, config, said = resolve_in_memory(config_or_path, overrides, reward, folder)
        check_cheaply(config)
        if progress and said:
            print("\n".join(said))  # noqa: T201
        return _train_new(config, Path(recipe_name(recipe)).stem, folder, progress)


def _train_new(config: TrainConfig, name: str, given: Path, progress: bool) -> TrainingResult:
    """Train in a new directory; files made from in-memory rows and functions are copied there from `given`."""
    with Screen(silent=not progress) as screen:  # shown while torch is imported
        from brorl.api.in_memory import moved
        from brorl.api.training_session import TrainingSession

        directory = make_run_directory(config.output_dir, name)
        with directory.locked():  # until it is released, no other process uses or removes the directory
            refuse_used_folder(directory.path)
            try:
                config = moved(config, given, directory.path / given.name)
                return TrainingSession(config, directory, screen, is_new=True).run_to_end()
            except LearnerLostError:  # it can be resumed, even from step 0
                raise
            except UserError:
                if not directory.read_metrics():  # no step was done: remove all, so that the command can be repeated
                    rmtree(directory.path, ignore_errors=True)
                raise


def train_command(config_or_path: str = _RECIPE, **overrides: Any) -> TrainingResult:
    """Train as a command.

    Args:
        config_or_path: Built-in recipe or YAML file.
        overrides: Settings.
    """
    return train(config_or_path, **overrides)


def resume_command(run: str, **overrides: Any) -> TrainingResult:
    """Resume as a command.

    Args:
        run: Run directory.
        overrides: Settings.
    """
    return train(run, resume=True, **overrides)


def _resume(path: str | Path, overrides: Mapping[str, Any], progress: bool) -> TrainingResult:
    """Continue the run in a directory."""
    config_file = Path(path) / "config.yaml"
    if not config_file.is_file():
        raise UserError(
            f"{path} is not a run directory (it has no config.yaml); use the directory that `brorl train` printed"
        )
    config = resolve_config(config_file, overrides)
    with Screen(silent=not progress) as screen:
        from brorl.api.training_session import TrainingSession
        from brorl.runs.run_directory import RunDirectory

        directory = RunDirectory(Path(path))
        with directory.locked():
            return TrainingSession(config, directory, screen, is_new=False).run_to_end()
