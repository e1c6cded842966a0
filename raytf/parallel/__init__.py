"""Keras under several replicas. Each file is named after the part of Keras that it completes."""
