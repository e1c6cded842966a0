"""Console output of a run: progress, lines of its processes, and filters for start-up lines of TensorFlow and Ray."""
