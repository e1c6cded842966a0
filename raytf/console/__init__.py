"""What a user sees of a run: progress, what processes print, and lines of TensorFlow and Ray that are kept away."""
