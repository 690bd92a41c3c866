"""What the benchmarks share: the sites, the bandwidth of a copy, the machine, and JSON."""
