"""What a fused function changes in its NNX modules apart from arrays, compared with `nnx.jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from fuse_tools import array

import jax_bnar

X = array((3, 4))


class Block(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.other = nnx.BatchNorm(4, rngs=rngs)
        self.shared = self.bn
        self.calls = 0
        self.note: Any = "old"
        self.array = jnp.zeros(3, jnp.float32)
        self.items = nnx.List([1, nnx.Linear(2, 2, rngs=rngs), nnx.relu])
        self.layers = nnx.data([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        return nnx.relu(self.bn(x))


def _switch(block: Any, x: Any) -> Any:
    y = block(x)
    block.eval()
    return y.sum()


def _count(block: Any, x: Any) -> Any:
    block.calls += 1
    block.bn.calls = (block.calls, "new")
    return block(x).sum()


def _forget(block: Any, x: Any) -> Any:
    del block.note
    block.array += 1
    return block(x).sum()


def _rebuild(block: Any, x: Any) -> Any:
    block.items[0] = 7
    block.items[2] = nnx.gelu
    block.items.append("more")
    block.layers.reverse()
    block.shared = block.other
    return block(x).sum()


def _described(block: Any) -> dict[str, Any]:
    """Everything that a function here may have changed; modules are described by what they are."""
    names = {id(module): path for path, module in nnx.iter_graph(block) if _is_object(module)}
    return {
        "/".join(map(str, (*path, name))): names.get(id(value), value)
        for path, module in nnx.iter_graph(block)
        if isinstance(module, nnx.Module)
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in ("array", "layers")
    }


def _is_object(value: Any) -> bool:
    return isinstance(value, nnx.Module | nnx.Variable)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "alone": jax_bnar.fuse,
    "in nnx.jit": lambda function: nnx.jit(jax_bnar.fuse(function)),
    "around nnx.jit": lambda function: jax_bnar.fuse(nnx.jit(function)),
    "in nnx.grad": lambda function: nnx.grad(jax_bnar.fuse(function)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("function", [_switch, _count, _forget, _rebuild])
def test_attributes_are_written_back(function: Any, wrapper: str) -> None:
    expected, given = Block(), Block()
    first = given.layers[0]
    (nnx.grad(function) if wrapper == "in nnx.grad" else nnx.jit(function))(expected, X)
    assert _described(expected) != _described(Block())
    WRAPPERS[wrapper](function)(given, X)
    assert _described(given) == _described(expected)
    assert jnp.array_equal(given.array, expected.array)
    assert jnp.allclose(given.bn.mean[...], expected.bn.mean[...], atol=1e-6)
    assert given.layers.index(first) == (1 if function is _rebuild else 0)


def test_metadata_is_written_back() -> None:
    def function(block: Any, x: Any) -> Any:
        block.bn.scale.set_metadata(note="new")
        return block(x)

    block: Any = Block()
    jax_bnar.fuse(function)(block, X)
    assert block.bn.scale.get_metadata("note") == "new"


def test_a_module_may_be_shared_by_arguments() -> None:
    def function(block: Any, alias: nnx.BatchNorm, again: Any, x: Any) -> Any:
        assert again is block
        assert alias is block.bn is block.shared
        alias.eval()
        block.calls += 1
        again.calls += 1
        return block(x)

    block: Any = Block()
    norm = block.bn
    jax_bnar.fuse(function)(block, norm, block, X)
    assert block.bn is block.shared is norm
    assert norm.use_running_average
    assert block.calls == 2


def test_variables_of_an_outer_trace_stay_untouched() -> None:
    """Inside `jax.grad`, NNX forbids writing to the variables that the loss closes over."""
    block: Any = Block()
    block.eval()
    definition, parameters, rest = nnx.split(block, nnx.Param, ...)
    counted = []

    def loss(parameters: Any) -> Any:
        model = nnx.merge(definition, parameters, rest)
        value = jax_bnar.fuse(_count)(model, X)
        counted.append(model.calls)
        return value

    jax.grad(loss)(parameters)
    assert counted == [1]


def test_explain_changes_nothing() -> None:
    block: Any = Block()
    before = _described(block)
    for function in (_switch, _count, _forget, _rebuild):
        jax_bnar.explain(function)(block, X)
    assert _described(block) == before


def test_a_failing_function_changes_nothing() -> None:
    def function(block: Any, x: Any) -> Any:
        _count(block, x)
        raise RuntimeError("expected")

    block: Any = Block()
    with pytest.raises(RuntimeError, match="expected"):
        jax_bnar.fuse(function)(block, X)
    assert block.calls == 0


@pytest.mark.parametrize("new", [lambda: nnx.Sequential(), lambda: nnx.Variable(X)])
def test_new_modules_and_variables_are_refused(new: Callable[[], Any]) -> None:
    def function(block: Any, x: Any) -> Any:
        block.extra = new()
        return block(x)

    block: Any = Block()
    with pytest.raises(ValueError, match="variables or submodules that it did not have"):
        jax_bnar.fuse(function)(block, X)
    assert not hasattr(block, "extra")
