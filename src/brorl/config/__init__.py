"""Recipe settings, and the reader for recipes."""
