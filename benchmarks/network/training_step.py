"""A compiled training step of ResNet-50 with a given BatchNorm, and the memory that it needs."""

import functools
from collections.abc import Mapping, Sequence
from time import perf_counter, process_time
from typing import Any, Final, Literal

import flax.linen as nn
import jax
import numpy as np

import jax_bnar
from benchmarks.network.step_program import (
    CLASSES,
    initial_state,
    loss_function,
    resnet50,
    sgd_step,
)
from jax_bnar._benchmark.memory import planned_memory, residual_bytes
from jax_bnar.flax_layers import BatchNorm

DType = Literal["float32", "bfloat16"]
NORMS: Final[dict[str, Any]] = {
    "fused": BatchNorm,
    "fused, save=mask": functools.partial(BatchNorm, save="mask"),
    "flax, fuse": nn.BatchNorm,
    "flax": nn.BatchNorm,
}
# How far the first loss may be from the plain network's, relative to it: the networks are the same
# up to rounding.
_TOLERANCE: Final = {"float32": 1e-4, "bfloat16": 2e-2}


def check_losses(losses: Mapping[str, float], dtype: DType) -> None:
    """Raises ValueError if a network's first loss is not that of the last network in `losses`."""
    *_, expected = losses.values()
    for name, loss in losses.items():
        if not abs(loss - expected) <= _TOLERANCE[dtype] * abs(expected):
            raise ValueError(f"{name}: the first loss is {loss}, expected about {expected}.")


class TrainingStep:
    """A compiled training step and its state: forward, backward, SGD with Nesterov momentum.

    Attributes:
        seconds: the time for tracing and lowering ("lower_s") and for compiling ("compile_s"), and
            the processor time of all threads for both ("processor_s").
    """

    def __init__(
        self, norm: str, size: int, batch: int, dtype: DType, stage_sizes: Sequence[int]
    ) -> None:
        net = resnet50(NORMS[norm], dtype, stage_sizes)
        generator = np.random.default_rng(0)
        images = generator.standard_normal((batch, size, size, 3), np.float32)
        self._data = jax.device_put((images, generator.integers(0, CLASSES, batch)))
        loss_of = loss_function(net)
        if norm == "flax, fuse":
            loss_of = jax_bnar.fuse(loss_of)
        step = sgd_step(loss_of)
        self._state = initial_state(jax.jit(net.init)(jax.random.key(0), images))
        params, batch_stats, _ = self._state
        self._residuals = residual_bytes(
            lambda params: loss_of(params, batch_stats, self._data)[0], params
        )
        # Parts of the network have just been traced, and JAX would remember them.
        jax.clear_caches()
        start, processor = perf_counter(), process_time()
        lowered = jax.jit(step, donate_argnums=0).lower(self._state, self._data)
        traced = perf_counter()
        self._compiled = lowered.compile()
        self.seconds = {
            "lower_s": traced - start,
            "compile_s": perf_counter() - traced,
            "processor_s": process_time() - processor,
        }

    def start(self) -> jax.Array:
        """Starts a step, which may still run on the device when this returns its loss."""
        self._state, loss = self._compiled(self._state, self._data)
        return loss

    def run(self) -> float:
        """Runs a step, waits for all of it and returns its loss."""
        loss = self.start()
        jax.block_until_ready(self._state)
        return float(loss)

    def program(self) -> str:
        """The compiled HLO."""
        return self._compiled.as_text() or ""

    def memory(self) -> dict[str, int]:
        """What XLA has planned for the step, and what forward keeps for backward."""
        memory = planned_memory(self._compiled)
        assert memory is not None
        return {
            "peak_bytes": memory.peak,
            "temporary_bytes": memory.temporary,
            "saved_residual_bytes": self._residuals,
        }
