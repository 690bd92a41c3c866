"""The NNX layers."""
