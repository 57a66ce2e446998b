"""Checks of a run that need no torch, whose import takes seconds."""

from __future__ import annotations

from pathlib import Path

from brorl.api.runs_folder import refuse_used_folder
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.model.name import check_folder
from brorl.paths import is_file


def check_cheaply(config: TrainConfig) -> None:
    """Check the folder of a new run, that of its model, the files of its verifiers, and the first row of its data.

    Raises:
        UserError: On the first problem.
    """
    if config.output_dir is not None:
        refuse_used_folder(Path(config.output_dir).expanduser())
    check_folder(config.model)
    for domain, function in config.verification.functions.items():
        file = function.rpartition(":")[0]
        if file.endswith(".py") and not is_file(file):
            raise UserError(
                f"verification.functions.{domain}: there is no file {file} (working folder {Path.cwd()}); write the "
                "verifier, or fix the path"
            )

    from brorl.assemble.data import check_first_rows  # imports numpy

    check_first_rows(config)
