"""Converts rows of a Ray Dataset to batches of tensors, in an order independent of the number of workers."""
