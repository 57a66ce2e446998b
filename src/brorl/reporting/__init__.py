"""Results to tables, figures and files."""
