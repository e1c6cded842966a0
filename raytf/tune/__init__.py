"""Sweeps by Ray Tune over warm worker groups, their live table and their report."""
