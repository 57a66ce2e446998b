"""Tools and turns: rollouts that call functions and continue with the results."""
