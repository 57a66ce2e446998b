"""The native engine: samples a tree with any Hugging Face decoder."""
