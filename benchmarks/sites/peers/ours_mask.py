"""jax_bnar with save="mask": backward reads one bit per element instead of y."""

import functools

from benchmarks.sites.peers import ours

build = functools.partial(ours.build, save="mask")
