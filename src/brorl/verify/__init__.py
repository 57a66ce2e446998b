"""Verifiers: responses in, verdicts out. One file per domain; `grade` judges whole trees."""
