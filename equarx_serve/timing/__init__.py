"""Timing that can be believed.

interleave   several variants in turn, so that drift hits all alike; medians and quartiles
"""
