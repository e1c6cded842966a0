"""Examination of a Ray cluster, for `raytf doctor`: `probe` measures on each node, `findings` evaluates the results.

A node's name is its address. A link is the path from one node to another. A finding is a problem with its nodes, its
measurement and its fix.
"""
