"""Checks that a wheel contains exactly the files it should: check_wheel.py WHEEL."""

import pathlib
import re
import sys
import zipfile

PACKAGE = pathlib.Path(__file__).parents[1] / "jax_bnar"


def main(wheel: str) -> int:
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if re.match(r"jax_bnar-[^/]+\.dist-info/", name)}
    native = {name for name in names if re.match(r"jax_bnar/_(native|cuda)\.[^/]*(so|pyd)$", name)}
    sources = {
        f"jax_bnar/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.suffix in {".py", ".pyi"} or path.name == "py.typed"
    }
    problems = [f"{name} should not be in it" for name in names - metadata - native - sources]
    problems += [f"{name} is missing" for name in sources - names]
    if sum("/_native." in name for name in native) != 1:
        problems.append(f"it contains these native modules: {sorted(native)}")
    if not any(name.endswith("/licenses/LICENSE") for name in metadata):
        problems.append("the license is missing")
    if "jax_bnar/py.typed" not in names:
        problems.append("jax_bnar/py.typed is missing: type checkers would ignore the annotations")
    print(f"{pathlib.Path(wheel).name}: {len(names)} files", *sorted(problems), sep="\n  ")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
