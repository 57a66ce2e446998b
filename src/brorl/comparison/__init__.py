"""Everything of `brorl compare`: arms, matching, statistics, tables, text and figures."""
