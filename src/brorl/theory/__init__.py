"""The effect of N on the correct mass, as in the paper: Theorem 1, and the simulator of Figure 3."""
