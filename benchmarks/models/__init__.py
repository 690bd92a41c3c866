"""ResNets as users write them with seven libraries, without `jax_bnar`.

`jax_bnar.fuse` is benchmarked and tested on these networks; `network.build` creates them.
"""
