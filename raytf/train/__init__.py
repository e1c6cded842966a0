"""The driver of one run: arguments, dry run, start of the workers, and results."""
