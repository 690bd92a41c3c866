"""Checks that a wheel contains exactly the files it should: check_wheel.py WHEEL."""

import pathlib
import re
import sys
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
# Distribution -> the folder with its package, and the native modules that its wheel may contain.
PACKAGES = {
    "jax_bnar": (ROOT / "jax_bnar", {"_native"}),
    "jax_bnar_cuda13": (ROOT / "distributions/cuda13/jax_bnar_cuda13", {"_cuda"}),
}


def main(wheel: str) -> int:
    # auditwheel adds an entry for each folder.
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    package = pathlib.Path(wheel).name.split("-")[0]
    folder, modules = PACKAGES[package]
    metadata = {name for name in names if re.match(rf"{package}-[^/]+\.dist-info/", name)}
    native = {name for name in names if re.match(rf"{package}/_\w+\.[^/]*(so|pyd)$", name)}
    sources = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for path in folder.rglob("*")
        if path.suffix in {".py", ".pyi"} or path.name == "py.typed"
    }
    problems = [f"{name} should not be in it" for name in names - metadata - native - sources]
    problems += [f"{name} is missing" for name in sources - names]
    if {name.split("/")[1].split(".")[0] for name in native} != modules or len(native) != 1:
        problems.append(f"it contains these native modules: {sorted(native)}")
    if not any(name.endswith("/licenses/LICENSE") for name in metadata):
        problems.append("the license is missing")
    if package == "jax_bnar" and not any(name.endswith("/licenses/AUTHORS") for name in metadata):
        problems.append("the file AUTHORS is missing")
    if package == "jax_bnar" and "jax_bnar/py.typed" not in names:
        problems.append("jax_bnar/py.typed is missing: type checkers would ignore the annotations")
    print(f"{pathlib.Path(wheel).name}: {len(names)} files", *sorted(problems), sep="\n  ")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
