"""Tasks of Reasoning Gym and of the library `verifiers`: their questions, their scorers and their guards."""
