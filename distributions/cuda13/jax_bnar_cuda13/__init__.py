"""The CUDA kernels of `jax_bnar`, which finds them here: there is nothing else to import."""

from importlib.metadata import version

__version__ = version("jax-bnar-cuda13")
