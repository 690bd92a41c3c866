"""jax_bnar with save="mask": backward reads one bit an element where it would read y."""

import functools

from benchmarks.sites.peers import ours

build = functools.partial(ours.build, save="mask")
