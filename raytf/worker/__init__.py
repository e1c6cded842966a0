"""Code of a worker's process: strategy, model, data, restore, fit, report."""
