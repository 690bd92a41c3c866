"""Scale and offset of Haiku's BatchNorm, which may have any shape that broadcasts to its inputs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._layers.activation import LayerActivation
from jax_bnar._layers.prepared import PreparedCall


class Affine(NamedTuple):
    """Scale and offset.

    Attributes:
        scale: one value per feature, in one axis, if `is_per_feature`; otherwise as given.
        offset: as scale.
        is_per_feature: whether the operators can apply them.
    """

    scale: jax.Array | None
    offset: jax.Array | None
    is_per_feature: bool

    @classmethod
    def of(
        cls, shape: tuple[int, ...], features: tuple[int, ...], scale: Any, offset: Any
    ) -> "Affine":
        """The arrays for inputs of this shape, with these feature axes.

        Raises:
            ValueError: an array does not broadcast to the inputs.
        """
        per_feature = tuple(size if i in features else 1 for i, size in enumerate(shape))
        arrays = [None if array is None else jnp.asarray(array) for array in (scale, offset)]
        for name, array in zip(("scale", "offset"), arrays, strict=True):
            if array is not None and not _broadcasts(array.shape, shape):
                raise ValueError(
                    f"BatchNorm: {name} must broadcast to inputs, whose shape is {shape}, got shape"
                    f" {array.shape}."
                )
        if all(array is None or _broadcasts(array.shape, per_feature) for array in arrays):
            flat = (
                None if array is None else jnp.broadcast_to(array, per_feature).reshape(-1)
                for array in arrays
            )
            return cls(*flat, is_per_feature=True)
        return cls(*arrays, is_per_feature=False)

    @property
    def dtypes(self) -> list[np.dtype]:
        return [array.dtype for array in (self.scale, self.offset) if array is not None]

    @property
    def vectors(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Scale and offset for the operator."""
        return (self.scale, self.offset) if self.is_per_feature else (None, None)


class PreparedAffine(NamedTuple):
    """A prepared call with what plain JAX does after it if the operator cannot apply the affine.

    Attributes:
        call: the call, without scale, offset and activation if plain JAX applies them.
        affine: scale and offset.
        activation: the activation of the layer.
    """

    call: PreparedCall
    affine: Affine
    activation: LayerActivation

    def run(self, residual: jax.Array | None = None) -> jax.Array:
        """act(norm(x) + residual)."""
        if self.affine.is_per_feature:
            return self.call.run(residual)
        y = self.call.run()
        scale, offset, _ = self.affine
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            y = y if scale is None else y * scale
            y = y if offset is None else y + offset
            y = y if residual is None else y + residual
        return self.activation.unfused(y.astype(self.call.result))

    def join(self, other: "PreparedAffine") -> jax.Array:
        """act(norm(x) + other_norm(other_x)), as one call of the operator if that is possible.

        Raises:
            ValueError: the inputs of the two norms differ in shape.
        """
        if self.affine.is_per_feature and other.affine.is_per_feature:
            return self.call.join(other.call)
        self.call.check_shape_of(other.call)
        return self.run(other.run())


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
