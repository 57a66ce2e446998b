"""Verdicts to loss: pure functions, no input or output."""
