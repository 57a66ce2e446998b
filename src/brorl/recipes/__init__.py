"""Built-in recipes, by name: `brorl train quickstart`."""
