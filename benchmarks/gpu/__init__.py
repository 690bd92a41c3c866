"""One command for the day there is a GPU: build, doctor, tests, compute-sanitizer, benchmark.

`make gpu`, or `python -m benchmarks.gpu --output DIR`; see `--help`.
"""
