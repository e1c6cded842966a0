"""Sums over workers: a ring of sockets, and TensorFlow's collectives. Does not import Keras."""
