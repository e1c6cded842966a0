"""Converts rows of a Ray Dataset to batches of tensors, in an order that is independent of the number of workers."""
