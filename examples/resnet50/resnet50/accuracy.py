"""Top-1 and top-5 accuracy and loss over every held-out picture, each counted once."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from resnet50 import devices
from resnet50.data.pipeline import Batch
from resnet50.inference import Logits


@dataclasses.dataclass(frozen=True)
class Result:
    top1: float
    top5: float
    loss: float
    images: int

    def text(self, classes: int) -> str:
        """The result on one line, without top-5 if there are no more than five classes."""
        top5 = f", top-5 {self.top5:.2%}" if classes > 5 else ""
        return (
            f"top-1 {self.top1:.2%}{top5}, loss {self.loss:.4f} on {self.images} held-out pictures"
        )


def compiled(logits: Logits, mesh: Mesh) -> Callable[[Any, Any], dict[str, jax.Array]]:
    """A function from (variables, batch) to sums over the pictures whose weight is not 0."""

    def sums(variables: Any, batch: Any) -> dict[str, jax.Array]:
        scores = logits(variables, batch["image"])
        labels, counted = batch["label"], batch["weight"] > 0
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        ahead = _ahead(scores, labels)
        return {
            # weight * loss would not do: the loss of a picture with weight 0 need not be finite.
            "loss": jnp.where(counted, losses, 0).sum(),
            "top1": (counted & (ahead < 1)).sum(),
            "top5": (counted & (ahead < 5)).sum(),
            "images": counted.sum(),
        }

    return jax.jit(sums, out_shardings=devices.replicated(mesh))


def _ahead(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """How many classes rank before the label.

    Of equal scores, that with the lower index ranks first, as in argmax. A NaN is never correct:
    all classes rank before a label whose score is NaN.
    """
    own = jnp.take_along_axis(scores, labels[:, None], axis=1)
    behind = jnp.arange(scores.shape[1])[None, :] >= labels[:, None]
    return (~((scores < own) | ((scores == own) & behind))).sum(axis=1)


def evaluate(
    sums: Callable[[Any, Any], dict[str, jax.Array]],
    networks: dict[str, Any],
    batches: Iterable[Batch],
    mesh: Mesh,
    on_batch: Callable[[Batch], None],
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Result] | None:
    """Evaluates each of several sets of variables over all batches of this process.

    Returns:
        A result for each name, or None if `stopped` returned True before the last batch was done.
    """
    totals = {name: {"loss": 0.0, "top1": 0, "top5": 0, "images": 0} for name in networks}
    pending: dict[str, dict[str, jax.Array]] = {}
    for batch in batches:
        if stopped():
            return None
        on_batch(batch)
        given = {name: batch[name] for name in ("image", "label", "weight")}
        given = devices.put_batch(given, mesh)
        current = {name: sums(variables, given) for name, variables in networks.items()}
        # Keep one batch in flight: the next is decoded meanwhile, but batches do not pile up.
        _add(totals, pending)
        pending = current
    _add(totals, pending)
    return {
        name: Result(
            top1=total["top1"] / max(1, total["images"]),
            top5=total["top5"] / max(1, total["images"]),
            loss=total["loss"] / max(1, total["images"]),
            images=int(total["images"]),
        )
        for name, total in totals.items()
    }


def _add(totals: dict[str, dict[str, float]], parts: dict[str, dict[str, jax.Array]]) -> None:
    for name, part in jax.device_get(parts).items():
        for quantity, value in part.items():
            totals[name][quantity] += value.item()
