"""`raytf.fit`, `evaluate` and `predict`: several workers for a model that is already there."""
