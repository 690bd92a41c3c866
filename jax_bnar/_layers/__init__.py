"""Flax layers around the operators: what Linen and NNX share."""
