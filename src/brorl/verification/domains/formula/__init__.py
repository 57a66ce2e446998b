"""Written math: what an answer says, and whether two answers agree."""
