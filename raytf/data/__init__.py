"""Rows of a Ray Dataset to batches of tensors, in an order that does not depend on the number of workers."""
