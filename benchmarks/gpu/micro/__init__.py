"""Measures the constants of cuda/host/cost.h on a GPU, in seconds and without JAX."""
