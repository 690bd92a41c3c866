"""`python -m jax_bnar.doctor [--json]`: do the kernels work here, and if not, why and what to do.

Executes a small operator, forward and backward, on the default platform, on the CPU and on CUDA,
and compares with pure JAX. Exit code 0 if the default platform works with the kernels, else 1.
`--json` prints one object, whose keys are the fields of `jax_bnar.doctor._report.Report`.
"""
