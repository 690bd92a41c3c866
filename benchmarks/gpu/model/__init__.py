"""Predicts the time of the CUDA kernels at the sites of ResNet-50, without a GPU.

`python -m benchmarks.gpu.model` asks the planner that the kernels use (cuda/host) what it would do
on a device, and adds up bytes, rounds of barriers, launches and instructions. Nothing here
measures, but the constants were fitted to times of an H200
(benchmarks/results/gpu-plans-h200.json).
"""
