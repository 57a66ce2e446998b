"""Parses mathematical answers and decides whether two of them agree."""
