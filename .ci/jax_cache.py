"""Creates and prints JAX's compilation cache directory inside FOLDER: jax_cache.py FOLDER.

Each processor gets its own directory, because another may lack instructions that the compiled
programs use. Entries written more than two weeks ago are deleted.
"""

import pathlib
import platform
import sys
import time
import zlib

DAYS = 14


def jax_cache(folder: pathlib.Path) -> pathlib.Path:
    cache = folder / f"{zlib.crc32(_processor().encode()):08x}"
    cache.mkdir(parents=True, exist_ok=True)
    oldest = time.time() - DAYS * 24 * 60 * 60
    for file in cache.iterdir():
        # Another run may be deleting the same files.
        try:
            if file.stat().st_mtime < oldest:
                file.unlink()
        except FileNotFoundError:
            continue
    return cache


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    return flags[0] if flags else f"{platform.machine()} {platform.processor()}"


if __name__ == "__main__":
    print(jax_cache(pathlib.Path(sys.argv[1])))
