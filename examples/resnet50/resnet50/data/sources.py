"""Opens the dataset that the configuration names."""

import pathlib

from resnet50.config import Config, Data, Source
from resnet50.data import folder, synthetic
from resnet50.data.pictures import Dataset
from resnet50.errors import UserError


def open_dataset(config: Config) -> Dataset:
    return open_source(config.source, config.data)


def open_source(source: Source, options: Data) -> Dataset:
    if options.image_size < 1:
        raise UserError(f"--image-size must be positive, got {options.image_size}.")
    if source == "folder":
        if options.images is None:
            raise UserError('the source "folder" needs --images FOLDER.')
        return folder.load(pathlib.Path(options.images), options.image_size)
    if source == "digits":
        from resnet50.data import digits  # scikit-learn takes long to import

        return digits.load()
    return synthetic.make(options.synthetic_images, options.image_size, options.synthetic_classes)
