"""Recipe settings, and reading recipes."""
