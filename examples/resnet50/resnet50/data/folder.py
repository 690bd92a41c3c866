"""Pictures in folders: train/<class>/*.jpg and val/<class>/*.jpg."""

import dataclasses
import hashlib
import os
import pathlib
from typing import Final

import numpy as np

from resnet50.data import decode
from resnet50.data.pictures import Dataset
from resnet50.errors import UserError

# Mean and standard deviation of ImageNet's training pictures, customary for other photographs too.
MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)
EXTENSIONS: Final = (".bmp", ".jpeg", ".jpg", ".png", ".webp")


@dataclasses.dataclass(frozen=True)
class FolderPictures:
    """One split. Names are an array, not a list of paths, because each worker gets a copy."""

    root: pathlib.Path
    size: int
    classes: tuple[str, ...]
    labels: np.ndarray
    names: np.ndarray  # bytes, as the file system stores them, whatever their encoding

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def path(self, index: int) -> pathlib.Path:
        return self.root / self.classes[self.label(index)] / os.fsdecode(self.names[index])

    def name(self, index: int) -> str:
        return str(self.path(index))

    def for_training(self, index: int, generator: np.random.Generator) -> np.ndarray:
        return decode.random_resized_crop(self.path(index), self.size, generator)

    def for_evaluation(self, index: int) -> np.ndarray:
        return decode.centre_crop(self.path(index), self.size)


def load(root: pathlib.Path, size: int) -> Dataset:
    """Lists the pictures; raises UserError if a folder is missing or empty."""
    classes = _class_names(root / "train")
    unknown = sorted(set(_class_names(root / "val")) - set(classes))
    if unknown:
        raise UserError(
            f"{root / 'val'} has the class {unknown[0]!r}, which {root / 'train'} lacks; the"
            " classes are the names of the folders in train."
        )
    train = _split(root / "train", size, classes, required=True)
    val = _split(root / "val", size, classes, required=False)
    return Dataset(
        description=f"pictures in {root}",
        train=train,
        val=val,
        classes=classes,
        image_shape=(size, size, 3),
        mean=MEAN,
        std=STD,
        fingerprint=_fingerprint(train),
    )


def _class_names(split: pathlib.Path) -> tuple[str, ...]:
    try:
        names = sorted(entry.name for entry in os.scandir(split) if entry.is_dir())
    except OSError as error:
        raise UserError(
            f"{split} cannot be listed ({error.strerror}); --images must be a folder with"
            " train/<class>/*.jpg and val/<class>/*.jpg."
        ) from error
    if not names:
        raise UserError(f"{split} has no folders; each class needs one, {split}/<class>/*.jpg.")
    return tuple(names)


def _split(
    root: pathlib.Path, size: int, classes: tuple[str, ...], required: bool
) -> FolderPictures:
    """The pictures of all classes; with `required`, every class must have a folder."""
    labels: list[int] = []
    names: list[bytes] = []
    for label, name in enumerate(classes):
        folder = root / name
        if not required and not folder.is_dir():
            continue
        files = sorted(
            os.fsencode(entry.name)
            for entry in os.scandir(folder)
            if entry.name.lower().endswith(EXTENSIONS) and entry.is_file()
        )
        if not files:
            raise UserError(
                f"the class folder {folder} has no pictures ({', '.join(EXTENSIONS)}); add some or"
                " delete the folder."
            )
        names += files
        labels += [label] * len(files)
    return FolderPictures(root, size, classes, np.asarray(labels, np.int32), np.asarray(names))


def _fingerprint(pictures: FolderPictures) -> str:
    digest = hashlib.sha256("\0".join(pictures.classes).encode("utf-8", "surrogateescape"))
    digest.update(pictures.labels.tobytes())
    digest.update(pictures.names.tobytes())
    return digest.hexdigest()[:16]
