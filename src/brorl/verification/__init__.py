"""Verifiers: responses in, verdicts out. One file per domain; `grade` verifies whole trees."""
