"""The steps of `make gpu`: which commands, in which environment, for how long.

Everything runs offline on what is installed. The package is built into a folder of its own, so that
neither the Python that runs this nor the source tree is changed; PYTHONSAFEPATH keeps the source
tree, which lacks the native module, from coming first.
"""

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from benchmarks.gpu.cuda_tool import find_cuda_tool
from benchmarks.gpu.ncu import find_ncu
from benchmarks.gpu.steps import Command, Step

Platform = Literal["cuda", "cpu"]

ROOT: Final = Path(__file__).parents[2]
# Options of each, and of tests/gpu/gpu_sanitize.py: those that watch each access take longest.
SANITIZERS: Final = {
    # XLA asks the runtime what may fail, and memcheck would report it.
    "memcheck": (("--report-api-errors", "no"), ()),
    "racecheck": ((), ("few",)),
    "initcheck": ((), ("few",)),
    "synccheck": ((), ()),
}
ORACLE_TESTS: Final = (
    "operators/test_exact_fill.py",
    "operators/test_special_values.py",
    "operators/test_forward.py",
    "operators/test_backward.py",
    "operators/test_inference.py",
    "transforms/test_vmap.py",
)
# A replayed graph holds the launches of the strategy that it was captured under.
NO_GRAPHS: Final = "--xla_gpu_enable_command_buffer="
# What is run where --only names nothing, in this order; `oracle` repeats in a longer way what
# `tests` says of one strategy.
DEFAULT: Final = (
    "build", "device", "doctor", "tests", "programs", "sanitize", "large", "benchmark_jax",
    "benchmark_torch", "inference_joins", "resnet50_jax", "counters", "resnet50_torch",
)  # fmt: skip
NAMES: Final = (*DEFAULT, "oracle")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the steps depend on.

    Attributes:
        platform: "cpu" is the dry run: the same steps, tiny, on what is there.
        directory: for the built package and files of the steps; not emptied.
        workers: processes of pytest, which share the device.
        benchmark: options of the benchmarks.
    """

    platform: Platform
    directory: Path
    workers: int
    benchmark: tuple[str, ...] = ()

    @property
    def site(self) -> Path:
        return self.directory / "site"

    def environment(self, **more: str) -> dict[str, str]:
        # Where `build` was left out, the package that this process would import.
        found = importlib.util.find_spec("jax_bnar")
        installed = [Path(found.origin).parents[1]] if found and found.origin else []
        paths = [self.site, *installed, ROOT, ROOT / "tests"]
        return {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            "JAX_PLATFORMS": "cuda,cpu" if self.platform == "cuda" else "cpu",
            "JAX_BNAR_GPU_PLATFORM": self.platform,
            # Several processes, and other libraries in one, share the memory.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            # No folder of examples in the source tree, and the same ones in every run.
            "CI": "true",
            **more,
        }

    def steps(self, names: tuple[str, ...]) -> list[Step]:
        makers: dict[str, Callable[[], Step]] = {
            "build": self._build,
            "device": self._device,
            "doctor": self._doctor,
            "tests": self._tests,
            "programs": self._programs,
            "sanitize": self._sanitize,
            "large": self._large,
            "benchmark_jax": self._benchmark_jax,
            "benchmark_torch": self._benchmark_torch,
            "inference_joins": self._inference_joins,
            "resnet50_jax": self._resnet50_jax,
            "counters": self._counters,
            "resnet50_torch": self._resnet50_torch,
            "oracle": self._oracle,
        }
        return [makers[name]() for name in NAMES if name in names]

    def _build(self) -> Step:
        cuda = {"cuda": "ON", "cpu": "OFF"}[self.platform]
        options = [f"JAX_BNAR_CUDA={cuda}", "JAX_BNAR_WARNINGS_AS_ERRORS=ON"]
        if self.platform == "cuda":
            options.append("CMAKE_CUDA_ARCHITECTURES=native")
        argv = [
            sys.executable, "-m", "pip", "install", "--verbose", "--no-build-isolation",
            "--no-deps", "--no-index", "--disable-pip-version-check", "--upgrade",
            "--target", str(self.site),
            *(f"--config-settings=cmake.define.{option}" for option in options), str(ROOT),
        ]  # fmt: skip
        # A caller's PYTHONPATH would hide what this Python builds with.
        return Step("build", (Command(tuple(argv)),), limit_s=240)

    def _device(self) -> Step:
        output = self.directory / "device.json"
        command = self._module("benchmarks.gpu.device", "--output", str(output), output=output)
        return Step("device", (command,), limit_s=60)

    def _doctor(self) -> Step:
        output = self.directory / "doctor.json"
        # The report is what it prints, so that a shell keeps the file.
        shell = f'exec "$0" -m jax_bnar.doctor --json --timeout 60 >"{output}"'
        argv = ("/bin/sh", "-c", shell, sys.executable)
        return Step(
            "doctor", (Command(argv, self.environment(), output),), limit_s=90, needs=("build",)
        )

    def _tests(self) -> Step:
        command = self._pytest("gpu", "gpu/test_gpu.py", XLA_FLAGS=self._flags())
        return Step("tests", (command,), limit_s=200, needs=("build",))

    def _programs(self) -> Step:
        # Two at a time: each starts a process of JAX, and some fill what they may of the memory.
        workers = min(self.workers, 2)
        command = self._pytest("gpu", "gpu/test_gpu_programs.py", workers=workers)
        return Step("programs", (command,), limit_s=150, needs=("build",))

    def _large(self) -> Step:
        # On the CPU it takes 20 GB.
        skip = None if self.platform == "cuda" else "needs 20 GB on the CPU; pytest -m large"
        command = self._pytest("large", "operators/test_large.py", workers=0)
        return Step("large", (command,), limit_s=90, needs=("build",), skip=skip)

    def _oracle(self) -> Step:
        command = self._pytest("not gpu and not large", *ORACLE_TESTS, "-k", "not xla")
        return Step("oracle", (command,), limit_s=500, needs=("build",))

    def _sanitize(self) -> Step:
        program = (sys.executable, str(ROOT / "tests" / "gpu" / "gpu_sanitize.py"))
        environment = self.environment(
            # Each buffer an allocation of its own, or nothing inside the pool is out of bounds.
            XLA_PYTHON_CLIENT_ALLOCATOR="platform",
            XLA_FLAGS=self._flags(),
        )
        if self.platform == "cpu":
            return Step("sanitize", (Command(program, environment),), 60, needs=("build",))
        tool = find_cuda_tool("compute-sanitizer")
        commands = tuple(
            Command(
                (
                    tool or "compute-sanitizer", "--tool", name, "--error-exitcode", "9",
                    "--print-limit", "20", *options, *program, *cases,
                ),
                environment,
            )
            for name, (options, cases) in SANITIZERS.items()
        )  # fmt: skip
        skip = None if tool else "compute-sanitizer is not installed"
        return Step("sanitize", commands, limit_s=240, needs=("build",), skip=skip)

    def _benchmark_jax(self) -> Step:
        return self._measured("benchmark_jax", "jax_benchmark", 300, *self.benchmark)

    def _benchmark_torch(self) -> Step:
        step = self._measured("benchmark_torch", "torch_benchmark", 300, *self.benchmark)
        return dataclasses.replace(step, needs=(), skip=_missing("torch"))

    def _inference_joins(self) -> Step:
        return self._measured("inference_joins", "inference_joins", 60)

    def _resnet50_jax(self) -> Step:
        # Most of it is the search for the fastest algorithm of each convolution.
        return self._measured("resnet50_jax", "resnet50_jax", 400)

    def _resnet50_torch(self) -> Step:
        step = self._measured("resnet50_torch", "resnet50_torch", 300)
        skip = _missing("torch") or _missing("torchvision")
        return dataclasses.replace(step, needs=(), skip=skip)

    def _counters(self) -> Step:
        # A replayed graph is one entry of the profile, whatever it launches.
        step = self._measured("counters", "counters", 200, XLA_FLAGS=self._flags())
        there = self.platform == "cpu" or find_ncu()
        return dataclasses.replace(step, skip=None if there else "ncu is not installed")

    def _measured(
        self, name: str, module: str, limit_s: float, *options: str, **environment: str
    ) -> Step:
        """A module that writes JSON and ends by itself."""
        output = self.directory / f"{name}.json"
        command = self._module(
            f"benchmarks.gpu.{module}", "--platform", self.platform, "--output", str(output),
            *options, output=output, deadline_option="--seconds", **environment,
        )  # fmt: skip
        return Step(name, (command,), limit_s, needs=("build",))

    def _module(
        self, name: str, *options: str, output: Path, deadline_option: str | None = None,
        **more: str,
    ) -> Command:  # fmt: skip
        argv = (sys.executable, "-m", name, *options)
        # Without kernels an error, and not the time of pure JAX.
        environment = self.environment(JAX_BNAR_IMPLEMENTATION="ffi", **more)
        return Command(argv, environment, output, deadline_option)

    def _pytest(
        self, marker: str, *arguments: str, workers: int | None = None, **more: str
    ) -> Command:
        workers = self.workers if workers is None else workers
        argv = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker,
            # A warning of another version of JAX must not hide what the kernels do.
            "-W", "default",
            "--numprocesses", str(workers), "--dist", "loadgroup", "--maxfail", "40",
            "--tb", "short",
        ]  # fmt: skip
        argv += [str(ROOT / "tests" / a) if a.endswith(".py") else a for a in arguments]
        return Command(tuple(argv), self.environment(**more))

    def _flags(self) -> str:
        return " ".join([*os.environ.get("XLA_FLAGS", "").split(), NO_GRAPHS])


def _missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"{package} is not installed"
