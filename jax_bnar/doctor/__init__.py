"""`python -m jax_bnar.doctor [--json]` checks whether the kernels work here; if not, it says why.

It runs a small operator, forward and backward, on the default platform, on the CPU and on CUDA, and
compares the results with pure JAX. The exit code is 0 if the default platform works with the
kernels, and 1 otherwise. `--json` prints one object, whose keys are the fields of
`jax_bnar.doctor._report.Report`.
"""
