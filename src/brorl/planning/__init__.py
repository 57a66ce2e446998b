"""Everything of `brorl plan`: pilot, step timing, step cost, gradient noise, recommendation, tables, figure."""
