"""The effect of N in tested formulas: mass balance, simulator, coverage, held-out check, pass rates, allocation."""
