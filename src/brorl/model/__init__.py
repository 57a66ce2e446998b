"""From trees to log-probs: model loading, attention over trees, chunked and differentiable log-probs."""
