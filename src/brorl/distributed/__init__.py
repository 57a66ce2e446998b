"""Rollout workers, verifier workers and learner ranks in other processes and on other machines."""
