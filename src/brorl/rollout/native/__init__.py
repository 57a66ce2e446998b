"""Parts of the native engine, which samples trees with any Hugging Face decoder."""
