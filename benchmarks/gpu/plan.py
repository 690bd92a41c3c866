"""The steps of `make gpu`: which commands, in which environment, for how long.

Everything runs offline on what is installed. The package is built into a folder of its own, or
installed there from wheels, so that neither the Python that runs this nor the source tree changes.
PYTHONSAFEPATH keeps the source tree, which lacks the native module, from coming first.
"""

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from benchmarks.gpu.cuda_tool import find_cuda_tool
from benchmarks.gpu.micro.build import find_nvcc
from benchmarks.gpu.ncu import find_ncu
from benchmarks.gpu.steps import Command, Step

Platform = Literal["cuda", "cpu"]

ROOT: Final = Path(__file__).parents[2]
# The options of each tool, and those of tests/gpu/gpu_sanitize.py, which runs fewer cases under the
# tools that take longest because they watch each access.
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
# XLA leaves programs of fewer than five kernels out of CUDA graphs: `smoke` launches one step as it
# is, and has a chain of them captured.
SMOKE_FLAGS: Final = (
    "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=5"
)
# What runs if --only names nothing, in this order: what a run that is cut off should have comes
# first. `oracle` tests one strategy at greater length than `tests`.
DEFAULT: Final = (
    "build", "smoke", "micro", "doctor", "sites_jax", "sites_torch", "tests", "device", "programs",
    "sanitize", "large", "benchmark_jax", "benchmark_torch", "inference_joins", "resnet50_jax",
    "counters", "resnet50_torch",
)  # fmt: skip
NAMES: Final = (*DEFAULT, "oracle")
# A command that may take ten minutes must be able to hold any one step after `build`.
LONGEST_STEP_S: Final = 400


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the steps depend on.

    Attributes:
        platform: "cpu" is the dry run: the same steps, tiny, on what is there.
        directory: for the built package and the files of the steps; it is not emptied.
        workers: the number of processes of pytest, which share the device.
        benchmark: options of the benchmarks.
        wheels: what to install instead of building.
    """

    platform: Platform
    directory: Path
    workers: int
    benchmark: tuple[str, ...] = ()
    wheels: tuple[Path, ...] = ()

    @property
    def site(self) -> Path:
        return self.directory / "site"

    def environment(self, **more: str) -> dict[str, str]:
        # If `build` is left out, this is the package that this process would import.
        found = importlib.util.find_spec("jax_bnar")
        installed = [Path(found.origin).parents[1]] if found and found.origin else []
        paths = [self.site, *installed, ROOT, ROOT / "tests"]
        return {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            "JAX_PLATFORMS": "cuda,cpu" if self.platform == "cuda" else "cpu",
            "JAX_BNAR_GPU_PLATFORM": self.platform,
            # Several processes share the memory, and so do other libraries in one of them.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            # No folder of examples in the source tree, and the same ones in every run.
            "CI": "true",
            **more,
        }

    def steps(self, names: tuple[str, ...]) -> list[Step]:
        makers: dict[str, Callable[[], Step]] = {
            "build": self._build,
            "smoke": self._smoke,
            "micro": self._micro,
            "doctor": self._doctor,
            "sites_jax": self._sites_jax,
            "sites_torch": self._sites_torch,
            "device": self._device,
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
        pip = [
            sys.executable, "-m", "pip", "install", "--no-deps", "--no-index",
            "--disable-pip-version-check", "--upgrade", "--target", str(self.site),
        ]  # fmt: skip
        if self.wheels:
            return Step("build", (Command((*pip, *map(str, self.wheels))),), limit_s=60)
        cuda = {"cuda": "ON", "cpu": "OFF"}[self.platform]
        options = [f"JAX_BNAR_CUDA={cuda}", "JAX_BNAR_WARNINGS_AS_ERRORS=ON"]
        if self.platform == "cuda":
            options.append("CMAKE_CUDA_ARCHITECTURES=native")
        settings = [f"--config-settings=cmake.define.{option}" for option in options]
        argv = [*pip, "--verbose", "--no-build-isolation", *settings, str(ROOT)]
        # A caller's PYTHONPATH would hide what this Python builds with.
        return Step("build", (Command(tuple(argv)),), limit_s=240)

    def _smoke(self) -> Step:
        # It takes 20 seconds, most of which JAX and XLA need to start; a kernel that waits for ever
        # costs a minute.
        return self._measured("smoke", "smoke", 60, XLA_FLAGS=self._flags(SMOKE_FLAGS))

    def _micro(self) -> Step:
        # Without the package, and so whatever `build` and `smoke` have come to. Compiling takes
        # most of it.
        step = self._measured("micro", "micro", 60)
        missing = None if find_nvcc() else "nvcc is not installed"
        return dataclasses.replace(step, needs=(), skip=missing)

    def _sites_jax(self) -> Step:
        options = ("--part", "first", *self.benchmark)
        return self._measured("sites_jax", "jax_benchmark", 200, *options)

    def _sites_torch(self) -> Step:
        options = ("--part", "first", *self.benchmark)
        step = self._measured("sites_torch", "torch_benchmark", 120, *options)
        return dataclasses.replace(step, needs=(), skip=_missing("torch"))

    def _device(self) -> Step:
        output = self.directory / "device.json"
        command = self._module("benchmarks.gpu.device", "--output", str(output), output=output)
        return Step("device", (command,), limit_s=60)

    def _doctor(self) -> Step:
        output = self.directory / "doctor.json"
        # The doctor prints its report, so a shell writes the file.
        shell = f'exec "$0" -m jax_bnar.doctor --json --timeout 60 >"{output}"'
        argv = ("/bin/sh", "-c", shell, sys.executable)
        return Step(
            "doctor", (Command(argv, self.environment(), output),), limit_s=90, needs=("build",)
        )

    def _tests(self) -> Step:
        command = self._pytest("gpu", "gpu/test_gpu.py", XLA_FLAGS=self._flags())
        return Step("tests", (command,), limit_s=200, needs=("build",))

    def _programs(self) -> Step:
        # Each starts a process of JAX, and some fill all the memory that they may have.
        workers = min(self.workers, 2)
        command = self._pytest("gpu", "gpu/test_gpu_programs.py", workers=workers, timeout_s=140)
        return Step("programs", (command,), limit_s=150, needs=("build",))

    def _large(self) -> Step:
        skip = None if self.platform == "cuda" else "needs 20 GB on the CPU; pytest -m large"
        command = self._pytest("large", "operators/test_large.py", workers=0)
        return Step("large", (command,), limit_s=90, needs=("build",), skip=skip)

    def _oracle(self) -> Step:
        command = self._pytest("not gpu and not large", *ORACLE_TESTS, "-k", "not xla")
        return Step("oracle", (command,), limit_s=400, needs=("build",))

    def _sanitize(self) -> Step:
        program = (sys.executable, str(ROOT / "tests" / "gpu" / "gpu_sanitize.py"))
        environment = self.environment(
            # Each buffer is a separate allocation; in a pool, no access would be out of bounds.
            XLA_PYTHON_CLIENT_ALLOCATOR="platform",
            XLA_FLAGS=self._flags(),
        )
        if self.platform == "cpu":
            return Step("sanitize", (Command(program, environment),), 60, needs=("build",))
        tool = find_cuda_tool("compute-sanitizer")
        # Blocks look in memory that nobody has written yet whether another block has.
        zeroed = {"JAX_BNAR_CUDA_ZERO_WORKSPACE": "1"}
        commands = tuple(
            Command(
                (
                    tool or "compute-sanitizer", "--tool", name, "--error-exitcode", "9",
                    "--print-limit", "20", *options, *program, *cases,
                ),
                environment | (zeroed if name == "initcheck" else {}),
            )
            for name, (options, cases) in SANITIZERS.items()
        )  # fmt: skip
        skip = None if tool else "compute-sanitizer is not installed"
        return Step("sanitize", commands, limit_s=240, needs=("build",), skip=skip)

    def _benchmark_jax(self) -> Step:
        options = ("--part", "rest", *self.benchmark)
        return self._measured("benchmark_jax", "jax_benchmark", 300, *options)

    def _benchmark_torch(self) -> Step:
        options = ("--part", "rest", *self.benchmark)
        step = self._measured("benchmark_torch", "torch_benchmark", 300, *options)
        return dataclasses.replace(step, needs=(), skip=_missing("torch"))

    def _inference_joins(self) -> Step:
        return self._measured("inference_joins", "inference_joins", 60)

    def _resnet50_jax(self) -> Step:
        # XLA spends most of it on finding the fastest algorithm for each convolution.
        return self._measured("resnet50_jax", "resnet50_jax", 400)

    def _resnet50_torch(self) -> Step:
        step = self._measured("resnet50_torch", "resnet50_torch", 300)
        skip = _missing("torch") or _missing("torchvision")
        return dataclasses.replace(step, needs=(), skip=skip)

    def _counters(self) -> Step:
        # A replayed graph would be a single entry of the profile, whatever it launches.
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
        # Without kernels, an error is better than the time of pure JAX.
        environment = self.environment(JAX_BNAR_IMPLEMENTATION="ffi", **more)
        return Command(argv, environment, output, deadline_option)

    def _pytest(
        self, marker: str, *arguments: str, workers: int | None = None, timeout_s: float = 90,
        **more: str,
    ) -> Command:  # fmt: skip
        workers = self.workers if workers is None else workers
        argv = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker,
            # Warnings of another version of JAX must not hide what the kernels do.
            "-W", "default",
            "--numprocesses", str(workers), "--dist", "loadgroup", "--maxfail", "40",
            "--tb", "short", "-p", "benchmarks.gpu.failures_now",
            # A kernel that hangs blocks its process, which only another thread can end.
            "--timeout", f"{timeout_s:g}", "--timeout-method", "thread",
        ]  # fmt: skip
        argv += [str(ROOT / "tests" / a) if a.endswith(".py") else a for a in arguments]
        return Command(tuple(argv), self.environment(**more))

    def _flags(self, flags: str = NO_GRAPHS) -> str:
        return " ".join([*os.environ.get("XLA_FLAGS", "").split(), flags])


def _missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"{package} is not installed"
