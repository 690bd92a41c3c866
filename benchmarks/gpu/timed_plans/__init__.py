"""Times the kernels on a GPU with one plan after the other, without JAX."""
