"""Warns that a mask makes XLA gather an activation, which otherwise happens in silence."""

import warnings

from jax_bnar._sharding.shards import Shards, spec_of

_warned = False


def warn_of_gather(used: Shards, given: Shards) -> None:
    """Warns, the first time, if the operation cannot use a sharding because of its mask.

    Args:
        used: the sharding that the operation uses.
        given: that which it would use if it had no mask.
    """
    global _warned
    if _warned or used.axes == given.axes:
        return
    _warned = True
    warnings.warn(
        f'jax_bnar: save="mask" makes XLA gather x of shape {used.shape}, sharded by'
        f" {spec_of(given.axes)}: a device's shard, {given.local_shape()}, does not hold whole"
        ' bytes of the mask (runs of 8 elements, within one ghost batch). Way out: save="y", or'
        " shards with a multiple of 8 channels (NCHW: of 8 pixels).",
        RuntimeWarning,
        stacklevel=2,  # XLA calls this while it compiles, so no frame is that of the call.
    )
