"""Reasoning Gym tasks: their questions, scorers and guards."""
