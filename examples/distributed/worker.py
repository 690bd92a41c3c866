"""One process of a distributed training run: trains a small ResNet on its part of each batch.

    python examples/distributed/worker.py --help

JAX does the distribution: after `jax.distributed.initialize` the devices of all processes form one
mesh, arrays are sharded over it by batch, and the step is the same that a single process compiles.
The network needs no changes; the layers' statistics are those of the whole batch.

It needs optax, scikit-learn and tyro, which the extra `demo` of jax_bnar brings.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from jax_bnar.flax_layers import ResNet

CLASSES: Final = 10


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Run one process of a distributed training run."""

    num_processes: int | None = None
    """Processes in the run. If omitted, JAX asks the cluster (Slurm, Open MPI, Kubernetes, TPU)."""
    process_id: int | None = None
    """Index of this process."""
    coordinator: str | None = None
    """Address and port of process 0, such as 10.0.0.1:1234."""
    steps: int = 20
    """Training steps."""
    batch_size: int = 64
    """Images per step, over all processes."""
    output: Annotated[pathlib.Path | None, tyro.conf.arg(help_behavior_hint="(default: none)")] = (
        None
    )
    """JSON file for the losses, written by process 0."""


def join(arguments: Arguments) -> None:
    """Makes this process part of the run; call it before anything asks for a device."""
    if arguments.num_processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(arguments.coordinator, arguments.num_processes, arguments.process_id)


def batches(steps: int, batch_size: int) -> Any:
    """The same global batches in every process."""
    digits: Any = load_digits()
    images = (digits.images[..., None].astype(np.float32) - 4.9) / 6
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(0)
    for _ in range(steps):
        chosen = order.choice(len(labels), batch_size, replace=False)
        yield images[chosen], labels[chosen]


def training_step(net: ResNet, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """The training step, which is the same in a single process."""

    @jax.jit
    def step(variables: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            logits, updated = net.apply(
                {**variables, "params": params}, images, mutable=["batch_stats"]
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), updated

        (value, updated), gradients = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, state = optimizer.update(gradients, state)
        params = optax.apply_updates(variables["params"], updates)
        return {"params": params, **updated}, state, value

    return step


def train(steps: int, batch_size: int) -> list[float]:
    """Trains the network and returns the loss of each step."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    by_batch = NamedSharding(mesh, PartitionSpec("data"))
    net = ResNet(stage_sizes=(1,), num_classes=CLASSES, num_filters=8, stem="small")
    optimizer = optax.sgd(0.1, momentum=0.9)
    # With the same seed, every process has the same variables.
    variables = jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
    state = optimizer.init(variables["params"])
    variables, state = jax.device_put((variables, state), NamedSharding(mesh, PartitionSpec()))
    step = training_step(net, optimizer)
    losses = []
    for images, labels in batches(steps, batch_size):
        # In practice each process would read only its own rows; here each has the whole batch.
        batch = (
            jax.make_array_from_callback(array.shape, by_batch, array.__getitem__)
            for array in (images, labels)
        )
        variables, state, loss = step(variables, state, *batch)
        losses.append(float(loss))
    return losses


def main(arguments: Arguments) -> None:
    if arguments.steps < 1:
        raise SystemExit(f"error: --steps must be at least 1, got {arguments.steps}.")
    join(arguments)
    losses = train(arguments.steps, arguments.batch_size)
    if jax.process_index() == 0:
        print(
            f"{jax.process_count()} processes, {jax.device_count()} devices:"
            f" loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        )
        if arguments.output is not None:
            arguments.output.write_text(
                json.dumps({"processes": jax.process_count(), "losses": losses})
            )


if __name__ == "__main__":
    main(tyro.cli(Arguments))
