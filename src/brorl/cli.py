"""The command line: `brorl train` and `brorl resume`.

Errors that the user can fix are one line on stderr, exit code 2 for what was found before any work and 1 for what
stopped a run. torch and transformers are imported only once a command really runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import brorl
from brorl.errors import UserError

if TYPE_CHECKING:
    from brorl.config import TrainConfig
    from brorl.console import Progress
    from brorl.training.loop import TrainingRun
    from brorl.training.run_directory import RunDirectory

_CHANGEABLE_ON_RESUME = ("steps", "checkpoint_every", "keep_checkpoints", "store_rollouts_every")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: Command line without the program's name; that of the process if not given.
    """
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(f"brorl: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        print("brorl: interrupted", file=sys.stderr)  # noqa: T201
        return 130


def _run(arguments: list[str]) -> int:
    parser = _Parser(
        prog="brorl",
        description="Reinforcement learning from verifiable rewards at many rollouts per prompt, as one tree.",
    )
    parser.add_argument("--version", action="version", version=f"brorl {brorl.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    train = commands.add_parser(
        "train",
        usage="brorl train [RECIPE] [--key value ...]",
        help="train a model by a recipe; without one, the built-in `quickstart`",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    train.add_argument("recipe", nargs="?", default="quickstart", metavar="RECIPE", help="YAML file or built-in name")
    resume = commands.add_parser(
        "resume",
        usage="brorl resume RUN [--key value ...]",
        help="go on with a run from its last checkpoint",
        allow_abbrev=False,
    )
    resume.add_argument("run", metavar="RUN", type=Path, help="run directory")
    if arguments[:1] == ["train"]:
        _add_settings(train, None)
    if arguments[:1] == ["resume"]:
        _add_settings(resume, _CHANGEABLE_ON_RESUME)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise UserError(_unknown_option(unknown[0], parsed.command))
    match parsed.command:
        case "train":
            return _train(parsed.recipe, _overrides(parsed))
        case "resume":
            return _resume(parsed.run, _overrides(parsed))
        case _:
            parser.print_help()
            return 0


def _train(recipe: str, overrides: dict[str, Any]) -> int:
    from brorl.config import make_config, read_recipe

    config = make_config(read_recipe(recipe), overrides, recipe)
    directory = _new_run_directory(config, Path(recipe).stem)
    try:
        return _go(config, directory, recipe)
    except UserError:
        if not directory.read_metrics():
            _remove_unused(directory)
        raise


def _resume(path: Path, overrides: dict[str, Any]) -> int:
    from brorl.config import make_config, parse_yaml
    from brorl.training.run_directory import RunDirectory

    directory = RunDirectory(path)
    if not directory.config_file.is_file():
        raise UserError(
            f"{path} is not a run directory (no config.yaml); give the directory that `brorl train` printed"
        )
    source = str(directory.config_file)
    settings = parse_yaml(directory.config_file.read_text("utf-8"), source)
    if not isinstance(settings, dict):
        raise UserError(f"{source} holds no settings; put the run's config back, or start anew with another output_dir")
    return _go(make_config(settings, overrides, source), directory)


def _go(config: TrainConfig, directory: RunDirectory, recipe: str | None = None) -> int:
    """Train to the end, or to the next interruption."""
    from brorl.build import build_run
    from brorl.config import dump_yaml
    from brorl.console import Progress
    from brorl.training.loop import Ending, train
    from brorl.training.run_directory import replace_file, storing

    progress = Progress(config.steps, directory.path / "run.log")
    resume = f"brorl resume {directory.path}"
    try:
        with directory.locked():
            run, state = build_run(config, directory, progress.show)
            with storing(directory.config_file):
                replace_file(directory.config_file, dump_yaml(config).encode())
            directory.write_environment()
            _announce(progress, config, run, state.step)
            ending, message = train(run, state)
    except KeyboardInterrupt:
        progress.say(f"\nthe step under way was discarded; go on from the last checkpoint with: {resume}")
        return 130
    hints = {
        Ending.FINISHED: [
            f"train longer: brorl resume {directory.path} --steps {2 * config.steps}",
            *([f"see what few rollouts give: brorl train {recipe} --rollouts_per_prompt 16"] if recipe else []),
        ],
        Ending.INTERRUPTED: [f"go on with: {resume}"],
        Ending.NO_MIXED_GROUPS: [],
    }[ending]
    progress.finish(directory.read_metrics(), directory.path, message, hints)
    return 130 if ending is Ending.INTERRUPTED else 0


def _announce(progress: Progress, config: TrainConfig, run: TrainingRun, step: int) -> None:
    """Say what is about to happen."""
    from brorl.build import build_learner_settings

    parameters = sum(p.numel() for p in run.model.parameters())
    settings = build_learner_settings(config)
    progress.say(
        f"brorl {brorl.__version__}: {config.model} ({parameters:,} parameters) on {run.model.device}, "
        f"N = {config.rollouts_per_prompt} rollouts x {config.prompts_per_step} prompts a step, "
        f"{run.collector.stream.num_prompts:,} training prompts"
    )
    progress.say(
        f"learning rate {settings.learning_rate:.2e}, {settings.mini_batches} mini-batches a step, "
        f"clip {settings.clip_low}/{settings.clip_high}; run directory {run.directory.path}"
    )
    if step:
        progress.say(f"resuming after step {step}")


def _new_run_directory(config: TrainConfig, recipe: str) -> RunDirectory:
    """Make the run's directory, which must be new or empty."""
    from brorl.training.run_directory import RunDirectory

    if config.output_dir is None:
        base = Path("runs") / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
        path, number = base, 1
        while path.exists():
            number += 1
            path = base.with_name(f"{base.name}-{number}")
    else:
        path = Path(config.output_dir).expanduser()
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(
                f"output_dir {path} exists and is not empty; choose another, or go on with: brorl resume {path}"
            )
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"could not make output_dir {path}: {error.strerror}; set output_dir to a place you may write to"
        ) from error
    return RunDirectory(path)


def _remove_unused(directory: RunDirectory) -> None:
    """Remove the directory of a run that never began, so that the same command can be given again."""
    for name in ("config.yaml", "env.json", "run.log", "metrics.jsonl"):
        (directory.path / name).unlink(missing_ok=True)
    if not any(directory.path.iterdir()):
        directory.path.rmdir()


def _add_settings(parser: argparse.ArgumentParser, only: Sequence[str] | None) -> None:
    """Add an option for every setting; its help is the setting's description."""
    from brorl.config import TrainConfig, settings_of

    group = parser.add_argument_group("settings", "every key of a recipe; the command line takes precedence")
    for name, info in settings_of(TrainConfig):
        if only is not None and name not in only:
            continue
        default = "null" if info.default is None else info.default
        names = {f"--{name}", f"--{name.replace('_', '-')}"}
        group.add_argument(
            *sorted(names, reverse=True),
            dest=f"setting:{name}",
            metavar=_type_name(info.annotation),
            default=argparse.SUPPRESS,
            help=f"{info.description} (default: {default})".replace("%", "%%"),
        )


def _overrides(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given as options, each parsed like a value in YAML."""
    from brorl.config import TrainConfig, parse_yaml, settings_of

    given = {n.removeprefix("setting:"): v for n, v in vars(parsed).items() if n.startswith("setting:")}
    texts = {n for n, info in settings_of(TrainConfig) if info.annotation in (str, str | None)}
    return {n: v if n in texts and v != "null" else parse_yaml(v, f"--{n}") for n, v in given.items()}


def _unknown_option(option: str, command: str | None) -> str:
    from brorl.config import unknown_setting

    name = option.partition("=")[0].lstrip("-").replace("-", "_")
    if not option.startswith("--"):
        return f"unexpected argument {option!r} (see brorl {command or ''} --help)"
    if command == "resume":
        return f"--{name} cannot be changed on resume; what can: {', '.join(_CHANGEABLE_ON_RESUME)}"
    return unknown_setting(name)


def _type_name(annotation: Any) -> str:
    choices = get_args(annotation)
    if choices and all(isinstance(c, str) for c in choices):
        return "|".join(choices)
    known = {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false"}
    return known.get(annotation, "VALUE")


if __name__ == "__main__":
    sys.exit(main())
