"""How good a model is: pass@k on held-out prompts, with intervals."""
