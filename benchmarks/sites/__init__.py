"""Benchmarks each BatchNorm site of ResNet-50 against its peers in one process."""
