"""The environment variables of the CPU kernels: wrong values are refused by their names."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from subprocesses import run_python
from tiers import slow_except

import jax_bnar
from jax_bnar._kernels import targets
from jax_bnar.doctor import _diagnosis, _environment

pytestmark = pytest.mark.one_python

ISA = "JAX_BNAR_CPU_ISA"
HUGE_PAGES = "JAX_BNAR_HUGE_PAGES"
# What the message says besides the variable and its value.
ALLOWED = {
    ISA: ("'baseline'", "of which this processor runs"),
    HUGE_PAGES: ("must be unset or one of '0', '1'",),
}
WRONG = [
    *((ISA, value) for value in ("avx3", "AVX2", "avx2 ", "best")),
    *((HUGE_PAGES, value) for value in ("yes", "2", "1 ", "off")),
]
PRELUDE = "import os\nos.environ[{variable!r}] = {value!r}\n"

REFUSED = """
import jax.numpy as jnp
import jax_bnar

x = jnp.ones((4, 16))
for implementation in ("ffi", None):
    try:
        jax_bnar.bn_relu(x, None, None, implementation=implementation)
    except ValueError as error:
        print(error)
jax_bnar.bn_relu(x, None, None, implementation="xla")
"""


def require_message(printed: str, variable: str, value: str) -> None:
    for part in (f"{variable} must be unset or one of", f"got '{value}'", *ALLOWED[variable]):
        assert part in printed


@pytest.mark.parametrize("wrong", slow_except({(ISA, "avx3"), (HUGE_PAGES, "yes")}, WRONG))
def test_unknown_value_is_refused(wrong: tuple[str, str]) -> None:
    variable, value = wrong
    prelude = PRELUDE.format(variable=variable, value=value)
    printed = run_python(REFUSED, timeout=300, prelude=prelude).splitlines()
    assert len(printed) == 2
    for line in printed:
        require_message(line, variable, value)


@pytest.mark.parametrize("variable", [ISA, HUGE_PAGES])
def test_a_value_that_is_not_utf8_is_refused(variable: str) -> None:
    prelude = f"import os\nos.environb[b{variable!r}] = b'\\xff'\n"
    for line in run_python(REFUSED, timeout=300, prelude=prelude).splitlines():
        require_message(line, variable, r"\xff")


EXPORTED = """
import pathlib
import jax
import jax.numpy as jnp
import jax_bnar

exported = jax.export.deserialize(bytearray(pathlib.Path({path!r}).read_bytes()))
try:
    jax.block_until_ready(exported.call(jnp.ones((4, 16))))
except Exception as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("variable", "value"), [(ISA, "avx3"), (HUGE_PAGES, "yes")])
def test_exported_program_is_refused_when_it_runs(
    variable: str, value: str, tmp_path: pathlib.Path
) -> None:
    """An exported program is not lowered again, so the kernel itself raises the same error."""
    function = jax.jit(lambda x: jax_bnar.bn_relu(x, None, None, implementation="ffi").y)
    exported = jax.export.export(function, disabled_checks=jax_bnar.DISABLED_EXPORT_CHECKS)(
        jnp.ones((4, 16), jnp.float32)
    )
    path = tmp_path / "exported"
    path.write_bytes(exported.serialize())
    printed = run_python(
        EXPORTED.format(path=str(path)),
        timeout=300,
        prelude=PRELUDE.format(variable=variable, value=value),
    )
    assert "INVALID_ARGUMENT" in printed
    require_message(printed, variable, value)


@pytest.mark.parametrize(("variable", "setting"), [(ISA, "cpu_isa"), (HUGE_PAGES, "huge_pages")])
def test_doctor_names_a_wrong_value(
    variable: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ValueError(f"{variable} must be unset")

    monkeypatch.setattr(targets, setting, refuse)
    _, machine = _environment.versions_and_machine()
    assert getattr(machine, setting) is None
    problems = _diagnosis._environment_problems()
    assert [problem.way_out for problem in problems] == [f"unset {variable}"]
    assert "must be unset" in problems[0].reason
