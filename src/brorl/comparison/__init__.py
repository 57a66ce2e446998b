"""The implementation of `brorl compare`: arm recipes, spec, runs, statistics, tables, text and figures."""
