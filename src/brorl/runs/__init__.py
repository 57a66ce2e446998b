"""What a run leaves on disk: run directory, checkpoints, metrics, stored rollouts."""
