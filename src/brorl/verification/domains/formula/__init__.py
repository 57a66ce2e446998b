"""Written mathematics: what an answer says, and whether two answers say the same."""
