"""Processes of a run: roles, placement, resources, environment, and detection of failures, hangs and stragglers."""
