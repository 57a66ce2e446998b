"""The effect of N in tested formulas: mass balance, simulator, coverage, pass rates, gradient coefficients."""
