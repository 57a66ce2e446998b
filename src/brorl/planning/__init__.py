"""`brorl plan`: pilot, step cost, gradient noise, recommendation, tables."""
