"""Keras under several replicas; each file is named as the part of Keras that it completes."""
