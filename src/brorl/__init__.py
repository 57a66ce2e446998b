"""brorl: reinforcement learning from verifiable rewards at many rollouts per prompt, as trees.

`import brorl` is light; each name is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brorl.api.check import check
    from brorl.api.compare import compare
    from brorl.api.data import data
    from brorl.api.evaluate import evaluate
    from brorl.api.plan import plan
    from brorl.api.sample import sample
    from brorl.api.stored_runs import report, samples
    from brorl.api.train import train
    from brorl.api.tune import tune
    from brorl.api.verify import verify
    from brorl.errors import UserError
    from brorl.sampling import SamplingParams
    from brorl.tree import RolloutTree

__all__ = [
    "RolloutTree",
    "SamplingParams",
    "UserError",
    "check",
    "compare",
    "data",
    "evaluate",
    "plan",
    "report",
    "sample",
    "samples",
    "train",
    "tune",
    "verify",
]
__version__ = "0.1.0"

_HOMES = {name: f"brorl.api.{name}" for name in __all__ if name.islower()} | {
    **dict.fromkeys(("report", "samples"), "brorl.api.stored_runs"),
    "RolloutTree": "brorl.tree",
    "SamplingParams": "brorl.sampling",
    "UserError": "brorl.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
