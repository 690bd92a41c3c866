"""The arguments of `jax_bnar.ops.onednn`: their checks, and what follows from them."""

from typing import Any, Final

import jax

from jax_bnar._base.config import Config
from jax_bnar._base.gates import Gate
from jax_bnar._base.implementation import Implementation, resolve_implementation
from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._operators.validation import (
    check_epsilon,
    check_flag,
    check_like,
    check_statistic,
    check_vector,
    check_x,
)
from jax_bnar._sharding.alignment import align_operands
from jax_bnar.ops._arguments import check_data_format, check_mask

AXES: Final = {"NXC": -1, "NCX": 1}
BACKWARD: Final = "batch_norm_training_backward"


def forward_operands(
    function: str,
    src: Any,
    mean: Any,
    variance: Any,
    gamma: Any,
    beta: Any,
    src_1: Any,
    epsilon: Any,
    data_format: Any,
    relu: bool,
    add_relu: bool,
    implementation: Implementation,
) -> tuple[tuple[Any, ...], Config]:
    """(src, src_1, affine, statistics), checked and aligned, and the static config."""
    src = check_x(function, src, "src")
    layout = check_data_format(function, data_format, AXES, src.shape)
    relu, add_relu = check_relu_flags(function, relu, add_relu)
    if add_relu and src_1 is None:
        raise TypeError(f"{function}: fuse_norm_add_relu adds src_1, which must be an array.")
    if src_1 is not None and not add_relu:
        raise ValueError(
            f"{function}: src_1 is added with fuse_norm_add_relu=True only; set that flag, or omit"
            " src_1."
        )
    z = None if src_1 is None else check_like(function, "src_1", src_1, src, "src")
    vectors = [
        check_vector(function, name, vector, src, layout.axis, "src")
        for name, vector in (("gamma", gamma), ("beta", beta))
    ]
    statistics = [
        check_statistic(function, name, vector, src, layout.axis, "src")
        for name, vector in (("mean", mean), ("variance", variance))
    ]
    config = Config(
        epsilon=check_epsilon(function, epsilon),
        activation="relu" if relu or add_relu else "none",
        save="mask",
        implementation=resolve_implementation(function, implementation),
        has_z=add_relu,
        layout=layout,
    )
    (src, z), aligned = align_operands(
        layout, (src, z), ((Affine(*vectors),), (Statistics(*statistics),))
    )
    return ((src,), z, *aligned), config


def check_relu_flags(function: str, relu: Any, add_relu: Any) -> tuple[bool, bool]:
    relu = check_flag(function, "fuse_norm_relu", relu)
    add_relu = check_flag(function, "fuse_norm_add_relu", add_relu)
    if relu and add_relu:
        raise ValueError(
            f"{function}: fuse_norm_relu and fuse_norm_add_relu exclude each other; both apply a"
            " ReLU, the second one after it has added src_1."
        )
    return relu, add_relu


def wants_diff_gamma_and_beta(gamma: Any, asked_for: bool | None) -> bool:
    if asked_for is None:
        return gamma is not None
    if gamma is not None and not asked_for:
        raise ValueError(
            f"{BACKWARD}: with diff_gamma_and_beta=False oneDNN ignores gamma, and diff_src lacks"
            " its factor; pass gamma=None for that, or leave diff_gamma_and_beta out."
        )
    return asked_for


def gate_and_saved(
    workspace: Any, dst: Any, relu: bool, layout: ChannelLayout, src: jax.Array
) -> tuple[Gate, jax.Array | None]:
    """The gate, which says where backward finds the ReLU's sign, and the array with the sign."""
    if not relu:
        if workspace is not None or dst is not None:
            raise ValueError(
                f"{BACKWARD}: workspace and dst are read with fuse_norm_relu or"
                " fuse_norm_add_relu only; set the flag of the forward operator, or omit them."
            )
        return "none", None
    if dst is not None:
        dst = check_like(BACKWARD, "dst", dst, src, "src")
    if workspace is not None:
        return "mask", check_mask(BACKWARD, "workspace", workspace, layout, src.shape)
    if dst is None:
        raise TypeError(
            f"{BACKWARD}: with fuse_norm_relu or fuse_norm_add_relu one of workspace and dst must"
            " be an array."
        )
    return "y", check_like(BACKWARD, "dst", dst, src, "src")
