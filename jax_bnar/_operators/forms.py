"""What the public operators share: they check arguments, align shardings and call a form.

The forms are those for training, for inference and for statistics.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp

from jax_bnar._autodiff.inference import inference
from jax_bnar._autodiff.statistics import batch_statistics
from jax_bnar._autodiff.synchronised import synchronised
from jax_bnar._autodiff.training import training
from jax_bnar._base.activations import Activation
from jax_bnar._base.config import Config, Save
from jax_bnar._base.implementation import Implementation, resolve_implementation
from jax_bnar._base.inputs import Affine, Statistics, numbered
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._operators.named_axes import check_named_axes, names_in_scope
from jax_bnar._operators.selected import SelectedStatistics, selected_statistics
from jax_bnar._operators.validation import (
    Operands,
    check_epsilon,
    check_operands,
    check_out_dtype,
    check_save,
    check_statistic,
    check_where,
)
from jax_bnar._sharding.alignment import align_operands


def checked(
    function: str,
    x: tuple[Any, ...],
    z: Any,
    affine: tuple[Affine, ...],
    activation: Activation,
    *,
    epsilon: float,
    axis: int,
    num_groups: int = 1,
    save: Save = "y",
    implementation: Implementation,
    negative_slope: float = 0.0,
    out_dtype: Any = None,
    may_be_empty: bool = False,
) -> tuple[Operands, Config]:
    """The operands and the static parameters of a form, both checked."""
    operands = check_operands(
        *(function, x, z, affine),
        axis=axis,
        num_groups=num_groups,
        out_dtype=out_dtype,
        may_be_empty=may_be_empty,
    )
    config = Config(
        epsilon=check_epsilon(function, epsilon),
        activation=activation,
        save=check_save(function, save),
        implementation=resolve_implementation(function, implementation),
        has_z=operands.z is not None,
        layout=operands.layout,
        inputs=len(operands.x),
        negative_slope=negative_slope,
        out_dtype=check_out_dtype(function, out_dtype, operands.x[0].dtype, activation),
    )
    return operands, config


def of_channels(statistics: Any, layout: ChannelLayout) -> Any:
    """The arrays, of shape (num_groups, C), as the user gets them: (C,) if there is one group."""
    if layout.num_groups > 1:
        return statistics
    return jax.tree.map(operator.itemgetter(0), statistics)


def train(
    function: str,
    x: tuple[Any, ...],
    z: Any,
    affine: tuple[Affine, ...],
    activation: Activation,
    *,
    epsilon: float,
    axis: int,
    axis_name: Any,
    axis_index_groups: Any,
    num_groups: int,
    save: Save,
    implementation: Implementation,
    negative_slope: float = 0.0,
    out_dtype: Any = None,
) -> list[jax.Array]:
    """y, followed by the mean and var of each input."""
    names, groups = check_named_axes(function, axis_name, axis_index_groups)
    (x, z, affine, layout), config = checked(
        *(function, x, z, affine, activation),
        epsilon=epsilon,
        axis=axis,
        num_groups=num_groups,
        save=save,
        implementation=implementation,
        negative_slope=negative_slope,
        out_dtype=out_dtype,
    )
    with jax.named_scope(function):
        (x, z), affine = align_operands(layout, (x, z), affine)
        if names:
            with names_in_scope(function, axis_name):
                y, statistics = synchronised(x, z, affine, config, names, groups)
        else:
            y, statistics, _ = training(x, z, affine, config)
    return jax.tree.leaves((y, of_channels(statistics, layout)))


def infer(
    function: str,
    x: tuple[Any, ...],
    z: Any,
    affine: tuple[Affine, ...],
    statistics: tuple[Statistics, ...],
    activation: Activation,
    *,
    epsilon: float,
    axis: int,
    implementation: Implementation,
    negative_slope: float = 0.0,
    out_dtype: Any = None,
) -> jax.Array:
    """y from given statistics."""
    (x, z, affine, layout), config = checked(
        *(function, x, z, affine, activation),
        epsilon=epsilon,
        axis=axis,
        implementation=implementation,
        negative_slope=negative_slope,
        out_dtype=out_dtype,
        may_be_empty=True,
    )
    inputs = config.inputs
    with jax.named_scope(function):
        x_name = numbered("x", inputs)[0]
        names = map(Statistics, numbered("mean", inputs), numbered("var", inputs))
        given = tuple(
            Statistics(
                *(
                    check_statistic(function, name, vector, x[0], layout.axis, x_name)
                    for name, vector in zip(names_of_input, of_input, strict=True)
                )
            )
            for names_of_input, of_input in zip(names, statistics, strict=True)
        )
        (x, z), (affine, given) = align_operands(layout, (x, z), (affine, given))
        return evaluate(x, z, affine, given, config)


def evaluate(
    x: tuple[jax.Array, ...],
    z: jax.Array | None,
    affine: tuple[Affine, ...],
    statistics: tuple[Statistics, ...],
    config: Config,
) -> jax.Array:
    """y of checked operands, whose x may be empty: no kernel runs then."""
    if x[0].size == 0:
        return jnp.zeros_like(x[0], config.out_dtype)
    y, _ = inference(x, z, affine, statistics, config)
    return y


def take_statistics(
    function: str,
    x: Any,
    *,
    axis: int,
    axis_name: Any,
    axis_index_groups: Any,
    num_groups: int,
    implementation: Implementation,
    where: Any = None,
) -> Statistics | SelectedStatistics:
    """The mean and var of x, and the number of elements behind each if `where` selects them."""
    names, groups = check_named_axes(function, axis_name, axis_index_groups)
    operands = check_operands(
        function, (x,), None, (Affine(None, None),), axis=axis, num_groups=num_groups
    )
    (x,), _, _, layout = operands
    implementation = resolve_implementation(function, implementation)
    if where is not None:
        where = check_where(function, "where", where, x)
    with jax.named_scope(function), names_in_scope(function, axis_name):
        if where is None:
            statistics = batch_statistics(x, layout, implementation, names, groups)
        else:
            statistics = selected_statistics(x, where, layout, implementation, names, groups)
    return of_channels(statistics, layout)
