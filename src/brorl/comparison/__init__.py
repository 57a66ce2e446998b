"""Everything of `brorl compare`: arms, plan, runs, statistics, tables, text and figures."""
