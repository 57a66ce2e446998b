"""The files of a run: directory, checkpoints, metrics, stored rollouts."""

from pathlib import Path

RUNS = Path("runs")  # default output folder of every command
