"""What several tests of the kernels use."""

import dataclasses
import pathlib
import sys
from typing import Any

import pytest
from cuda_stand_ins import build_driver

from jax_bnar._base.layout import ChannelLayout
from jax_bnar._kernels import convolution_layout


@pytest.fixture(scope="session")
def stand_in_driver(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a stand-in for the NVIDIA driver."""
    if sys.platform != "linux":
        pytest.skip("the driver is looked up as on Linux")
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, what is lowered for a GPU: in the other order where there are spatial axes."""

    def swapped(_: Any, layout: ChannelLayout, x: Any, aval: Any) -> ChannelLayout:
        del x
        return dataclasses.replace(layout, swapped_on_cuda=layout.spatial_sizes(aval.shape) != ())

    monkeypatch.setattr(convolution_layout, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(convolution_layout, "in_program", swapped)
