"""What is private in Keras, TensorFlow and Ray, and what differs between their versions: named here alone."""
