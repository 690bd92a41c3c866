"""Trains ResNet-50, with fused or with plain BatchNorm.

    python examples/resnet50/train.py folder --images FOLDER   # with train/<class>/*.jpg, val/...
    python examples/resnet50/train.py digits --norm flax       # a minute on a laptop
    python examples/resnet50/train.py synthetic                # speed, without pictures

Each source has different defaults: see `train.py digits --help`. README.md describes the output.
"""

import sys

if __name__ == "__main__":
    # Imported here, because the processes that decode pictures import this file but not these.
    from resnet50 import config, errors, loop

    sys.exit(errors.run(lambda: loop.train(config.from_command_line())))
