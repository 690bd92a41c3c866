"""Blocks of other architectures than ResNet-50, as XLA compiles them for GPUs."""
