"""The steps of `make gpu`: which commands, in which environment, for how long.

Everything runs offline on what is installed. The package is built into a folder of its own, or
installed there from wheels, so that neither the Python that runs this nor the source tree changes.
PYTHONSAFEPATH keeps the source tree, which lacks the native module, from coming first.
"""

import dataclasses
import importlib.util
import os
import sys
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
        """The steps with these names, in the order in which they run."""
        torch = _missing("torch")
        first, rest = (("--part", part, *self.benchmark) for part in ("first", "rest"))
        no_graphs = _flags(NO_GRAPHS)
        lacks_ncu = self.platform == "cuda" and not find_ncu()
        all_of_them = [
            self._build(),
            # JAX and XLA need most of its time to start; a kernel that waits for ever costs a
            # minute.
            self._measured("smoke", 60, XLA_FLAGS=_flags(SMOKE_FLAGS)),
            # Without the package, and so whatever `build` and `smoke` have come to. Compiling takes
            # most of it.
            self._measured(
                "micro", 60, needs=(), skip=None if find_nvcc() else "nvcc is not installed"
            ),
            self._doctor(),
            self._measured("sites_jax", 200, *first, module="jax_benchmark"),
            self._measured(
                "sites_torch", 120, *first, module="torch_benchmark", needs=(), skip=torch
            ),
            self._pytest("tests", 200, "gpu", "gpu/test_gpu.py", XLA_FLAGS=no_graphs),
            self._device(),
            # Each starts a process of JAX, and some fill all the memory that they may have.
            self._pytest(
                "programs", 150, "gpu", "gpu/test_gpu_programs.py",
                workers=min(self.workers, 2), timeout_s=140,
            ),
            self._sanitize(),
            self._pytest(
                "large", 90, "large", "operators/test_large.py", workers=0,
                skip=None if self.platform == "cuda" else "needs 20 GB on the CPU; pytest -m large",
            ),
            self._measured("benchmark_jax", 300, *rest, module="jax_benchmark"),
            self._measured(
                "benchmark_torch", 300, *rest, module="torch_benchmark", needs=(), skip=torch
            ),
            self._measured("inference_joins", 60),
            # XLA spends most of it on finding the fastest algorithm for each convolution.
            self._measured("resnet50_jax", 400),
            # A replayed graph would be a single entry of the profile, whatever it launches.
            self._measured(
                "counters", 200, XLA_FLAGS=no_graphs,
                skip="ncu is not installed" if lacks_ncu else None,
            ),
            self._measured(
                "resnet50_torch", 300, needs=(), skip=torch or _missing("torchvision")
            ),
            self._pytest("oracle", 400, "not gpu and not large", *ORACLE_TESTS, "-k", "not xla"),
        ]  # fmt: skip
        return [step for step in all_of_them if step.name in names]

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

    def _sanitize(self) -> Step:
        program = (sys.executable, str(ROOT / "tests" / "gpu" / "gpu_sanitize.py"))
        environment = self.environment(
            # Each buffer is a separate allocation; in a pool, no access would be out of bounds.
            XLA_PYTHON_CLIENT_ALLOCATOR="platform",
            XLA_FLAGS=_flags(NO_GRAPHS),
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

    def _measured(
        self, name: str, limit_s: float, *options: str, module: str | None = None,
        needs: tuple[str, ...] = ("build",), skip: str | None = None, **environment: str,
    ) -> Step:  # fmt: skip
        """A module of benchmarks.gpu that writes JSON and ends by itself."""
        output = self.directory / f"{name}.json"
        command = self._module(
            f"benchmarks.gpu.{module or name}", "--platform", self.platform,
            "--output", str(output), *options,
            output=output, deadline_option="--seconds", **environment,
        )  # fmt: skip
        return Step(name, (command,), limit_s, needs, skip)

    def _module(
        self, name: str, *options: str, output: Path, deadline_option: str | None = None,
        **more: str,
    ) -> Command:  # fmt: skip
        argv = (sys.executable, "-m", name, *options)
        # Without kernels, an error is better than the time of pure JAX.
        environment = self.environment(JAX_BNAR_IMPLEMENTATION="ffi", **more)
        return Command(argv, environment, output, deadline_option)

    def _pytest(
        self, name: str, limit_s: float, marker: str, *arguments: str, workers: int | None = None,
        timeout_s: float = 90, skip: str | None = None, **more: str,
    ) -> Step:  # fmt: skip
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
        return Step(
            name, (Command(tuple(argv), self.environment(**more)),), limit_s, ("build",), skip
        )


def _flags(flags: str) -> str:
    return " ".join([*os.environ.get("XLA_FLAGS", "").split(), flags])


def _missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"{package} is not installed"
