"""Where the programs of the CUDA toolkit are."""

import os
import shutil


def find_cuda_tool(name: str) -> str | None:
    """A program on PATH or in the CUDA toolkit's folder, where most of them are installed."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [f"{root}/{folder}" for root in roots if root for folder in ("bin", name)]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))
