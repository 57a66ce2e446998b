"""How N affects the correct mass, following the paper: Theorem 1, and the simulator behind Figure 3."""
