"""Limits the instruction sets of all peers alike, and says what each of them runs with.

The libraries read these variables once, so `limit` must come before any of them starts.
"""

import os
from collections.abc import Collection
from typing import Any, Final, Literal

from benchmarks.common.kernels import why_no_kernels
from jax_bnar._kernels import targets

IsaName = Literal["avx512bf16", "avx512", "avx2", "baseline"]

_OURS: Final = "JAX_BNAR_CPU_ISA"
_XLA_FLAG: Final = "--xla_cpu_max_isa"
_TORCH: Final = "ATEN_CPU_CAPABILITY"
# Read by the oneDNN that PyTorch and TensorFlow contain, too. Nothing limits TensorFlow's other
# kernels (Eigen), which are compiled for one instruction set and choose few others at run time.
_ONEDNN: Final = "ONEDNN_MAX_CPU_ISA"
# The names that XLA, PyTorch and oneDNN give to these sets.
# PyTorch's baseline is called "default", and it has no name for bfloat16 instructions.
_NAMES: Final[dict[IsaName, tuple[str, str, str]]] = {
    "avx512bf16": ("AVX512_BF16", "avx512", "AVX512_CORE_BF16"),
    "avx512": ("AVX512", "avx512", "AVX512_CORE"),
    "avx2": ("AVX2", "avx2", "AVX2"),
    "baseline": ("SSE4_2", "default", "SSE41"),
}


def limit(isa: IsaName) -> None:
    """Lets our kernels, XLA, PyTorch and oneDNN use at most this instruction set, in this process.

    Raises:
        SystemExit: this processor does not have it, there are no kernels, or the kernels have
            already chosen another one.
    """
    os.environ[_OURS] = isa
    try:
        chosen = targets.cpu_isa()
    except ValueError as error:
        raise SystemExit(f"--isa {isa}: {error}") from None
    if chosen != isa:
        reason = f"the kernels already run with {chosen}; start a new process"
        if chosen is None:
            reason = f"there are no kernels to limit: {why_no_kernels()}"
        raise SystemExit(f"--isa {isa}: {reason}.")
    xla, torch, onednn = _NAMES[isa]
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_XLA_FLAG}={xla}".strip()
    os.environ[_TORCH] = torch
    os.environ[_ONEDNN] = onednn


def describe(peers: Collection[str]) -> dict[str, Any]:
    """What limits XLA, and what the other libraries say they run with if they are among the peers.

    None stands for no limit, and for a library that is no peer or is missing. TensorFlow and Paddle
    do not say what they run with.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    limits = [flag.partition("=")[2] for flag in flags if flag.startswith(f"{_XLA_FLAG}=")]
    return {
        "xla_max_isa": limits[-1] if limits else None,
        "torch_isa": _torch_isa() if any(name.startswith("torch") for name in peers) else None,
        "torch_isa_limit": os.environ.get(_TORCH),
        "onednn": _onednn() if any(name.startswith("onednn") for name in peers) else None,
        "onednn_isa_limit": os.environ.get(_ONEDNN),
    }


def _torch_isa() -> str | None:
    try:
        # Only here, because it is optional and takes seconds to import.
        from benchmarks.sites.peers import _torch
    except ImportError:
        return None
    return _torch.isa()


def _onednn() -> dict[str, str] | None:
    # Only here, because oneDNN reads its limit when it is loaded.
    from benchmarks.sites.peers import _dnnl_library

    return _dnnl_library.describe()
