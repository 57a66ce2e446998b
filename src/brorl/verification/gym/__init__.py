"""Tasks of Reasoning Gym: their questions, their scorers and their guards."""
