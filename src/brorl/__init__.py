"""brorl: reinforcement learning from verifiable rewards at many rollouts per prompt, as trees."""

from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree

__all__ = ["RolloutTree", "SamplingParams"]
__version__ = "0.1.0"
