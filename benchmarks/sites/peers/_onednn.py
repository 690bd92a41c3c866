"""Shared by the oneDNN peers: the primitives of a step, bound to memory that is allocated once.

oneDNN has no CPU implementation of BatchNorm fused with an addition (`fuse_norm_add_relu`), at
least until version 3.13; it is asked for it first. Otherwise the step at a residual is BatchNorm,
an addition in place with the ReLU as its post-op, the gradient of the ReLU from its result
(`relu_use_dst_for_bwd`), and the gradient of BatchNorm. Without a residual the ReLU is fused
(`fuse_norm_relu`). Operands and results stay where they are from call to call, as in a program that
uses oneDNN directly; the other peers allocate their results in each call.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from benchmarks.sites.peers import Step, _dnnl
from benchmarks.sites.peers._dnnl import Dnnl, Memory, Primitive
from benchmarks.sites.peers._onednn_plan import Layout, Plan, choose
from benchmarks.sites.problem import (
    MOMENTUM,
    NUMPY_DTYPES,
    RUNNING_MEAN,
    RUNNING_VAR,
    Problem,
    Results,
)

_PAGE: Final = 4096
# Each array begins this much further into its page than the array before it. Loads are slow if a
# store to the same place in another page is under way, as with arrays that begin alike.
_STAGGER: Final = 320


class _Allocator:
    def __init__(self, dnnl: Dnnl) -> None:
        self._dnnl = dnnl
        self._count = 0

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype, descriptor: Any) -> Memory:
        size = int(np.prod(shape)) * dtype.itemsize
        block = np.zeros(size + 2 * _PAGE, np.uint8)
        start = -block.ctypes.data % _PAGE + self._count * _STAGGER % _PAGE
        self._count += 1
        array = block[start : start + size].view(dtype).reshape(shape)
        return Memory(self._dnnl, array, descriptor)

    def filled(self, values: np.ndarray, descriptor: Any) -> Memory:
        memory = self.zeros(values.shape, values.dtype, descriptor)
        memory.array[...] = values
        return memory


class _Buffers:
    """The arrays of a step."""

    def __init__(self, dnnl: Dnnl, plan: Plan, problem: Problem) -> None:
        allocator = _Allocator(dnnl)
        dtype = NUMPY_DTYPES[problem.dtype]

        def activation(values: np.ndarray | None) -> Memory | None:
            if values is None:
                return None
            stored = plan.layout.in_blocks(problem.in_layout(values.astype(dtype)))
            return allocator.filled(stored, plan.activation)

        def result() -> Memory:
            return allocator.zeros(self.x.array.shape, dtype, plan.activation)

        def parameter(values: np.ndarray) -> Memory:
            return allocator.filled(values.astype(np.float32), plan.parameter)

        self.x, self.dy = (_present(activation(values)) for values in (problem.x, problem.dy))
        self.z = activation(problem.z)
        self.scale, self.bias = parameter(problem.scale), parameter(problem.bias)
        self.mean, self.var, self.dscale, self.dbias = (
            parameter(np.zeros_like(problem.scale)) for _ in range(4)
        )
        self.y, self.dx = result(), result()
        self.dz = None if problem.z is None else result()
        self.workspace = None
        if plan.relu:
            descriptor = dnnl.workspace(plan.forward)
            size = (dnnl.size(descriptor),)
            self.workspace = allocator.zeros(size, np.dtype(np.uint8), descriptor)


@functools.cache
def _dnnl_of_this_process() -> Dnnl:
    return Dnnl()


def make_step(problem: Problem, layouts: Sequence[Layout]) -> Step:
    """A step in the first of the layouts for which oneDNN has optimised code."""
    dnnl = _dnnl_of_this_process()
    plan = choose(dnnl, problem, layouts)
    buffers = _Buffers(dnnl, plan, problem)
    forward = _forward(dnnl, plan, buffers)
    step = [*forward, *_backward(dnnl, plan, buffers)]
    old_mean = np.full(problem.site.channels, RUNNING_MEAN, np.float32)
    old_var = np.full(problem.site.channels, RUNNING_VAR, np.float32)

    def execute(primitives: Sequence[Primitive]) -> tuple[np.ndarray, np.ndarray]:
        for primitive in primitives:
            primitive()
        dnnl.wait()
        return (
            MOMENTUM * old_mean + (1 - MOMENTUM) * buffers.mean.array,
            MOMENTUM * old_var + (1 - MOMENTUM) * buffers.var.array,
        )

    def to_results(running: Any) -> Results:
        channels = problem.site.channels

        def nhwc(memory: Memory) -> np.ndarray:
            values = plan.layout.from_blocks(memory.array, channels)
            return problem.from_layout(values).astype(np.float32)

        running_mean, running_var = running
        return Results(
            nhwc(buffers.y),
            running_mean,
            running_var,
            nhwc(buffers.dx),
            None if buffers.dz is None else nhwc(buffers.dz),
            buffers.dscale.array.copy(),
            buffers.dbias.array.copy(),
        )

    details = {"layout": plan.layout.name, **plan.implementations(dnnl)}
    return Step(lambda: execute(step), lambda: execute(forward), to_results, details)


def _forward(dnnl: Dnnl, plan: Plan, buffers: _Buffers) -> list[Primitive]:
    arguments = {
        _dnnl.SRC: buffers.x,
        _dnnl.DST: buffers.y,
        _dnnl.MEAN: buffers.mean,
        _dnnl.VARIANCE: buffers.var,
        _dnnl.SCALE: buffers.scale,
        _dnnl.SHIFT: buffers.bias,
    }
    if buffers.workspace is not None:
        arguments[_dnnl.WORKSPACE] = buffers.workspace
    if plan.add:
        arguments[_dnnl.SRC_1] = _present(buffers.z)
    primitives = [Primitive(dnnl, plan.forward, arguments)]
    if plan.join is not None:
        joined = {_dnnl.SRC: buffers.y, _dnnl.SRC_1: _present(buffers.z), _dnnl.DST: buffers.y}
        primitives.append(Primitive(dnnl, plan.join, joined))
    return primitives


def _backward(dnnl: Dnnl, plan: Plan, buffers: _Buffers) -> list[Primitive]:
    primitives = []
    gradient = buffers.dy
    if plan.gate is not None:
        gradient = _present(buffers.dz)
        gated = {_dnnl.DST: buffers.y, _dnnl.DIFF_DST: buffers.dy, _dnnl.DIFF_SRC: gradient}
        primitives.append(Primitive(dnnl, plan.gate, gated))
    arguments = {
        _dnnl.SRC: buffers.x,
        _dnnl.MEAN: buffers.mean,
        _dnnl.VARIANCE: buffers.var,
        _dnnl.DIFF_DST: gradient,
        _dnnl.SCALE: buffers.scale,
        _dnnl.DIFF_SRC: buffers.dx,
        _dnnl.DIFF_SCALE: buffers.dscale,
        _dnnl.DIFF_SHIFT: buffers.dbias,
    }
    if buffers.workspace is not None:
        arguments[_dnnl.WORKSPACE] = buffers.workspace
    if plan.add:
        arguments[_dnnl.DIFF_SRC_1] = _present(buffers.dz)
    return [*primitives, Primitive(dnnl, plan.backward, arguments)]


def _present(memory: Memory | None) -> Memory:
    assert memory is not None
    return memory
