"""Each BatchNorm site of ResNet-50 against peers in one process."""
