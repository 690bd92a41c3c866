"""Builds what a package index would take, into dist/: make_dist.py [--cuda auto|on|off] [--tag T].

An sdist, and from it, for each Python in WHEELS, a wheel of jax-bnar with the CPU kernels and, if
there is a CUDA compiler, one of jax-bnar-cuda13. On Linux auditwheel gives them the tag of the
oldest distributions that they run on; abi3audit and twine check what they find. Prints names and
sizes. `make dist` runs this in .venv, which has the tools.
"""

import argparse
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from typing import Final

ROOT: Final = pathlib.Path(__file__).parents[1]
WORK: Final = ROOT / "build" / "dist"
DIST: Final = ROOT / "dist"
CI: Final = ROOT / ".ci"
# A wheel built by 3.12 or later serves 3.12 and all later versions; 3.11 needs its own.
WHEELS: Final = (("3.11",), ("3.12", "3.13", "3.14"))
# A wheel may require at most glibc 2.28 (Debian 10, Ubuntu 20.04, RHEL 8). auditwheel refuses one
# that requires more; to one that requires less, as ours do (2.17), it gives the older tag as well.
PLATFORM: Final = f"manylinux_2_28_{platform.machine()}"


def version() -> str:
    """The version in the sources, without importing them: what they import may be missing here."""
    text = (ROOT / "jax_bnar" / "__init__.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    return found


def run(*command: str | pathlib.Path, environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, cwd=ROOT, env=environment)


def run_logged(log: pathlib.Path, *command: str | pathlib.Path, **environment: str) -> None:
    with log.open("w") as file:
        finished = subprocess.run(
            command, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT
        )
    if finished.returncode != 0:
        sys.exit(f"{log.read_text()}\n{' '.join(map(str, command))} failed; see {log}")


def make_sdist() -> pathlib.Path:
    """Packs the sdist, unpacks it, and returns the folder: wheels are built from nothing else."""
    run(
        sys.executable, "-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check",
        "--outdir", DIST,
    )  # fmt: skip
    (sdist,) = DIST.glob("jax_bnar-*.tar.gz")
    source = WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    (folder,) = source.iterdir()
    return folder


def find_python(versions: tuple[str, ...]) -> str | None:
    for version in versions:
        found = subprocess.run([CI / "find_python", version], capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.strip()
    return None


def requirements(what: str) -> list[str]:
    return subprocess.run(
        [sys.executable, CI / "requirements.py", what], check=True, capture_output=True, text=True
    ).stdout.split()


def build_environment(python: str, name: str) -> dict[str, str]:
    """A venv with what pyproject.toml requires for a build; the headers of jaxlib lie apart."""
    venv, headers = WORK / name / "venv", WORK / name / "headers"
    tools, jaxlib = (requirements(what) for what in ("build-tools", "build-headers"))
    stamp = WORK / name / "installed.txt"
    wanted = "\n".join([python, *tools, *jaxlib])
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(WORK / name, ignore_errors=True)
        run(python, "-m", "venv", venv)
        pip = (venv / "bin" / "python", "-m", "pip", "install", "--quiet")
        run(*pip, "--upgrade", "pip")
        run(*pip, *tools)
        run(*pip, "--no-deps", "--target", headers, *jaxlib)
        stamp.write_text(wanted)
    return {
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(headers),
        "PYTHON": str(venv / "bin" / "python"),
    }


def build_wheel(source: pathlib.Path, name: str, build: dict[str, str], *defines: str) -> None:
    """Builds one wheel and puts it into dist/ under the tag of what it runs on."""
    raw = WORK / "raw" / name
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir(parents=True)
    print(f"compiling {name}", flush=True)
    if sys.platform == "linux":
        defines = ("JAX_BNAR_MANYLINUX=ON", *defines)
    options = [f"--config-settings=cmake.define.{define}" for define in defines]
    run_logged(
        WORK / f"{name}.log",
        build["PYTHON"], "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation",
        "--wheel-dir", raw, *options, source,
        **build,
    )  # fmt: skip
    (wheel,) = raw.glob("*.whl")
    if sys.platform != "linux":
        # On macOS the module needs only the system's own libraries, and its tag is right as it is.
        shutil.copy2(wheel, DIST)
        return
    run(
        sys.executable, "-m", "auditwheel", "repair",
        "--plat", PLATFORM, "--wheel-dir", DIST, wheel,
    )  # fmt: skip


def cuda_compiler(wanted: str) -> dict[str, str] | None:
    """The environment in which nvcc is found; installs it from wheels if it must be there."""
    if "CUDACXX" in os.environ or shutil.which("nvcc") or os.access("/usr/local/cuda/bin/nvcc", 1):
        return {}
    if wanted == "auto":
        return None
    venv = WORK / "nvcc"
    if not venv.exists():
        run(sys.executable, "-m", "venv", venv)
        pip = (venv / "bin" / "python", "-m", "pip", "install", "--quiet")
        run(*pip, *requirements("cuda-compiler"))
    (nvcc,) = venv.glob("lib/python*/site-packages/nvidia/cu13/bin/nvcc")
    return {"CUDACXX": str(nvcc)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds sdist and wheels into dist/.")
    parser.add_argument(
        "--cuda",
        choices=("auto", "on", "off"),
        default="auto",
        help="wheels of jax-bnar-cuda13: if nvcc is there; always, with nvcc from wheels if it"
        " is not; never (default: %(default)s)",
    )
    parser.add_argument("--tag", help="the tag of the release, which must name this version")
    arguments = parser.parse_args()
    cuda = arguments.cuda
    if arguments.tag is not None and arguments.tag != f"v{version()}":
        sys.exit(
            f"the tag is {arguments.tag}, but jax_bnar/__init__.py says version {version()}:"
            f" tag v{version()}, or change the version"
        )
    WORK.mkdir(parents=True, exist_ok=True)
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("jax_bnar*"):
        old.unlink()
    source = make_sdist()
    nvcc = None if cuda == "off" else cuda_compiler(cuda)
    if nvcc is None:
        print("SKIPPED: jax-bnar-cuda13, for there is no nvcc; --cuda on installs one")
    for versions in WHEELS:
        python = find_python(versions)
        if python is None:
            print(f"SKIPPED: no Python {versions[0]} on this machine")
            if os.environ.get("JAX_BNAR_REQUIRE_PYTHONS"):
                sys.exit(f"JAX_BNAR_REQUIRE_PYTHONS is set, and there is no Python {versions[0]}")
            continue
        build = build_environment(python, f"python{versions[0]}")
        build_wheel(source, f"cpu-{versions[0]}", build, "JAX_BNAR_CUDA=OFF")
        if nvcc is not None:
            folder = source / "distributions" / "cuda13"
            # No kernel of a release may spill registers, on any architecture.
            strict = "JAX_BNAR_WARNINGS_AS_ERRORS=ON"
            build_wheel(folder, f"cuda13-{versions[0]}", build | nvcc, strict)
    wheels = sorted(DIST.glob("jax_bnar*.whl"))
    for wheel in wheels:
        run(sys.executable, CI / "check_wheel.py", wheel)
    stable = [wheel for wheel in wheels if "-abi3-" in wheel.name]
    if stable:
        run(pathlib.Path(sys.executable).parent / "abi3audit", "--strict", *stable)
    files = sorted(DIST.glob("jax_bnar*"))
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for file in files:
        print(f"{file.stat().st_size / 1e6:6.1f} MB  dist/{file.name}")


if __name__ == "__main__":
    main()
