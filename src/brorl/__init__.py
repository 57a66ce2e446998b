"""brorl: reinforcement learning from verifiable rewards at many rollouts per prompt, as trees.

`import brorl` is light; each name is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brorl.api.compare import compare
    from brorl.api.evaluate import evaluate
    from brorl.api.plan import plan
    from brorl.api.train import train
    from brorl.errors import UserError
    from brorl.sampling import SamplingParams
    from brorl.tree import RolloutTree

__all__ = ["RolloutTree", "SamplingParams", "UserError", "compare", "evaluate", "plan", "train"]
__version__ = "0.1.0"

_HOMES = {
    "RolloutTree": "brorl.tree",
    "SamplingParams": "brorl.sampling",
    "UserError": "brorl.errors",
    "compare": "brorl.api.compare",
    "evaluate": "brorl.api.evaluate",
    "plan": "brorl.api.plan",
    "train": "brorl.api.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
