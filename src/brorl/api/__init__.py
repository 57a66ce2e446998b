"""The Python API: train, evaluate, compare and plan as the command line does."""
