"""What N does, in formulas that are tested: mass balance, simulator, coverage, certificate, planning."""
