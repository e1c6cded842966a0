"""`raytf run`: any TensorFlow script on Ray actors, a process for each task of its cluster."""
