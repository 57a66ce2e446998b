"""Layouts: one-word names for the column formats of public datasets."""
