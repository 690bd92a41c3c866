"""`python -m jax_bnar.profile FILE...`: where the time and the bytes of a network go.

It reads profiles in the JSON that MegEngine's GraphProfiler writes. It prints time, bytes,
bandwidth and share by type of operator, the operators that take longest, and the pairs of an
addition and an addition with ReLU that a single pass could compute, with what that would save.
`--emit FILE` runs our ResNet-50 and writes the same JSON, so that both profiles can be printed side
by side; `--picture FILE` draws them. It requires rich, matplotlib for a picture, and Flax for
`--emit`; the extra `profile` brings them.
"""
