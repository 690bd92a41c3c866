"""Devices and shardings: the batch is split over all devices, the variables are replicated."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from resnet50.config import Platform, Run
from resnet50.errors import UserError, first_line

DATA_AXIS = "data"


def start(platform: Platform, job: Run | None = None) -> list[Any]:
    """Joins the other processes of the job and returns the devices of the platform.

    Call it before anything else uses JAX. Raises UserError if there are no such devices, or if the
    other processes cannot be joined.
    """
    if platform != "auto":
        # Otherwise JAX would fall back to the CPU, on which training takes years.
        jax.config.update("jax_platforms", platform)
    if job is not None:
        _check_job(job)
        if job.distributed:
            _join(job)
    try:
        return jax.devices()
    except RuntimeError as error:
        without_support = "list of known backends" in str(error)
        reason = "the installed JAX does not support it" if without_support else first_line(error)
        raise UserError(
            f"JAX finds no {'device' if platform == 'auto' else platform} on this machine"
            f" ({reason}): install JAX with support for it (for NVIDIA GPUs: pip install"
            " 'jax[cuda13]'), or choose --platform cpu."
        ) from error


def _check_job(job: Run) -> None:
    """Refuses options of the other processes that would be ignored: each would train alone."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("coordinator", "num_processes", "process_id")
        if getattr(job, name) is not None
    ]
    if given and not job.distributed:
        raise UserError(f"{', '.join(given)} can only be used with --distributed.")
    if job.coordinator is not None and ":" not in job.coordinator:
        raise UserError(f"--coordinator must be HOST:PORT, got {job.coordinator}.")


def _join(job: Run) -> None:
    try:
        jax.distributed.initialize(job.coordinator, job.num_processes, job.process_id)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"this process could not join the others ({first_line(error)}); outside a cluster that"
            " JAX detects, each process needs --coordinator HOST:PORT, --num-processes and"
            " --process-id."
        ) from error


def data_mesh(devices: list[Any]) -> Mesh:
    return Mesh(np.asarray(devices), (DATA_AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def split_batch(mesh: Mesh) -> NamedSharding:
    """Splits the leading axis over all devices."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
    """The global batch, made from the part that this process has."""
    sharding = split_batch(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, values)
        for name, values in batch.items()
    }


def check_batch(batch_size: int, accumulate: int, mesh: Mesh) -> None:
    for name, value in (("batch-size", batch_size), ("accumulate", accumulate)):
        if value < 1:
            raise UserError(f"--{name} must be at least 1, got {value}.")
    if batch_size % (accumulate * mesh.size):
        raise UserError(
            f"--batch-size {batch_size} does not divide into {accumulate} micro-batches"
            f" (--accumulate) on {mesh.size} devices; use a multiple of {accumulate * mesh.size}."
        )


def describe(devices: list[Any]) -> str:
    kinds = sorted({device.device_kind for device in devices})
    processes = jax.process_count()
    text = f"{len(devices)} x {', '.join(kinds)} ({devices[0].platform})"
    return text if processes == 1 else f"{text} in {processes} processes"


def as_process_0_knows(fact: bool) -> bool:
    """The fact of process 0, in all processes; it alone writes the metrics."""
    if jax.process_count() == 1:
        return fact
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(fact)))
