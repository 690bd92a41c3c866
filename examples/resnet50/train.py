"""Trains ResNet-50, with fused or with plain BatchNorm.

    python examples/resnet50/train.py folder --images FOLDER   # with train/<class>/*.jpg, val/...
    python examples/resnet50/train.py digits --norm flax       # a minute on a laptop
    python examples/resnet50/train.py synthetic                # speed, without pictures

Each has its own defaults: `train.py digits --help`. README.md says what comes out.
"""

import sys

if __name__ == "__main__":
    # Only here: the processes that decode pictures import this file too, and need none of these.
    from resnet50 import config, errors, loop

    sys.exit(errors.run(lambda: loop.train(config.from_command_line())))
