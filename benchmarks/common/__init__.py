"""Shared by all benchmarks: the list of sites, timing, a description of the machine, JSON."""
