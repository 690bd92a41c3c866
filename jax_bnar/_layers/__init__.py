"""Flax layers built on the operators; this level holds what Linen and NNX share."""
