"""Benchmarks of jax_bnar against its peers; see README.md."""
