"""From verdicts to the loss: pure functions without I/O."""
