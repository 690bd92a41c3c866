"""cuDNN's fused BatchNorm-Add-ReLU on PyTorch's tensors: a peer of torch_benchmark.

It has the operands and results of PyTorch's own step. As there, each step allocates its results and
what forward keeps for backward; only the workspace is shared. cuDNN is called on the current stream
and nothing waits, so the pass can be captured in a CUDA graph.
"""

from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from benchmarks.common.sites import Site
from benchmarks.gpu.cudnn import BatchNormAddRelu, Library
from benchmarks.sites.problem import EPSILON, MOMENTUM


def make_pass(site: Site, activations: list[Any], vectors: list[Any]) -> Callable[[], Any]:
    """Goes through all sets once, and returns the results of each.

    A graph that was captured from it uses its workspace, so it must live as long as the graph.
    Raises ValueError if the operands are not those of the site, CudnnError if cuDNN refuses them,
    and OSError if there is no cuDNN.
    """
    _check(site, activations, vectors)
    first = activations[0][0]
    dtype: Any = str(first.dtype).removeprefix("torch.")
    operation = BatchNormAddRelu(
        Library(),
        site,
        first.shape[0],
        dtype,
        epsilon=EPSILON,
        average_factor=1 - MOMENTUM,
    )

    def empty_bytes(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=first.device)

    workspace = empty_bytes(
        max(operation.forward_workspace_bytes, operation.backward_workspace_bytes)
    )
    scale, bias, running_mean, running_var = vectors

    def step(x: torch.Tensor, z: torch.Tensor | None, dy: torch.Tensor, stream: int) -> Any:
        y = torch.empty_like(x)
        saved_mean, saved_inverse_std = (torch.empty_like(running_mean) for _ in range(2))
        reserve_space = empty_bytes(operation.reserve_space_bytes)
        common: dict[str, int] = {
            "x": x.data_ptr(),
            "y": y.data_ptr(),
            "scale": scale.data_ptr(),
            "bias": bias.data_ptr(),
            "saved_mean": saved_mean.data_ptr(),
            "saved_inverse_std": saved_inverse_std.data_ptr(),
            "workspace": workspace.data_ptr(),
            "reserve_space": reserve_space.data_ptr(),
            "stream": stream,
        }
        operation.forward(
            z=None if z is None else z.data_ptr(),
            running_mean=running_mean.data_ptr(),
            running_var=running_var.data_ptr(),
            **common,
        )
        dx = torch.empty_like(x)
        dz = None if z is None else torch.empty_like(z)
        dscale, dbias = torch.empty_like(scale), torch.empty_like(bias)
        operation.backward(
            dy=dy.data_ptr(),
            dx=dx.data_ptr(),
            dz=None if dz is None else dz.data_ptr(),
            dscale=dscale.data_ptr(),
            dbias=dbias.data_ptr(),
            **common,
        )
        return y, tuple(gradient for gradient in (dx, dz, dscale, dbias) if gradient is not None)

    def run() -> Any:
        stream = torch.cuda.current_stream().cuda_stream if first.is_cuda else 0
        return [step(x, z, dy, stream) for x, z, dy in activations]

    return run


def _check(site: Site, activations: list[Any], vectors: list[Any]) -> None:
    """Checks the operands, because an address does not say what it points to."""
    first = activations[0][0]
    batch, height, width, channels = site.shape(first.shape[0])
    shape = (batch, channels, height, width)
    for x, z, dy in activations:
        if (z is not None) != (site.form == "bn_add_relu"):
            raise ValueError(f"z is {'missing' if z is None else 'superfluous'} for {site.label}.")
        for name, operand in (("x", x), ("z", z), ("dy", dy)):
            if operand is not None:
                _check_one(name, operand, shape, first.dtype, first.device, torch.channels_last)
    for name, vector in zip(("scale", "bias", "running_mean", "running_var"), vectors, strict=True):
        _check_one(name, vector, (channels,), torch.float32, first.device, torch.contiguous_format)


def _check_one(
    name: str, given: torch.Tensor, shape: tuple[int, ...], dtype: Any, device: Any, layout: Any
) -> None:
    if (tuple(given.shape), given.dtype, given.device) != (shape, dtype, device):
        raise ValueError(
            f"{name} is {tuple(given.shape)} {given.dtype} on {given.device},"
            f" expected {shape} {dtype} on {device}."
        )
    if not given.is_contiguous(memory_format=layout):
        raise ValueError(
            f"{name} has strides {given.stride()}, expected those of {layout}:"
            f" call .contiguous(memory_format={layout})."
        )
