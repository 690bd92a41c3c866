"""The forms of all operators, for training, inference and statistics: they check and align."""

import operator
from typing import Any

import jax

from jax_bnar._autodiff.inference import inference
from jax_bnar._autodiff.statistics import batch_statistics
from jax_bnar._autodiff.synchronised import synchronised
from jax_bnar._autodiff.training import training
from jax_bnar._base.config import Activation, Config, Save
from jax_bnar._base.implementation import Implementation, resolve_implementation
from jax_bnar._base.inputs import Affine, Statistics, numbered
from jax_bnar._operators.validation import (
    check_epsilon,
    check_named_axes,
    check_operands,
    check_save,
    check_statistic,
    names_in_scope,
)
from jax_bnar._sharding.alignment import align_operands


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
) -> list[jax.Array]:
    """y, followed by the mean and var of each input."""
    names, groups = check_named_axes(function, axis_name, axis_index_groups)
    x, z, affine, layout = check_operands(function, x, z, affine, axis=axis, num_groups=num_groups)
    config = Config(
        epsilon=check_epsilon(function, epsilon),
        activation=activation,
        save=check_save(function, save),
        implementation=resolve_implementation(function, implementation),
        has_z=z is not None,
        layout=layout,
        inputs=len(x),
    )
    with jax.named_scope(function):
        (x, z), affine = align_operands(layout, (x, z), affine)
        if names:
            with names_in_scope(function, axis_name):
                y, statistics = synchronised(x, z, affine, config, names, groups)
        else:
            y, statistics, _ = training(x, z, affine, config)
    if layout.num_groups == 1:
        statistics = jax.tree.map(operator.itemgetter(0), statistics)
    return jax.tree.leaves((y, statistics))


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
) -> jax.Array:
    """y from given statistics."""
    x, z, affine, layout = check_operands(function, x, z, affine, axis=axis)
    inputs = len(x)
    config = Config(
        epsilon=check_epsilon(function, epsilon),
        activation=activation,
        save="y",
        implementation=resolve_implementation(function, implementation),
        has_z=z is not None,
        layout=layout,
        inputs=inputs,
    )
    with jax.named_scope(function):
        x_name = numbered("x", inputs)[0]
        names = map(Statistics, numbered("mean", inputs), numbered("var", inputs))
        checked = tuple(
            Statistics(
                *(
                    check_statistic(function, name, vector, x[0], layout.axis, x_name)
                    for name, vector in zip(names_of_input, of_input, strict=True)
                )
            )
            for names_of_input, of_input in zip(names, statistics, strict=True)
        )
        (x, z), (affine, checked) = align_operands(layout, (x, z), (affine, checked))
        y, _ = inference(x, z, affine, checked, config)
    return y


def describe(
    function: str,
    x: Any,
    *,
    axis: int,
    axis_name: Any,
    axis_index_groups: Any,
    num_groups: int,
    implementation: Implementation,
) -> Statistics:
    """The mean and var of x."""
    names, groups = check_named_axes(function, axis_name, axis_index_groups)
    operands = check_operands(
        function, (x,), None, (Affine(None, None),), axis=axis, num_groups=num_groups
    )
    (x,), _, _, layout = operands
    implementation = resolve_implementation(function, implementation)
    with jax.named_scope(function), names_in_scope(function, axis_name):
        statistics = batch_statistics(x, layout, implementation, names, groups)
    if layout.num_groups == 1:
        statistics = Statistics(*(own[0] for own in statistics))
    return statistics
