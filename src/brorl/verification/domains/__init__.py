"""Verifiers, one file per domain."""
