"""What XLA compiles for GPUs that are not there: kernels, bytes, copies, collectives, memory.

XLA's compiler for NVIDIA GPUs runs on any machine, so a whole training step can be compiled for an
H200, or for 1024 of them, and its text be counted. Nothing here runs on a GPU, and nothing is
measured but the time of the compiler.
"""
