"""`raytf.fit`, `evaluate` and `predict`: several workers for an existing model."""
