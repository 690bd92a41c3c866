"""ResNets as users write them in seven libraries, with nothing of `jax_bnar` in them.

What `jax_bnar.fuse` is measured on, and in part tested on: `network.build` names them.
"""
