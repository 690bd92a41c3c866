"""All uses of JAX outside its public API.

They have been checked on jax 0.10.2 and 0.12.0.1.
"""

import contextlib
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.core
from jax._src import api_util, core, dispatch, dtypes, sharding_impls, source_info_util
from jax._src.interpreters import mlir as private_mlir
from jax._src.lax import lax
from jax.experimental import custom_partitioning as partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval, xla
from jax.sharding import AbstractMesh, ManualAxisType, Mesh, NamedSharding, PartitionSpec

# These are undocumented, but jax.interpreters exports them, and JAX's FFI tutorial uses them.
primitive_batchers = batching.primitive_batchers
fancy_primitive_batchers = batching.fancy_primitive_batchers
primitive_jvps = ad.primitive_jvps
primitive_transposes = ad.primitive_transposes
instantiate_zeros = ad.instantiate_zeros
is_undefined_primal = ad.is_undefined_primal
Zero = ad.Zero
apply_primitive = xla.apply_primitive
register_lowering = mlir.register_lowering
partial_eval_jaxpr_custom_rules = partial_eval.partial_eval_jaxpr_custom_rules
ArrayMapping = partitioning.ArrayMapping
CompoundFactor = partitioning.CompoundFactor
SdyShardingRule = partitioning.SdyShardingRule
custom_partitioning = partitioning.custom_partitioning
# The value of `axis_data.name` in a batching rule when vmap was given no axis_name.
no_axis_name = core.no_axis_name

_PACKAGE = str(pathlib.Path(__file__).parents[1]) + os.sep


def lower_fun(function: Callable[..., Any], multiple_results: bool = True) -> Callable[..., Any]:
    """A lowering rule that computes a function, whose results have the shardings of their types.

    With a mesh of Auto and Explicit axes, XLA may otherwise give a result a sharding that no type
    can express, such as P(("auto", "explicit")), and the caller then loses its explicit part.
    """
    rule = mlir.lower_fun(function, multiple_results)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
        return [
            private_mlir.lower_with_sharding_in_types(ctx, result, aval)
            if hasattr(result, "type")  # and not the several values of one
            else result
            for result, aval in zip(rule(ctx, *operands, **params), ctx.avals_out, strict=True)
        ]

    return lower


def register_dce_rule(primitive: Any, rule: Callable[[Sequence[bool], Any], Any]) -> None:
    """Registers `rule`, which maps (used results, equation) to (used inputs, equation)."""

    def adapted(used: Sequence[bool], *rest: Any) -> Any:
        # After 0.10.2, JAX passes a list of live inputs between the two.
        return rule(used, rest[-1])

    partial_eval.dce_rules[primitive] = adapted


def out_avals(
    like: Any, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any]
) -> list[jax.core.ShapedArray]:
    """Abstract results that vary over the same manual mesh axes as `like`.

    If they did not, `shard_map` would accept a wrong `out_specs=P()` and return the result of one
    device.
    """
    if like.manual_axis_type.varying:
        return sharded_avals(like, shapes, dtypes, [PartitionSpec()] * len(shapes))
    return [jax.core.ShapedArray(*each) for each in zip(shapes, dtypes, strict=True)]


def sharded_avals(
    like: Any,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    specs: Sequence[PartitionSpec],
) -> list[jax.core.ShapedArray]:
    """Abstract results on the mesh of `like`, sharded by `specs` over its Explicit axes."""
    return [
        jax.core.ShapedArray(
            shape,
            dtype,
            sharding=NamedSharding(like.sharding.mesh, spec),
            manual_axis_type=ManualAxisType(varying=like.manual_axis_type.varying),
        )
        for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True)
    ]


def varying_axes(array: Any) -> frozenset[Any]:
    """The manual mesh axes over which an array is known to vary (`shard_map`, check_vma=True)."""
    return jax.typeof(array).manual_axis_type.varying


def vary_over(array: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """The array, cast to vary over these manual mesh axes too."""
    # In any process, the same program has the same order.
    missing = sorted(axes - varying_axes(array), key=repr)
    return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array


_Array = TypeVar("_Array", jax.Array, jax.Array | None)


def reconcile_vma(arrays: Sequence[_Array]) -> list[_Array]:
    """The arrays, cast to vary over every manual mesh axis that any of them varies over.

    `jnp` functions cast their operands themselves; a primitive must be given operands that agree.
    The transpose of the cast is the psum that sums the gradient of a replicated operand.
    """
    axes = frozenset().union(*(varying_axes(a) for a in arrays if a is not None))

    results: list[Any] = [None if array is None else vary_over(array, axes) for array in arrays]
    return results


def needs_devices_at_lowering(primitive: Primitive) -> None:
    """Makes JAX tell the lowering rule its devices, which custom_partitioning asks for."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def automatic_axes(ctx: Any) -> tuple[Any, ...] | None:
    """The mesh axes that XLA still has to partition when a lowering rule is called.

    None stands for the whole mesh: several devices and no enclosing `shard_map`. Inside a
    `shard_map` these are the axes that it leaves automatic. An empty tuple means that the arrays
    are those of a single device.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, sharding_impls.SPMDAxisContext):
        sizes = context.mesh.shape
        return tuple(a for a in sizes if a not in context.manual_axes and sizes[a] > 1)
    if isinstance(context, sharding_impls.ShardingContext):
        return None if context.num_devices > 1 else ()
    return ()


def partition_spec(sharding: Any, mesh: Any) -> PartitionSpec | None:
    """The spec of a sharding that XLA passes to a partition callback.

    It is None for one that no spec over this mesh can express.
    """
    if mesh.empty:
        return PartitionSpec()
    try:
        return sharding_impls.parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(0), mesh)[0]
    except (NotImplementedError, KeyError, AssertionError, ValueError):
        return None


def shards_and_devices(sharding: Any) -> tuple[list[int], list[int]] | None:
    """How many shards a sharding has along each axis, and copies; and the device of each of them.

    It is None if the sharding divides more than arrays.
    """
    hlo = sharding._to_xla_hlo_sharding(0)
    copies = int(hlo.replicate_on_last_tile_dim())
    if not hlo.is_tiled() or len(hlo.subgroup_types()) > copies:
        return None
    return list(hlo.tile_assignment_dimensions()), list(hlo.tile_assignment_devices())


def mesh_of_parts(mesh: Any, sizes: Sequence[int]) -> Any:
    """A mesh of these sizes, whose axes are named by their numbers, with the same devices."""
    names = tuple(map(str, range(len(sizes))))
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(tuple(sizes), names)
    return Mesh(mesh.devices.reshape(sizes), names)


def sharding_of(spec: PartitionSpec, mesh: Any, like: Any) -> Any:
    """The sharding given by `spec`, or a replicated one if JAX does not know the mesh."""
    if mesh.empty:
        return sharding_impls.GSPMDSharding.get_replicated(like._device_assignment)
    return NamedSharding(mesh, spec)


def is_for_export(ctx: Any) -> bool:
    return ctx.module_context.lowering_parameters.for_export


class _NotStored(list[Any]):
    """Objects that a compiled program keeps alive, and that are not stored with it."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tuple, ()


@contextlib.contextmanager
def keeping_nothing_when_stored(ctx: Any) -> Iterator[None]:
    """What is lowered in this context keeps nothing alive in a program read from a file.

    JAX keeps the callbacks of custom_partitioning with a program. XLA calls them only while it
    compiles, and they cannot be pickled, so without this the programs of several devices could not
    be serialised.
    """
    kept = ctx.module_context.keepalives
    before = len(kept)
    yield
    if len(kept) > before:
        kept[before:] = [_NotStored(kept[before:])]


def has_gpu_of_program(ctx: Any) -> bool | None:
    """Whether this process has the GPU that a program is lowered for.

    It has not if the GPU is of a topology (`jax.experimental.topologies`), which can be compiled
    for and nothing else. None if that is not known, because JAX runs on another platform.
    """
    backend = ctx.module_context.backend
    if type(backend).__name__ == "CompileOnlyPyClient":
        return False
    return True if getattr(backend, "platform", None) in ("gpu", "cuda") else None


def gpu_capability_of_program(ctx: Any) -> tuple[int, int] | None:
    """The compute capability of the GPU that a program is lowered for, (9, 0) for 9.0.

    None if it is not known, as in a program that is exported from a machine without GPUs.
    """
    backend = ctx.module_context.backend
    devices = backend.devices() if backend is not None else []
    text = getattr(devices[0], "compute_capability", None) if devices else None
    numbers = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def without_shardings(avals: Sequence[Any]) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]


def bind_params(equation: Any) -> dict[str, Any]:
    """The keyword arguments that bind an equation's primitive again with the same parameters."""
    return equation.primitive.get_bind_params(equation.params)


def binder(equation: Any) -> Callable[..., Sequence[Any]]:
    """A function of arrays that computes the equation and returns a sequence of results."""
    primitive = equation.primitive

    def bind(*args: Any) -> Sequence[Any]:
        result = primitive.bind(*args, **bind_params(equation))
        return result if primitive.multiple_results else [result]

    return bind


@contextlib.contextmanager
def context_of(equation: Any, name_stack: Any) -> Iterator[None]:
    """Applies the name stack, source line and compute context of an equation to its replacement."""
    stack = source_info_util.current_name_stack() + name_stack
    traceback = equation.source_info.traceback
    with (
        source_info_util.user_context(traceback, name_stack=stack),
        equation.ctx.manager,
    ):
        yield


def source_line(equation: Any) -> str:
    """The source line that an equation comes from: the user's own rather than a library's."""
    frames = list(source_info_util.user_frames(equation.source_info.traceback))
    others = [frame for frame in frames if _PACKAGE not in frame.file_name]
    own = [frame for frame in others if "site-packages" not in frame.file_name]
    frame = next(iter(own or others or frames), None)
    return "an unknown line" if frame is None else f"{frame.file_name}:{frame.start_line}"


def is_plain_jit(params: Mapping[str, Any]) -> bool:
    """Whether a jit adds nothing to its body: no sharding, layout, donation or option."""
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    return (
        all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)
        and all(layout is None for layout in layouts)
        and not any(params["donated_invars"])
        and not params["keep_unused"]
        and not params["compiler_options_kvs"]
    )


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr inside a closed jaxpr; an open jaxpr is returned unchanged."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def manual_axes(params: Mapping[str, Any]) -> frozenset[Any]:
    """The mesh axes that a shard_map makes manual."""
    return frozenset(params["newly_manual_axes"])


def derivative_rule_of(equation: Any) -> Any:
    """The function that a custom_jvp_call was given as its rule, or None if it cannot be found.

    JAX keeps the rule in the closure of the function that traces it. Around that, there may be a
    `vmap` over leading axes for each axis that was added, and where a jitted function was mapped,
    the function that evaluates its jaxpr.
    """
    try:
        traced = equation.params["jvp_jaxpr_fun"]
        while True:
            (trace,) = (c for c in _captured(traced.f).values() if callable(c))
            rule = _captured(trace)["jvp"]
            others = [each for each in rule.transforms if not _maps_leading_axes(*each)]
            if len(others) == 1:
                return rule.f
            evaluated = _captured(rule.f)
            if others or evaluated["num_consts"] != 0:
                return None
            traced = evaluated["jvp_jaxpr_fun"]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _captured(function: Any) -> dict[str, Any]:
    """The variables of a closure."""
    cells = (cell.cell_contents for cell in function.__closure__)
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def _maps_leading_axes(transform: Any, parameters: Any) -> bool:
    """Whether a transform of a rule is that of `vmap`, which then moves no axis of any operand."""
    if transform.__name__ != "batch_custom_jvp_subtrace":
        return False
    return set(parameters[-1]) <= {0, None}


def function_name(jaxpr: Any) -> str:
    """The name of the Python function of which a jaxpr was traced; "" if JAX does not know it."""
    return getattr(open_jaxpr(jaxpr).debug_info, "func_name", "")


def is_copy_of(given: Any, function: Any) -> bool:
    """Whether `copy.deepcopy` made `given` of a jitted function or a `jax.custom_jvp`.

    It copies these objects, but not the function that each of them calls.
    """
    called = "jvp" if isinstance(function, jax.custom_jvp) else "_cache_miss"
    own = getattr(function, called, None)
    return type(given) is type(function) and own is not None and getattr(given, called) is own


def function_source(jaxpr: Any) -> str:
    """Name, file and line of the function of which a jaxpr was traced; "" if they are not known."""
    return getattr(open_jaxpr(jaxpr).debug_info, "func_src_info", "") or ""


def source_of_function(function: Any) -> str:
    """What `function_source` says of a jaxpr that was traced of this function."""
    return api_util.fun_sourceinfo(function) or ""


def as_typed(array: Any, aval: Any) -> Any:
    """The array with the weak type of an abstract value of its dtype; a literal as an array."""
    if not hasattr(aval, "weak_type") or dtypes.issubdtype(aval.dtype, dtypes.extended):
        return array
    dtype = getattr(
        array, "dtype", aval.dtype
    )  # JAX keeps the literals True and False as they are.
    return lax._convert_element_type(array, dtype, weak_type=aval.weak_type)


def is_token(leaf: Any) -> bool:
    """Whether a leaf is a token of `jax.lax.create_token`, or stands for one while it is traced."""
    return isinstance(leaf, core.Token) or (
        isinstance(leaf, core.Tracer) and isinstance(leaf.aval, core.AbstractToken)
    )


def symbolic_factors(size: Any) -> tuple[int, tuple[tuple[Any, int], ...]]:
    """A number, and expressions with their powers, of which a symbolic size is the product."""
    terms = size._sorted_terms
    if len(terms) == 1:
        ((term, number),) = terms
        return number, tuple(term._factors)
    number = math.gcd(*(coefficient for _, coefficient in terms))
    return number, ((size // number, 1),)


def mapped_axes() -> dict[Any, int]:
    """Names and sizes of the mapped axes in scope (vmap, pmap and shard_map)."""
    return dict(core.get_axis_env().axis_sizes)


def has_effects(effects: Any) -> bool:
    """Whether there is any effect other than the use of a mapped axis's name."""
    return any(not isinstance(effect, core.NamedAxisEffect) for effect in effects)
