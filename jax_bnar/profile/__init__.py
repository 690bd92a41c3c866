"""`python -m jax_bnar.profile FILE...`: where the time and the bytes of a network go.

Reads profiles in the JSON that MegEngine's GraphProfiler writes, and prints time, bytes, bandwidth
and share by type of operator, the operators that take longest, and the pairs of an addition and an
addition with ReLU that one pass could do, with what that would save. `--emit FILE` runs our
ResNet-50 and writes the same JSON, so that both print side by side; `--picture FILE` draws them.
Needs what `pip install 'jax-bnar[profile]'` installs.
"""
