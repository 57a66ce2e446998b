"""Loss to update: the loop, the learner, checkpoints, metrics."""
