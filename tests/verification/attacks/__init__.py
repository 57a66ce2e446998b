"""Attacks on the sandbox of untrusted programs: sources by category, a scene of canaries, and a campaign that runs all."""
