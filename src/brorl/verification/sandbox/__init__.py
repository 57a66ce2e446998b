"""Worker processes for verifiers that can hang or crash."""
