"""Terminal output of the commands: one live line while they work, tables at the end."""
