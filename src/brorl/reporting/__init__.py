"""Turn results into tables, figures and files."""
