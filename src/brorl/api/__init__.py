"""The functions of `import brorl`: train, evaluate, compare and plan from Python, as the command line does."""
