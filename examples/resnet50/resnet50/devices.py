"""Devices and how arrays lie on them: the batch is split over all, the variables are on each."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from resnet50.config import Platform, Run
from resnet50.errors import UserError, first_line

DATA_AXIS = "data"


def start(platform: Platform, job: Run | None = None) -> list[Any]:
    """The devices of the platform, after joining the other processes of the job.

    Call it before anything else touches JAX. Raises UserError where there are none.
    """
    if platform != "auto":
        # Without this JAX falls back to the CPU, and a training takes years.
        jax.config.update("jax_platforms", platform)
    if job is not None and job.distributed:
        _join(job)
    try:
        return jax.devices()
    except RuntimeError as error:
        without_support = "list of known backends" in str(error)
        reason = "it is not built for it" if without_support else first_line(error)
        raise UserError(
            f"JAX finds no {'device' if platform == 'auto' else platform} on this machine"
            f" ({reason}): install JAX for it (for NVIDIA GPUs: pip install 'jax[cuda13]'), or"
            " choose --platform cpu."
        ) from error


def _join(job: Run) -> None:
    try:
        jax.distributed.initialize(job.coordinator, job.num_processes, job.process_id)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the processes could not be joined ({first_line(error)}); outside of a cluster that"
            " JAX knows, each process needs --coordinator HOST:PORT, --num-processes and"
            " --process-id."
        ) from error


def data_mesh(devices: list[Any]) -> Mesh:
    return Mesh(np.asarray(devices), (DATA_AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def split_batch(mesh: Mesh) -> NamedSharding:
    """The leading axis over all devices."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
    """The global batch of which this process holds its part."""
    sharding = split_batch(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, values)
        for name, values in batch.items()
    }


def check_batch(batch_size: int, accumulate: int, mesh: Mesh) -> None:
    if batch_size < 1 or accumulate < 1 or batch_size % (accumulate * mesh.size):
        raise UserError(
            f"--batch-size {batch_size} does not divide into {accumulate} micro-batches"
            f" (--accumulate) on {mesh.size} devices; use a multiple of {accumulate * mesh.size}."
        )


def describe(devices: list[Any]) -> str:
    kinds = sorted({device.device_kind for device in devices})
    processes = jax.process_count()
    text = f"{len(devices)} x {', '.join(kinds)} ({devices[0].platform})"
    return text if processes == 1 else f"{text} in {processes} processes"
