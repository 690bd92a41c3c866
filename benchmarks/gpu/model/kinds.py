"""The kinds of sites: what each direction moves, which loops it runs, and what it cannot avoid."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from benchmarks.common.kernels import planner
from benchmarks.common.sites import Site
from benchmarks.sites.problem import DType, itemsize

Save = Literal["mask", "y"]

# Elements whose instructions are counted together: kWidth in cuda/host/parameters.h.
VECTOR: Final = 8


@dataclass(frozen=True)
class Direction:
    """Forward or backward at a site.

    Attributes:
        traffic: what the planner is told (`Traffic` in cuda/host/plan.h), in arrays of x's size.
        floor: arrays that cross memory even if every array is read only once. With save="mask"
            these are as few as there can be.
        kernel: "Forward" or "Backward", as .ci/cuda_instructions.py spells it.
        form: which of its forms.
        sums: the form of the loop of its sums where that is a kernel of its own, if it has another.
        strategy: the one that these kernels have, or "auto" where the planner chooses.
    """

    traffic: dict[str, float]
    floor: float
    kernel: str
    form: str
    sums: str = ""
    strategy: str = "auto"

    def loops(self, two_kernels: bool) -> tuple[tuple[str, str], tuple[str, str]]:
        """The names of the loops of both passes, each on the tiles that are kept and on others."""
        whole = f"{self.kernel} {self.form}"
        if two_kernels:
            sums = f"{self.kernel} {self.sums or self.form} sums"
            # A dz that the sums have written is read like the dy of a call without a gate.
            last = "none" if self.form.endswith(" dz") else self.form
            elementwise = f"{self.kernel} {last} memory"
            return (sums, sums), (elementwise, elementwise)
        return (f"{whole} kept sums", f"{whole} copied sums"), (
            f"{whole} shared",
            f"{whole} copied",
        )


def directions(site: Site, dtype: DType, save: Save) -> dict[str, Direction]:
    """Forward and backward at a site. A further kind of site needs an entry here."""
    return _KINDS[site.form](planner(), dtype, save, 1 / (8 * itemsize(dtype)))


def _batch_norm(plan: Any, dtype: DType, save: Save, mask: float) -> dict[str, Direction]:
    del save, mask
    return {
        "forward": Direction(
            plan.cuda_forward_traffic(dtype, False, False), 2, "Forward", "none", "statistics"
        ),
        "backward": Direction(
            plan.cuda_backward_traffic(dtype, "none", False), 3, "Backward", "none"
        ),
    }


def _relu(plan: Any, dtype: DType, save: Save, mask: float) -> dict[str, Direction]:
    del save, mask  # Backward finds the gate in x.
    return {
        "forward": Direction(
            plan.cuda_forward_traffic(dtype, False, False), 2, "Forward", "relu", "statistics"
        ),
        "backward": Direction(plan.cuda_backward_traffic(dtype, "x", False), 3, "Backward", "x"),
    }


def _add_relu(plan: Any, dtype: DType, save: Save, mask: float) -> dict[str, Direction]:
    has_mask = save == "mask"
    return {
        "forward": Direction(
            plan.cuda_forward_traffic(dtype, True, has_mask),
            3 + (mask if has_mask else 0),
            "Forward",
            "z relu mask" if has_mask else "z relu",
            "statistics",
        ),
        "backward": Direction(
            plan.cuda_backward_traffic(dtype, save, True),
            4 + (mask if has_mask else 1),
            "Backward",
            f"{save} dz",
        ),
    }


def _dual(plan: Any, dtype: DType, save: Save, mask: float) -> dict[str, Direction]:
    del mask  # The floor has none: backward could compute the gate from x1 and x2.
    has_mask = save == "mask"
    gate = "mask" if has_mask else "x"
    return {
        "forward": Direction(
            plan.cuda_forward_traffic(dtype, False, has_mask, 2),
            3,
            "DualForward",
            "z relu mask" if has_mask else "z relu",
            "statistics",
            strategy="two_kernels",
        ),
        "backward": Direction(
            plan.cuda_backward_traffic(dtype, gate, False, 2),
            5,
            "DualBackward",
            gate,
            strategy="two_kernels",
        ),
    }


_KINDS: Final = {
    "batch_norm": _batch_norm,
    "bn_relu": _relu,
    "bn_add_relu": _add_relu,
    "dual_bn_add_relu": _dual,
}
