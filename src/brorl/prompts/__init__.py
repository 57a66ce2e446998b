"""Prompts: questions, their sources, their text for the model, and their order in training."""
