"""Measures the time and the memory of a user's own function, plain and fused."""

from jax_bnar._benchmark.api import benchmark as benchmark
from jax_bnar._benchmark.difference import Difference as Difference
from jax_bnar._benchmark.report import BenchmarkReport as BenchmarkReport
from jax_bnar._benchmark.report import Measurement as Measurement
