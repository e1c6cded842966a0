"""Sums over workers: a ring of sockets, and TensorFlow's own. Knows no Keras."""
