"""The CUDA kernels of `jax_bnar`, which finds them here: there is nothing else to import."""

__version__ = "0.1.0"
