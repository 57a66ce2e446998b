"""Worker processes for verifiers that could hang or crash."""
