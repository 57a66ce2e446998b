"""Prompts to trees: the engines that sample."""
