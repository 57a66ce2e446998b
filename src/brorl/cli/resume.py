"""`brorl resume`: goes on with a run from its last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import brorl
from brorl.cli.runs_folder import RUNS, newest_unfinished
from brorl.cli.settings import Commands, add_settings, overrides_of
from brorl.cli.train import run_to_end
from brorl.errors import UserError


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
    parser = commands.add_parser(
        "resume",
        usage="brorl resume [RUN] [--key value ...]",
        help="resume a run from its last checkpoint; without RUN, the newest unfinished run in runs/",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", nargs="?", metavar="RUN", type=Path,
        help=f"run directory (default: the run in {RUNS}/ that was active last and is not finished)",
    )  # fmt: skip
    parser.set_defaults(execute=lambda parsed: resume(parsed.run, overrides_of(parsed)))
    if chosen:
        from brorl.config.resuming import CHANGEABLE_ON_RESUME

        add_settings(parser, CHANGEABLE_ON_RESUME)


def resume(path: Path | None, overrides: dict[str, Any]) -> int:
    """Go on with the run in a directory, or with the newest one, and return the exit code."""
    from brorl.config.reading import make_config, parse_yaml
    from brorl.console.screen import Screen

    if path is None:
        path = newest_unfinished(overrides)
        print(f"resuming {path}, the newest unfinished run in {RUNS}/")  # noqa: T201
    config_file = path / "config.yaml"
    if not config_file.is_file():
        raise UserError(
            f"{path} is not a run directory (it has no config.yaml); use the directory that `brorl train` printed"
        )
    settings = parse_yaml(config_file.read_text("utf-8"), str(config_file))
    if not isinstance(settings, dict):
        raise UserError(f"{config_file} has no settings; restore the file, or start a new run with another output_dir")
    config = make_config(settings, overrides, str(config_file))
    with Screen(f"brorl {brorl.__version__}") as screen:
        from brorl.runs.run_directory import RunDirectory

        directory = RunDirectory(path)
        with directory.locked():
            return run_to_end(config, directory, screen)
