"""ResNet v1.5 from `torch.nn` with torchvision's module names, so that torchvision is not needed.

Import it after `pytest.importorskip("torch")`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride != 1 or inputs != 4 * width:
            conv = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, stage_sizes: Sequence[int], num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        inputs = width
        for stage, size in enumerate(stage_sizes):
            blocks = []
            for index in range(size):
                stride = 2 if stage and not index else 1
                blocks.append(Bottleneck(inputs, width * 2**stage, stride))
                inputs = 4 * width * 2**stage
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.stages = len(stage_sizes)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Any) -> Any:
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean(dim=(2, 3)))


def randomised(net: Any, seed: int = 0) -> Any:
    """The network with random statistics and parameters, like those after some training."""
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for name, value in net.state_dict().items():
            if name.endswith("num_batches_tracked"):
                continue
            positive = value.ndim == 1 and not name.endswith(("bias", "mean"))
            values = (
                generator.uniform(0.5, 1.5, value.shape)
                if positive
                else generator.normal(size=value.shape) / np.sqrt(value[0].numel())
            )
            value.copy_(torch.from_numpy(values))
    return net


def weights_of(net: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value.detach().numpy().copy() for name, value in net.state_dict().items()}


def logits(net: Any, images: Any) -> np.ndarray[Any, Any]:
    """Logits of NHWC images in float64, in either mode; training updates the statistics."""
    with torch.no_grad():
        return net(torch.from_numpy(np.asarray(images, np.float64)).permute(0, 3, 1, 2)).numpy()
