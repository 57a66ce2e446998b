"""Terminal output of the commands: one live line during the work, tables at the end."""
