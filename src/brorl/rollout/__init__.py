"""Engines, which sample prompts into rollout trees."""
