"""Tests of what `explain` says."""

import pathlib
import re
import xml.etree.ElementTree
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checkout import ROOT, TESTS
from fuse_operands import AXES, X, Z
from fuse_tools import assert_fused, operators
from jax import lax

import jax_bnar
from jax_bnar._fuse import region, search


def _norm(x: Any, axes: Any = AXES) -> jax.Array:
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-3)


def network(x: Any, z: Any) -> Any:
    with jax.named_scope("stem"):
        x = jax.nn.relu(_norm(x))
    with jax.named_scope("block"):
        x = jax.nn.relu(_norm(x) + z)
    with jax.named_scope("head"):
        return jax.nn.relu(_norm(x, (3,)))


def test_lines() -> None:
    report = jax_bnar.explain(network)(X, Z)
    assert isinstance(report, jax_bnar.FusionReport)
    stem, block, head = report.candidates
    assert (stem.module, stem.operator, stem.reason) == ("stem", "bn_relu", "")
    assert (block.module, block.operator) == ("block", "bn_add_relu")
    assert (head.module, head.operator) == ("head", None)
    assert "LayerNorm" in head.reason
    assert report.matched == (stem, block)
    assert report.refused == (head,)
    size = X.size * 4
    assert (stem.bytes_saved, block.bytes_saved, head.bytes_saved) == (2 * size, 4 * size, 0)
    assert report.bytes_saved == 6 * size
    lines = str(report).splitlines()
    assert [line.startswith("next: ") for line in lines] == [False] * 3 + [True] * 2
    assert repr(report) == str(report)
    assert lines[0].startswith("stem: bn_relu [float32[6,5,4,3]] 2,880 bytes saved at ")
    assert re.search(r"test_fuse_report\.py:\d+$", lines[0])
    assert lines[2].startswith("head: refused: the statistics are those of each example")


def test_source_lines_are_those_of_the_program() -> None:
    text = pathlib.Path(__file__).read_text().splitlines()
    lines = [c.line.rsplit(":", 1) for c in jax_bnar.explain(network)(X, Z).matched]
    assert [text[int(number) - 1].strip() for _, number in lines] == [
        "x = jax.nn.relu(_norm(x))",
        "x = jax.nn.relu(_norm(x) + z)",
    ]


def test_shapes_are_enough() -> None:
    shape = jax.ShapeDtypeStruct((256, 56, 56, 256), jnp.bfloat16)

    def join(x: Any, z: Any) -> Any:
        return jax.nn.relu(_norm(x.astype(jnp.float32)).astype(x.dtype) + z)

    (candidate,) = jax_bnar.explain(join)(shape, shape).candidates
    assert candidate.bytes_saved == 4 * 2 * 256 * 56 * 56 * 256


def test_calls_are_counted() -> None:
    def program(x: Any, z: Any) -> Any:
        return lax.scan(lambda c, _: (network(c, z), None), x, None, length=5)[0]

    report = jax_bnar.explain(program)(X, Z)
    assert [c.calls for c in report.candidates] == [5, 5, 5]
    assert report.count("bn_relu") == 5
    assert report.bytes_saved == 5 * 6 * X.size * 4
    assert " x5: bn_relu" in str(report)


def test_summary() -> None:
    text = jax_bnar.explain(network)(X, Z).summary()
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert rows[0] == ["operator", "calls", "bytes saved"]
    assert rows[1:3] == [["bn_add_relu", "1", "5,760"], ["bn_relu", "1", "2,880"]]
    assert rows[3][0].startswith("refused: the statistics are those of each example")
    assert rows[3][1:] == ["1", "0"]


def test_nothing_to_say() -> None:
    report = jax_bnar.explain(jnp.sin)(X)
    first, then = str(report).splitlines()
    assert first == "nothing to fuse"
    assert then.startswith("next: fuse looks for arrays that are normalised by their own mean")
    assert "training mode" in then
    assert report.summary().splitlines() == ["operator   calls      bytes saved"]
    assert "Patterns" in report.html()


def _parsed(text: str) -> dict[str, dict[str, Any]]:
    """Parses the print of Paddle's pass: by heading, the operators in order and sets of tensors."""
    graphs: dict[str, dict[str, Any]] = {}
    headings = re.split(r"The (source|result) pattern graph in \[(\w+)\]:", text)
    for kind, name, body in zip(headings[1::3], headings[2::3], headings[3::3], strict=True):
        graph: dict[str, Any] = {"operators": []}
        for title in ("All", "Input", "Output"):
            found = re.search(rf"{title} Tensors:\s*\n\s*(.*)\n", body)
            assert found is not None
            graph[title] = frozenset(found.group(1).split())
        for line in body.splitlines():
            operator = re.match(r"\s*(\S+) : inputs\[ (.*) \], outputs\[ (.*) \]", line)
            if operator is not None:
                op, inputs, outputs = operator.groups()
                graph["operators"].append((op, tuple(inputs.split()), tuple(outputs.split())))
        graphs[f"{name}/{kind}"] = graph
    return graphs


# The print of PaddlePaddle's pass, in which the order of the tensors is that of its hash tables.
PADDLE = TESTS / "data" / "paddle_fused_bn_add_act_pass.txt"


@pytest.mark.parametrize(
    "divide",
    [
        lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
        lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6),
    ],
    ids=["l2", "rms"],
)
def test_norms_without_a_mean_are_not_listed(divide: Any) -> None:
    assert jax_bnar.explain(divide)(X).candidates == ()


def test_a_norm_before_two_activations_is_used_more_than_once() -> None:
    """As in a node of EfficientDet; another array comes in before each SiLU, which is fused."""

    def node(x: Any, z: Any) -> Any:
        y = _norm(x)
        return jax.nn.silu(y + z) + jax.nn.silu(y - z)

    (found,) = jax_bnar.explain(node)(X, Z).candidates
    assert found.reason == "the normalised array is used more than once"


def test_graphs_are_those_of_paddle() -> None:
    expected = _parsed(PADDLE.read_text())
    assert len(expected) == 4
    text = jax_bnar.explain(network)(X, Z).graphs()
    given = _parsed(text)
    assert {name: given[name] for name in expected} == expected
    assert text.rstrip().splitlines()[-1].startswith("device name:  ")


def test_graphs_name_what_was_found() -> None:
    def only(x: Any) -> Any:
        return _norm(x)

    assert set(_parsed(jax_bnar.explain(only)(X).graphs())) == {
        "FusedBnPattern/source",
        "FusedBnPattern/result",
    }


def test_example_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rule from the README of `_fuse`, the new spelling is fused."""

    def pooled(x: Any, z: Any) -> Any:
        def mean(a: Any) -> Any:
            window = (*a.shape[:3], 1)
            return lax.reduce_window(a, 0.0, lax.add, window, (1,) * 4, "VALID") / (6 * 5 * 4)

        centre = mean(x)
        var = mean(x * x) - centre * centre
        return jax.nn.relu((x - centre) * lax.rsqrt(var + 1e-3) + z)

    assert operators(pooled, X, Z) == {}
    readme = (ROOT / "jax_bnar/_fuse/README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    monkeypatch.setattr(region, "_RULES", dict(region._RULES))
    monkeypatch.setattr(search, "SUMS", {*search.SUMS, "reduce_window_sum"})
    exec(code, dict(vars(region)))
    assert_fused(pooled, X, Z, bn_add_relu=1)


def test_example_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    guide = ROOT / "docs" / "guide" / "fuse.md"
    code = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)[0]
    with jax.numpy_rank_promotion("allow"):
        exec(re.sub(r"jnp\.(ones|zeros)\(", r"jnp.\1(dtype=jnp.float32, shape=", code), {})
    said = capsys.readouterr().out.split(" at ")[0]
    assert f"# {said} at " in code


def test_what_to_do_next() -> None:
    """The advice fits what was found."""

    def steps(function: Any, *args: Any) -> list[str]:
        return list(jax_bnar.explain(function)(*args).next_steps)

    (use,) = steps(lambda x: jax.nn.relu(_norm(x)), X)
    assert use.startswith("use jax.grad(jax_bnar.fuse(fun)); jax_bnar.benchmark(fun)(*args)")
    activation, use = steps(lambda x: jax.nn.softplus(_norm(x)), X)
    assert "docs/guide/activations.md lists the activations that are fused" in activation
    (refused,) = steps(lambda x: _norm(x, (3,)), X)
    assert "what is refused runs as before" in refused
    vector = jnp.ones((1, 1, 1, 3), jnp.float32)
    (use,) = steps(lambda x: jax.nn.relu((x - vector) * vector), X)
    assert use.startswith("use jax_bnar.fuse(fun); ")

    def own(x: Any) -> Any:
        return jax_bnar.bn_relu(jax_bnar.bn_relu(x, None, None).y, None, None).y

    report = jax_bnar.explain(own)(X)
    assert report.own_calls == 2
    assert "calls the fused operators of jax_bnar itself" in report.next_steps[0]


def test_pages_that_the_advice_names_exist() -> None:
    source = (ROOT / "jax_bnar/_fuse/advice.py").read_text()
    named = set(re.findall(r"docs/guide/\w+\.md", source))
    assert len(named) == 3
    assert [page for page in named if not (ROOT / page).exists()] == []


def test_a_notebook_shows_a_table() -> None:
    report = jax_bnar.explain(network)(X, Z)
    shown = xml.etree.ElementTree.fromstring(report._repr_html_())
    rows = [["".join(cell.itertext()) for cell in row] for row in shown.iter("tr")]
    assert [row[:2] for row in rows[1:]] == [
        ["stem", "bn_relu"],
        ["block", "bn_add_relu"],
        ["head", "refused"],
    ]
    assert ["".join(item.itertext()) for item in shown.iter("li")] == list(report.next_steps)
    assert "nothing to fuse" in jax_bnar.explain(jnp.sin)(X)._repr_html_()


def test_html_is_a_whole_page() -> None:
    page = jax_bnar.explain(network)(X, Z).html()
    assert page.startswith("<!DOCTYPE html>")
    xml.etree.ElementTree.fromstring(page)  # raises unless elements are closed and text is escaped
    assert page.count("<tr class=") == 3
    assert page.count(" pattern graph in [") == 8
    assert "pd_op.fused_bn_add_activation_grad" in page
    assert "http" not in page
