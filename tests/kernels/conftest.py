"""What several tests of the kernels use."""

import pathlib
import sys

import pytest
from cuda_stand_ins import build_driver


@pytest.fixture(scope="session")
def stand_in_driver(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a stand-in for the NVIDIA driver."""
    if sys.platform != "linux":
        pytest.skip("the driver is looked up as on Linux")
    return build_driver(tmp_path_factory.mktemp("driver"))
