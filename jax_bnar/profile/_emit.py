"""Runs ResNet-50 and writes its profile in MegEngine's schema."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

import jax_bnar
from jax_bnar.profile import _device_times, _hlo
from jax_bnar.profile._file import ProfileError
from jax_bnar.profile._resnet50 import Settings, compiled


def emit(settings: Settings, path: Path) -> None:
    """Writes the profile completely or not at all.

    Raises ProfileError if JAX has no device or the file cannot be written.
    """
    try:
        node = _node()
    except RuntimeError as error:
        raise ProfileError(f"JAX cannot start a device ({error}).") from None
    program, arguments = compiled(settings)
    operators = _hlo.operators(program.as_text() or "")
    names = {operator.name for operator in operators}
    times = _device_times.measure(lambda: program(*arguments), names, settings.steps)
    document = to_document(operators, times, node)
    document["jax_bnar"] = {
        "device": jax.devices()[0].device_kind,
        "copy_bytes_per_s": _device_times.copy_bandwidth(),
        "versions": {"jax_bnar": jax_bnar.__version__, "jax": jax.__version__},
        "settings": dataclasses.asdict(settings),
    }
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ProfileError(f"{path}: the profile cannot be written ({reason}).") from None


def to_document(
    operators: list[_hlo.HloOperator], times: _device_times.Times, node: str
) -> dict[str, Any]:
    """The sections graph_exec and profiler, with the keys that MegEngine's own tools read."""
    device = {}
    for operator in operators:
        if operator.name in times:
            start, end = times[operator.name]
            device[operator.name] = {node: {"start": start, "kern": start, "end": end}}
    return {
        "profiler": {
            "device": device,
            "host": {},
            "opr_footprint": {operator.name: _footprint(operator) for operator in operators},
            "opr_internal_pf": {},
        },
        "graph_exec": {
            "comp_seq": [operator.name for operator in operators],
            "operator": {operator.name: _operator(operator) for operator in operators},
            "var": {operator.name: _variable(operator, node) for operator in operators},
            "mem_chunk": {},
        },
    }


def _operator(operator: _hlo.HloOperator) -> dict[str, Any]:
    return {
        "node_type": "operator",
        "id": operator.name,
        "type": operator.kind,
        "name": operator.op_name or operator.name,
        "input": list(operator.inputs),
        "output": [operator.name],
        "extra": {},
        "waiting_spec": {},
    }


def _footprint(operator: _hlo.HloOperator) -> dict[str, Any]:
    return {
        "memory": operator.bytes,
        "computation": operator.computation,
        "in_shapes": [list(array.shape) for array in operator.in_arrays],
        "out_shapes": [list(array.shape) for array in operator.out_arrays],
        "param": {} if operator.mode is None else {"mode": operator.mode},
    }


def _variable(operator: _hlo.HloOperator, node: str) -> dict[str, Any]:
    array = operator.out_arrays[0] if operator.out_arrays else None
    layout = None if array is None else {"dtype": array.dtype, "shape": list(array.shape)}
    return {
        "node_type": "var",
        "id": operator.name,
        "name": operator.name,
        "comp_node": node,
        "mem_plan": {"layout": layout},
    }


def _node() -> str:
    device = jax.devices()[0]
    return f"{device.platform}:{device.id}"
