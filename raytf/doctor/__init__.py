"""Examining a Ray cluster, for `raytf doctor`: `probe` measures on each node, `findings` judges what was measured.

A node is named by its address; a link is the way from one node to another; a finding is what is wrong, where, what was
measured, and its fix.
"""
