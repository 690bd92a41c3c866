"""`import jax_bnar` needs only jax and numpy, starts no backend, and reads variables when used."""

import doctest
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from subprocesses import run_python

import jax_bnar
from jax_bnar._base import startup


def test_import_without_flax() -> None:
    run_python(
        """
        import sys
        for name in ("flax", "equinox", "haiku", "optax", "scipy", "sklearn", "matplotlib"):
            sys.modules[name] = None
        import jax_bnar
        import numpy as np
        jax_bnar.bn_add_relu(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32), None, None)
        """,
        timeout=120,
        # JAX itself uses SciPy, which the None would block, so it is loaded first.
        prelude="import jax, jax.numpy, scipy",
    )


def test_import_does_not_start_a_backend() -> None:
    """Otherwise setting `jax_num_cpu_devices` after the import would come too late."""
    output = run_python(
        """
        import jax, jax_bnar
        jax.config.update("jax_num_cpu_devices", 3)
        print(jax.device_count())
        """,
        timeout=120,
        prelude="",
    )
    assert output.split() == ["3"]


# The state of a source tree that was never built.
WITHOUT_NATIVE_MODULE = """
import os, sys, warnings
os.environ.pop("JAX_BNAR_IMPLEMENTATION", None)
sys.modules["jax_bnar._native"] = None
import numpy as np
import jax_bnar

x = np.ones((2, 3), np.float32)
caught = warnings.catch_warnings(record=True)
"""


def test_one_warning_where_the_native_module_did_not_load() -> None:
    output = run_python(
        """
        with caught as found:
            warnings.simplefilter("always")
            for _ in range(2):
                jax_bnar.bn_relu(x, None, None)  # the line
                jax_bnar.batch_norm_inference(x, None, None, np.zeros(3, "f"), np.ones(3, "f"))
        (warning,) = found
        print(warning.category.__name__, warning.filename, warning.message, sep="\\n")
        """,
        timeout=120,
        prelude=WITHOUT_NATIVE_MODULE,
    )
    category, file, message = output.splitlines()
    assert (category, file) == ("RuntimeWarning", "<string>")  # where the caller's line is
    for part in ("_native", "pip install .", "jax_bnar.doctor", "JAX_BNAR_IMPLEMENTATION=xla"):
        assert part in message


@pytest.mark.parametrize(
    ("library", "init"),
    [
        ("flax", "jax_bnar.flax_layers.BatchNorm(use_running_average=False).init"),
        (
            "haiku",
            "haiku.transform_with_state(lambda x: jax_bnar.haiku_layers.BatchNorm(True, True, 0.9)"
            "(x, is_training=True)).init",
        ),
    ],
)
def test_the_warning_of_a_layer_points_to_the_line_of_the_user(library: str, init: str) -> None:
    pytest.importorskip(library)
    output = run_python(
        f"""
        import jax, {library}, jax_bnar.{library}_layers
        with caught as found:
            warnings.simplefilter("always")
            ({init})(jax.random.key(0), x)
        print(*(warning.filename for warning in found if "jax_bnar" in str(warning.message)))
        """,
        timeout=120,
        prelude=WITHOUT_NATIVE_MODULE,
    )
    assert output == "<string>\n"


@pytest.mark.parametrize(
    "choice",
    [
        "jax_bnar.bn_relu(x, None, None, implementation='xla')",
        "os.environ['JAX_BNAR_IMPLEMENTATION'] = 'xla'; jax_bnar.bn_relu(x, None, None)",
        "",
    ],
    ids=["argument", "environment", "import alone"],
)
def test_no_warning_where_pure_jax_was_chosen(choice: str) -> None:
    """Warnings are errors in that process."""
    run_python(choice, timeout=120, prelude=WITHOUT_NATIVE_MODULE)


OLD_JAX = """
import jax
jax.__version__, jax.__version_info__ = "0.8.1", (0, 8, 1)
# A name that the old version does not have.
del jax.typeof
"""


def test_an_old_jax_is_named() -> None:
    output = run_python(
        """
        try:
            import jax_bnar
        except ImportError as error:
            print(error)
        """,
        timeout=120,
        prelude=OLD_JAX,
    )
    assert output == (
        "jax 0.8.1 is older than 0.10.2, the oldest version jax_bnar supports:"
        " pip install --upgrade 'jax>=0.10.2'\n"
    )


def test_a_jax_of_the_future_is_named() -> None:
    output = run_python(
        """
        try:
            import jax_bnar
        except ImportError as error:
            print(error)
            print(repr(error.__cause__))
        """,
        timeout=120,
        prelude="""
import jax
from jax.interpreters import partial_eval
jax.__version__, jax.__version_info__ = "0.99.0", (0, 99, 0)
del partial_eval.partial_eval_jaxpr_custom_rules
""",
    )
    sentence, cause = output.splitlines()
    assert sentence.startswith("jax 0.99.0 lacks something that jax_bnar uses of it (")
    assert "partial_eval_jaxpr_custom_rules" in sentence
    newest = startup.NEWEST_TESTED_JAX
    assert sentence.endswith(
        f"the newest with which jax_bnar was tested is {newest}:"
        f" install a newer jax_bnar, or 'jax<={newest}'"
    )
    assert cause.startswith("AttributeError")


def test_public_names() -> None:
    for name in (
        "bn_add_relu",
        "bn_relu",
        "batch_norm",
        "bn_add_relu_inference",
        "bn_relu_inference",
        "batch_norm_inference",
        "dual_bn_add_relu",
        "BatchNormResult",
        "DualBatchNormResult",
        "DISABLED_EXPORT_CHECKS",
    ):
        assert hasattr(jax_bnar, name)


@pytest.mark.parametrize("value", ["ffi", "xla"])
def test_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("JAX_BNAR_IMPLEMENTATION", value)

    # A new function for each value, because a cached trace would hide the environment.
    def function(x: jax.Array) -> jax.Array:
        return jax_bnar.bn_relu(x, None, None).y

    jaxpr = str(jax.make_jaxpr(function)(np.ones((2, 3), np.float32)))
    assert ("implementation=ffi" in jaxpr) == (value == "ffi")
    assert ("bnar_forward" in jaxpr) == (value == "ffi")


@pytest.mark.slow
def test_layers_are_attributes_of_the_package() -> None:
    """`jax_bnar.flax_layers` after `import jax_bnar`, which does not import Flax by itself."""
    pytest.importorskip("flax")
    run_python(
        """
        import sys
        import jax_bnar
        assert "flax" not in sys.modules
        modules = {"flax_layers", "nnx_layers", "torch_weights", "equinox_layers", "haiku_layers"}
        assert modules <= set(dir(jax_bnar))
        assert jax_bnar.flax_layers.BatchNorm is not jax_bnar.nnx_layers.BatchNorm
        jax_bnar.torch_weights.read
        try:
            jax_bnar.layers
        except AttributeError as error:
            assert str(error) == "module 'jax_bnar' has no attribute 'layers'"
        else:
            raise AssertionError
        for name in jax_bnar._LAYERS:
            try:
                getattr(jax_bnar, name)
            except AttributeError as error:
                way_out = f"jax_bnar.flax_layers.{name} (Linen) or jax_bnar.nnx_layers.{name}"
                assert way_out in str(error)
            getattr(jax_bnar.flax_layers, name)
            getattr(jax_bnar.nnx_layers, name)
        """,
        timeout=120,
    )


OPERATORS = (
    jax_bnar.bn_add_relu,
    jax_bnar.bn_relu,
    jax_bnar.batch_norm,
    jax_bnar.bn_add_relu_inference,
    jax_bnar.bn_relu_inference,
    jax_bnar.batch_norm_inference,
    jax_bnar.dual_bn_add_relu,
    jax_bnar.dual_bn_add_relu_inference,
    jax_bnar.fuse,
    jax_bnar.explain,
    jax_bnar.benchmark,
    jax_bnar.checkpoint_policies.dots_and_statistics_saveable,
    jax_bnar.ops.batch_norm_forward_training,
    jax_bnar.ops.batch_norm_inference,
    jax_bnar.ops.batch_norm_training_backward,
    jax_bnar.ops.fused_bn_add_activation,
    jax_bnar.ops.fused_bn_add_activation_grad,
)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_examples_in_docstrings(operator: Callable[..., Any]) -> None:
    runner = doctest.DocTestRunner()
    (found,) = doctest.DocTestFinder().find(operator, operator.__name__)
    assert found.examples
    assert runner.run(found).failed == 0
