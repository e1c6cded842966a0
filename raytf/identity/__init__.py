"""What a model, a function, a config and a dataset mean, so that one run is never taken for another."""
