"""Builds the network with either BatchNorm; checkpoints fit both, as the variables are the same."""

from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp

import jax_bnar
from jax_bnar.flax_layers import BatchNorm, ResNet
from resnet50.config import Model, Norm
from resnet50.errors import UserError

# With flax.linen.BatchNorm the blocks do the addition and the ReLU separately, as is usual today.
NORMS: Final[dict[Norm, Any]] = {"fused": BatchNorm, "flax": nn.BatchNorm}
DTYPES: Final = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


def describe_norm(norm: Norm) -> str:
    """The BatchNorm in words, which say so if the fused one has no kernels here."""
    if norm == "fused" and not _kernels_in_use():
        return "fused BatchNorm in pure JAX, without kernels"
    return f"{norm} BatchNorm"


def _kernels_in_use() -> bool:
    """Whether the text of a program for the default platform calls the kernels."""
    x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    lowered = jax.jit(lambda x: jax_bnar.bn_relu(x, None, None).y).lower(x)
    return "@jax_bnar_forward" in lowered.as_text()


def build(model: Model, classes: int) -> ResNet:
    if not model.stage_sizes or min(model.stage_sizes) < 1 or model.num_filters < 1:
        raise UserError(
            "--stage-sizes and --num-filters must be positive, got"
            f" {' '.join(map(str, model.stage_sizes)) or 'none'} and {model.num_filters}."
        )
    return ResNet(
        stage_sizes=model.stage_sizes,
        num_classes=classes,
        num_filters=model.num_filters,
        dtype=DTYPES[model.dtype],
        stem=model.stem,
        padding=model.padding,
        norm=NORMS[model.norm],
        momentum=model.bn_momentum,
    )
