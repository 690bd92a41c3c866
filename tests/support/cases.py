"""Random operands for the tests, and one signature for all operators."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from oracle import Array, PerInput, each_input

import jax_bnar
from jax_bnar._base.implementation import Implementation

# "ffi" fails if the kernels were not built, because tests that skip their subject prove nothing.
both_implementations = pytest.mark.parametrize("implementation", ["ffi", "xla"])
all_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])

Form = Literal["bn_add_relu", "bn_relu", "batch_norm", "dual_bn_add_relu"]
FORMS: Final[tuple[Form, ...]] = get_args(Form)
Operator = Callable[..., jax_bnar.BatchNormResult]
# A case of which everything is float64.
FLOAT64: Final[dict[str, Any]] = dict.fromkeys(("dtype", "scale_dtype", "bias_dtype"), "float64")
# With a residual, or with a second batch norm in its place.
one_or_two_inputs = pytest.mark.parametrize("form", ["bn_add_relu", "dual_bn_add_relu"])


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, except for the values, which follow from `seed` and `ratio` = |mean|/std.

    A second input has the dtypes of scale and bias the other way round, so that each of the four
    may be absent alone. `out_dtype` is the dtype of y and z if it is not that of x.
    """

    shape: tuple[int, ...]
    axis: int = -1
    dtype: str = "float32"
    form: Form = "bn_add_relu"
    scale_dtype: str | None = "float32"
    bias_dtype: str | None = "float32"
    num_groups: int = 1
    save: str = "y"
    epsilon: float = 1e-5
    ratio: float = 1.0
    seed: int = 0
    out_dtype: str | None = None

    @property
    def y_dtype(self) -> str:
        return self.out_dtype or self.dtype

    @property
    def inputs(self) -> int:
        """How many arrays are normalised and added up."""
        return inputs_of(self.form)

    @property
    def relu(self) -> bool:
        return self.form != "batch_norm"

    @property
    def channels(self) -> int:
        return self.shape[self.axis]

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        return (self.channels,) if self.num_groups == 1 else (self.num_groups, self.channels)

    @property
    def statistics_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def inference_keywords(self) -> dict[str, Any]:
        widened = {} if self.out_dtype is None else {"out_dtype": self.out_dtype}
        return {"epsilon": self.epsilon, "axis": self.axis, **widened}

    @property
    def keywords(self) -> dict[str, Any]:
        return {**self.inference_keywords, "num_groups": self.num_groups, "save": self.save}


class Operands(NamedTuple):
    """NumPy arrays, or None where the operator has no such operand.

    Here and below, what belongs to an input is a tuple, with one array for each input, if the
    operator has several.
    """

    x: Any
    z: Any
    scale: Any
    bias: Any

    def with_x(self, number: int, x: Array) -> "Operands":
        """The same with another x, that of the input of this number, from 0 on."""
        if not isinstance(self.x, tuple):
            assert number == 0
            return self._replace(x=x)
        return self._replace(x=(*self.x[:number], x, *self.x[number + 1 :]))


class Cotangents(NamedTuple):
    y: Array
    mean: PerInput
    var: PerInput


class Outcome(NamedTuple):
    """Results and gradients as NumPy arrays, or None where there is no such operand."""

    y: Any
    mean: Any
    var: Any
    dx: Any
    dz: Any
    dscale: Any
    dbias: Any


def as_dtype(values: Array, dtype: str) -> Array:
    return values.astype(jnp.dtype(dtype))


def inputs_of(form: Form) -> int:
    return 2 if form == "dual_bn_add_relu" else 1


def operation_of(form: Form, name: str) -> str:
    """The form's own operation of this name, such as "forward" or "dual_forward"."""
    return name if inputs_of(form) == 1 else f"dual_{name}"


def product_of_statistics(mean: PerInput, var: PerInput) -> Any:
    """The sum of mean * var over all inputs: a term of a loss that depends on each of them."""
    products = [(own_mean * own_var).sum() for own_mean, own_var in each_input(mean, var)]
    return functools.reduce(jnp.add, products)


def names_of(form: Form) -> tuple[str, ...]:
    """The operands in the order of the operator, two tensors first; some forms do not read z."""
    if inputs_of(form) == 1:
        return ("x", "z", "scale", "bias")
    return ("x1", "x2", "scale1", "bias1", "scale2", "bias2")


def by_input(form: Form, *given: Any) -> Operands:
    """Operands in the order of `names_of`, as those of `call`."""
    if inputs_of(form) == 1:
        return Operands(*given)
    x1, x2, scale1, bias1, scale2, bias2 = given
    return Operands((x1, x2), None, (scale1, scale2), (bias1, bias2))


def in_order(given: Operands) -> tuple[Any, ...]:
    """The inverse of `by_input`."""
    if not isinstance(given.x, tuple):
        return tuple(given)
    each = each_input(given.x, given.scale, given.bias)
    return (*given.x, *itertools.chain(*(own[1:] for own in each)))


def operands(case: Case) -> Operands:
    each = [_operands_of_input(case, number) for number in range(case.inputs)]
    if case.inputs == 1:
        return each[0]
    x, _, scale, bias = zip(*each, strict=True)
    return Operands(x, None, scale, bias)


def _operands_of_input(case: Case, number: int) -> Operands:
    random = np.random.default_rng([case.seed, number] if number else case.seed)
    along_channels = [1] * len(case.shape)
    along_channels[case.axis] = case.channels
    std = 2.0 ** random.integers(-3, 4, along_channels)
    mean = std * case.ratio * random.choice([-1.0, 1.0], along_channels)
    x = mean + std * random.standard_normal(case.shape)
    z = random.standard_normal(case.shape)
    scale = random.uniform(-2, 2, case.channels)
    bias = random.uniform(-1, 1, case.channels)
    dtypes = (case.scale_dtype, case.bias_dtype)
    scale_dtype, bias_dtype = dtypes[::-1] if number % 2 else dtypes
    return Operands(
        as_dtype(x, case.dtype),
        as_dtype(z, case.y_dtype) if case.form == "bn_add_relu" else None,
        None if scale_dtype is None else as_dtype(scale, scale_dtype),
        None if bias_dtype is None else as_dtype(bias, bias_dtype),
    )


def cotangents(case: Case) -> Cotangents:
    random = np.random.default_rng(case.seed + 1)
    each = [
        as_dtype(random.standard_normal((2, *case.statistics_shape)), case.statistics_dtype)
        for _ in range(case.inputs)
    ]
    mean, var = each[0] if case.inputs == 1 else zip(*each, strict=True)
    return Cotangents(as_dtype(random.standard_normal(case.shape), case.y_dtype), mean, var)


def call(
    form: Form, x: PerInput, z: Any, scale: PerInput, bias: PerInput, **keywords: Any
) -> jax_bnar.BatchNormResult:
    """Any operator as a function of (x, z, scale, bias); z is ignored if it has none."""
    if form != "dual_bn_add_relu":
        tensors = (x, z) if form == "bn_add_relu" else (x,)
        return getattr(jax_bnar, form)(*tensors, scale, bias, **keywords)
    vectors = itertools.chain(*(own[1:] for own in each_input(x, scale, bias)))
    y, *statistics = jax_bnar.dual_bn_add_relu(*x, *vectors, **keywords)
    mean: Any = tuple(statistics[::2])
    var: Any = tuple(statistics[1::2])
    return jax_bnar.BatchNormResult(y, mean, var)


def call_on_a_product(case: Case) -> Operator:
    """The operator of a case on an x that is computed first, without a change of its values."""
    function = functools.partial(call, case.form, **case.keywords)
    return lambda x, *others: function(x * jnp.ones_like(x), *others)


def call_inference(
    form: Form,
    x: PerInput,
    z: Any,
    scale: PerInput,
    bias: PerInput,
    mean: PerInput,
    var: PerInput,
    **keywords: Any,
) -> jax.Array:
    """Any inference form, like `call`."""
    function = getattr(jax_bnar, f"{form}_inference")
    if form != "dual_bn_add_relu":
        tensors = (x, z) if form == "bn_add_relu" else (x,)
        return function(*tensors, scale, bias, mean, var, **keywords)
    each = list(each_input(x, scale, bias, mean, var))
    affine = itertools.chain(*(own[1:3] for own in each))
    statistics = itertools.chain(*(own[3:] for own in each))
    return function(*x, *affine, *statistics, **keywords)


@functools.cache
def operator(form: Form, **keywords: Any) -> Operator:
    """`call`, compiled."""
    return jax.jit(functools.partial(call, form, **keywords))


def unfused(
    x: PerInput,
    z: Any,
    scale: PerInput,
    bias: PerInput,
    *,
    epsilon: float = 1e-5,
    axis: int = -1,
    relu: bool = True,
) -> jax_bnar.BatchNormResult:
    """What users write without jax_bnar: float32 statistics, then one rounding per operation.

    It is `flax.linen.BatchNorm(dtype=x.dtype, use_fast_variance=False)` of each input, followed by
    add and relu.
    """
    results = [_unfused(*own, epsilon=epsilon, axis=axis) for own in each_input(x, scale, bias)]
    ys, mean, var = zip(*results, strict=True)
    y = functools.reduce(jnp.add, ys if z is None else (*ys, z))
    y = jax.nn.relu(y) if relu else y
    if not isinstance(x, tuple):
        (mean,), (var,) = mean, var
    return jax_bnar.BatchNormResult(y, mean, var)  # type: ignore[arg-type]


def _unfused(
    x: Any, scale: Any, bias: Any, *, epsilon: float, axis: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    axis %= x.ndim
    reduced = tuple(a for a in range(x.ndim) if a != axis)
    wide = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    mean = wide.mean(reduced, keepdims=True)
    centred = wide - jnp.broadcast_to(mean, x.shape)
    var = jnp.square(centred).mean(reduced, keepdims=True)
    multiplier = jax.lax.rsqrt(var + jnp.asarray(epsilon, var.dtype))
    along_channels = mean.shape
    if scale is not None:
        multiplier = multiplier * scale.astype(wide.dtype).reshape(along_channels)
    y = centred * jnp.broadcast_to(multiplier, x.shape)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(wide.dtype).reshape(along_channels), x.shape)
    return y.astype(x.dtype), mean.ravel(), var.ravel()


def run(case: Case, implementation: Implementation, given: Operands, dout: Cotangents) -> Outcome:
    """Results and all gradients, from one compiled call."""
    function = operator(case.form, implementation=implementation, **case.keywords)
    return outcome(function, given, dout)


@functools.cache
def with_gradients(function: Operator) -> Callable[[Operands, Cotangents], Any]:
    def both(given: Operands, dout: Cotangents) -> Any:
        results, vjp = jax.vjp(lambda given: tuple(function(*given)), given)
        return results, vjp(tuple(dout))[0]

    return jax.jit(both)


def outcome(function: Operator, given: Operands, dout: Cotangents) -> Outcome:
    both = with_gradients(function)
    (y, mean, var), gradients = jax.tree.map(np.asarray, both(given, dout))
    return Outcome(y, mean, var, *gradients)


# CUDA's kernels do not, on a GPU or in the host emulation (tests/kernels/test_emulated_cuda.py).
_KERNELS_WIDEN = jax.default_backend() == "cpu" and "JAX_BNAR_TEST_NATIVE_MODULE" not in os.environ


@st.composite
def cases(draw: st.DrawFn, *, may_widen: bool = False) -> Case:
    """Cases with any rank, axis, dtype and flags, and at most a few thousand elements.

    `may_widen` allows a y of float32 for an x of 16 bits, where the kernels do.
    """
    channels = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 17, 33, 65, 251]))
    others = draw(st.lists(st.sampled_from([1, 2, 3, 4, 7]), min_size=1, max_size=4))
    while np.prod(others) * channels > 6000:
        others.pop()
    axis = draw(st.integers(0, len(others)))
    num_groups = draw(st.sampled_from([1, 1, 2, 3])) if axis else 1
    if axis:
        others[0] *= num_groups
    rank = len(others) + 1
    parameter_dtypes = st.sampled_from(["float32", "bfloat16", "float16", "float64", None])
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16", "float64"]))
    form: Form = draw(st.sampled_from(FORMS))
    widens = may_widen and _KERNELS_WIDEN and dtype.endswith("16") and inputs_of(form) == 1
    return Case(
        shape=(*others[:axis], channels, *others[axis:]),
        axis=draw(st.sampled_from([axis, axis - rank])),
        dtype=dtype,
        form=form,
        scale_dtype=draw(parameter_dtypes),
        bias_dtype=draw(parameter_dtypes),
        num_groups=num_groups,
        save=draw(st.sampled_from(["y", "mask"])),
        epsilon=draw(st.sampled_from([1e-5, 1e-3, 1 / 16])),
        ratio=draw(st.sampled_from([0.0, 1.0, 30.0])),
        seed=draw(st.integers(0, 2**31)),
        out_dtype=draw(st.sampled_from([None, "float32"])) if widens else None,
    )


# Shapes that are hard for kernels: few or odd channels, odd row counts, no spatial axes, one
# element per statistic, and every remainder of S modulo the vector width.
CORNER_SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    **{f"nhwc-c{c}": ((3, 5, 7, c), -1) for c in (1, 3, 65, 251)},
    **{f"nchw-c{c}": ((3, c, 5, 7), 1) for c in (1, 3, 65, 251)},
    **{f"rows{r}": ((r, 24), -1) for r in (1, 2, 31, 33, 1001, 4099)},
    "one-element": ((1, 1, 1, 5), -1),
    "nhwc-1x1": ((16, 1, 1, 40), -1),
    "nchw-1x1": ((16, 40, 1, 1), 1),
    "channels-first": ((6, 50), 0),
    **{f"inner{s}": ((5, 6, s), 1) for s in range(1, 18)},
    # On CPUs all elements are a tail, of several pieces, where a mask is saved.
    "few-long-rows": ((7, 20011), -1),
    # On CPUs there are copies with more channels (`test_channel_padding.py`).
    "few-odd-rows": ((17, 259), -1),
    "few-odd-rows-inner": ((3, 171, 2, 3), 1),
}
RESNET_SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "nhwc-56": ((2, 56, 56, 64), -1),
    "nhwc-14": ((4, 14, 14, 256), -1),
    "nhwc-7": ((4, 7, 7, 512), -1),
    "nchw-56": ((2, 64, 56, 56), 1),
    "nchw-14": ((4, 256, 14, 14), 1),
    "nchw-7": ((4, 512, 7, 7), 1),
}


def layouts(shapes: dict[str, tuple[tuple[int, ...], int]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("shape", "axis"), shapes.values(), ids=shapes.keys())
