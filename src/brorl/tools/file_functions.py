"""Finds the functions in a Python file that can be tools. The file is executed in a worker, as in a run."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from brorl.errors import UserError, option
from brorl.verification.domains.verifiers import load_problem
from brorl.verification.sandbox.pool import LoadError, VerifierCall, Workers
from brorl.verification.settings import VerificationSettings

_LOAD_S = 60.0


@dataclass(frozen=True)
class FileFunctions:
    """The public functions in a file."""

    tools: dict[str, str]  # name -> `file.py:function`, as in `tools.functions`
    left_out: dict[str, str]  # name of a function that cannot be a tool -> reason

    @classmethod
    def of(cls, file: str) -> FileFunctions:
        """Find the functions in the file whose names have no leading underscore.

        Raises:
            UserError: If the file cannot be loaded, or if none of its functions can be a tool.
        """
        try:
            body = ast.parse(Path(file).expanduser().read_text("utf-8")).body
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"{option('tools', file)}: {error}; pass a Python file with functions") from error
        names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        paths = {name: f"{file}:{name}" for name in names if not name.startswith("_")}
        left_out = {}
        try:
            with Workers.from_settings(VerificationSettings(workers=1)) as workers:
                loads = [
                    VerifierCall(path, (), "brorl.tools.schema:describe_function", _LOAD_S) for path in paths.values()
                ]
                for name, reply in zip(paths, workers.functions.run(loads), strict=True):
                    if problem := reply.failure or reply.value.get("problem"):
                        left_out[name] = problem.partition(": ")[2].rstrip("!.") or problem
        except LoadError as error:
            raise UserError(
                f"{option('tools', file)}: {load_problem(next(iter(paths.values())), str(error))}"
            ) from None
        if not paths.keys() - left_out.keys():
            why = "".join(f"; {name}: {problem}" for name, problem in left_out.items())
            raise UserError(
                f"{option('tools', file)}: no function can be a tool{why}; a tool needs type hints for its parameters "
                "and a docstring that describes it and each parameter"
            )
        return cls({name: paths[name] for name in paths if name not in left_out}, left_out)

    def lines(self) -> list[str]:
        """Return the lines to print."""
        lines = [f"tools: {', '.join(self.tools)}"] if self.tools else []
        return lines + [f"  skipped: {name}, which cannot be a tool: {why}" for name, why in self.left_out.items()]
