"""Evaluation of models: pass@k on held-out prompts, with intervals."""
