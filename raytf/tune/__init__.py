"""Many runs: sweeps by Ray Tune over warm groups of workers, their table and their report."""
