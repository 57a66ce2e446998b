"""Layouts: the columns of public datasets, each by one word."""
