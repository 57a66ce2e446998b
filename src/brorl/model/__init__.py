"""Trees to log-probs: loading models, attention over trees, chunked and differentiable log-probs."""
