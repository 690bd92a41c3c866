"""The data pipeline of examples/resnet50: folders, decoding, order, damaged pictures."""

import itertools
import multiprocessing
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import resnet50_example as example

# isort: split
from PIL import Image
from resnet50.config import Data
from resnet50.data import decode, digits, folder, pipeline, sources, synthetic
from resnet50.data.pictures import Dataset, UnreadablePictureError
from resnet50.errors import UserError


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("pictures")
    example.save_pictures(root, train=6, val=5)
    return root


@pytest.fixture
def damaged(tmp_path: pathlib.Path) -> Dataset:
    """22 pictures, of which one is junk, one is truncated and one is empty."""
    example.save_pictures(tmp_path, train=6, val=5)
    (tmp_path / "train" / "china" / "002.jpg").write_bytes(b"no picture")
    cut = tmp_path / "train" / "flower" / "001.jpg"
    cut.write_bytes(cut.read_bytes()[:900])
    (tmp_path / "val" / "flower" / "000.jpg").write_bytes(b"")
    return folder.load(tmp_path, 16)


def batches(dataset: Dataset, count: int, size: int = 4, **options: Any) -> list[pipeline.Batch]:
    options = {"seed": 0, "workers": 0, **options}
    iterator = pipeline.TrainingBatches(dataset, size, **options)
    try:
        return [next(iterator) for _ in range(count)]
    finally:
        iterator.close()


def assert_same(left: list[pipeline.Batch], right: list[pipeline.Batch]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


class Numbered:
    """Pictures whose only pixel is a random number in training, and their index in evaluation."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def label(self, index: int) -> int:
        return index

    def name(self, index: int) -> str:
        return str(index)

    def for_training(self, index: int, generator: np.random.Generator) -> np.ndarray:
        return np.full((1, 1, 1), generator.integers(256), np.uint8)

    def for_evaluation(self, index: int) -> np.ndarray:
        return np.full((1, 1, 1), index, np.uint8)


def numbered(count: int) -> Dataset:
    split = Numbered(count)
    return Dataset("numbers", split, split, ("a",), (1, 1, 1), (0.5,), (0.5,), f"numbers-{count}")


def test_folders_are_classes(pictures: pathlib.Path) -> None:
    dataset = sources.open_source("folder", Data(images=pictures, image_size=16))
    assert dataset.classes == ("china", "flower")
    assert (len(dataset.train), len(dataset.val)) == (12, 10)
    for split, count in (("train", 6), ("val", 5)):
        listed = getattr(dataset, split)
        for index in range(len(listed)):
            expected = pictures / split / dataset.classes[index // count]
            assert listed.path(index) == expected / f"{index % count:03}.jpg"
            assert listed.label(index) == index // count
    assert str(pictures) in dataset.description


def test_fingerprint_knows_the_pictures(tmp_path: pathlib.Path) -> None:
    example.save_pictures(tmp_path, train=2, val=1)
    before = folder.load(tmp_path, 8).fingerprint
    assert folder.load(tmp_path, 16).fingerprint == before
    (tmp_path / "train" / "china" / "000.jpg").rename(tmp_path / "train" / "china" / "005.jpg")
    assert folder.load(tmp_path, 8).fingerprint != before


def test_bad_folders_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="train cannot be listed"):
        folder.load(tmp_path, 8)
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match="train has no folders"):
        folder.load(tmp_path, 8)
    (tmp_path / "train" / "cat").mkdir()
    (tmp_path / "val" / "dog").mkdir()
    with pytest.raises(UserError, match=r"val has the class 'dog', which .*train lacks"):
        folder.load(tmp_path, 8)
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "cat")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no picture")
    with pytest.raises(UserError, match=r"class folder .*train/cat has no pictures"):
        folder.load(tmp_path, 8)


def test_random_boxes_are_inside_and_of_inceptions_size() -> None:
    generator = np.random.default_rng(0)
    areas, ratios = [], []
    for _ in range(2000):
        left, top, right, bottom = decode.random_box(400, 300, generator)
        assert 0 <= left < right <= 400
        assert 0 <= top < bottom <= 300
        areas.append((right - left) * (bottom - top) / (400 * 300))
        ratios.append((right - left) / (bottom - top))
    assert 0.07 < min(areas) < 0.12
    assert 0.9 < max(areas) <= 1
    assert 0.73 < min(ratios) < 0.77
    assert 1.3 < max(ratios) < 1.37
    # No such box fits in this picture, so its middle is used, with the nearest allowed ratio.
    assert decode.random_box(1000, 30, generator) == (480, 0, 520, 30)


@pytest.mark.parametrize("extension", ["jpg", "png"])
def test_decoding_takes_the_box(tmp_path: pathlib.Path, extension: str) -> None:
    """A JPEG that is decoded at a fraction of its size gives the same up to smoothing."""
    rows, columns = np.mgrid[0:240, 0:320]
    shades = np.stack([columns * 255 / 319, rows * 255 / 239, 0 * rows], -1).astype(np.uint8)
    path = tmp_path / f"picture.{extension}"
    Image.fromarray(shades).save(path)
    square = decode.centre_crop(path, 16)
    assert square.shape == (16, 16, 3)
    assert square.dtype == np.uint8
    centres = (np.arange(16) + 0.5) / 16 * 210  # 7/8 of the shorter side, 240
    expected = np.zeros((16, 16, 3))
    expected[..., 0] = ((320 - 210) / 2 + centres) * 255 / 319
    expected[..., 1] = (((240 - 210) / 2 + centres) * 255 / 239)[:, None]
    np.testing.assert_allclose(square, expected, atol=6)


def test_flips_half_of_the_pictures(pictures: pathlib.Path, monkeypatch: Any) -> None:
    path = pictures / "train" / "china" / "000.jpg"
    monkeypatch.setattr(decode, "random_box", lambda w, h, _: (0.0, 0.0, float(w), float(h)))
    generator = np.random.default_rng(0)
    squares = [decode.random_resized_crop(path, 16, generator) for _ in range(64)]
    flipped = [np.array_equal(square, squares[0][:, ::-1]) for square in squares]
    same = [np.array_equal(square, squares[0]) for square in squares]
    assert all(a != b for a, b in zip(flipped, same, strict=True))
    assert 20 < sum(flipped) < 44


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "I;16"])
def test_every_colour_mode_becomes_rgb(tmp_path: pathlib.Path, mode: str) -> None:
    path = tmp_path / ("picture.jpg" if mode == "CMYK" else "picture.png")
    grey = Image.new("RGB", (20, 20), (200, 200, 200))
    if mode == "I;16":
        grey = Image.fromarray(np.full((20, 20), 200 * 257, np.uint16))
    else:
        grey = grey.quantize() if mode == "P" else grey.convert(mode)
    grey.save(path)
    np.testing.assert_allclose(decode.centre_crop(path, 8), np.full((8, 8, 3), 200), atol=3)


def test_each_epoch_shows_every_picture_once_in_a_new_order_and_view() -> None:
    first, second = np.split(
        np.stack([[b["label"], b["image"].ravel()] for b in batches(numbered(12), 6)]), 2
    )
    orders = [epoch[:, 0].ravel().tolist() for epoch in (first, second)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
    assert orders[0] != orders[1]
    views = [dict(zip(e[:, 0].ravel(), e[:, 1].ravel(), strict=True)) for e in (first, second)]
    assert views[0] != views[1]
    assert_same(batches(numbered(12), 3), batches(numbered(12), 3))
    other = [batch["label"].tolist() for batch in batches(numbered(12), 3, seed=1)]
    assert list(itertools.chain(*other)) != orders[0]


@pytest.mark.slow
def test_batches_are_the_same_from_any_number_of_workers(pictures: pathlib.Path) -> None:
    dataset = folder.load(pictures, 8)
    assert_same(batches(dataset, 5), batches(dataset, 5, workers=2))


LEAVES_NOTHING_BEHIND = """
import gc
import pathlib
import sys

gc.disable()  # as in a program that ends before the collector would run
sys.path.append({example!r})

if __name__ == "__main__":
    from resnet50.data import folder, pipeline

    # A batch of pictures this large goes through shared memory.
    dataset = folder.load(pathlib.Path({pictures!r}), 64)
    for batch in pipeline.evaluation_batches(dataset, 10, workers=1):
        assert batch["image"].nbytes > 1 << 16
    training = pipeline.TrainingBatches(dataset, 10, seed=0, workers=1)
    next(training)
    training.close()
"""


@pytest.mark.slow
def test_no_semaphore_or_shared_memory_is_leaked(
    pictures: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Python's resource tracker reports these when the program ends."""
    program = tmp_path / "program.py"
    places = {"example": str(example.EXAMPLE), "pictures": str(pictures)}
    program.write_text(LEAVES_NOTHING_BEHIND.format(**places))
    finished = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    assert "leaked" not in finished.stderr


def test_processes_share_each_batch() -> None:
    whole = batches(numbered(15), 5, size=6)
    parts = [batches(numbered(15), 5, size=2, shard=(process, 3)) for process in range(3)]
    for index, batch in enumerate(whole):
        shared = [part[index] for part in parts]
        for name in ("label", "image"):
            joined = np.concatenate([part[name] for part in shared])
            assert sorted(joined.ravel()) == sorted(batch[name].ravel())


def test_state_continues_behind_the_batch(pictures: pathlib.Path) -> None:
    dataset = folder.load(pictures, 8)
    expected = batches(dataset, 7)
    first = pipeline.TrainingBatches(dataset, 4, seed=0, workers=0)
    for _ in range(4):
        next(first)
    state = first.state
    next(first)  # read after the checkpoint; then the run was killed
    again = pipeline.TrainingBatches(dataset, 4, seed=0, workers=0)
    again.restore(state)
    assert_same([next(again) for _ in range(3)], expected[4:])
    other = pipeline.TrainingBatches(dataset, 4, seed=1, workers=0)
    with pytest.raises(UserError, match="trained on other pictures, or in another order"):
        other.restore(state)


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("count", [1, 7, 12, 13])
def test_evaluation_counts_every_picture_once(count: int, processes: int) -> None:
    dataset = numbered(count)
    shares = [
        list(pipeline.evaluation_batches(dataset, 4, 0, (process, processes)))
        for process in range(processes)
    ]
    assert len({len(share) for share in shares}) == 1  # all processes must take part in each step
    seen = []
    for batch in itertools.chain(*shares):
        assert batch["image"].shape == (4, 1, 1, 1)
        assert all(len(values) == 4 for values in batch.values())
        assert (batch["unreadable"] == -1).all()
        counted = batch["weight"] == 1
        assert (batch["weight"][~counted] == 0).all()
        np.testing.assert_array_equal(batch["image"].ravel()[counted], batch["label"][counted])
        seen += batch["label"][counted].tolist()
    assert sorted(seen) == list(range(count))


def test_unreadable_pictures_are_replaced_in_training(damaged: Dataset) -> None:
    seen = batches(damaged, 6)
    unreadable = np.concatenate([batch["unreadable"] for batch in seen])
    assert sorted(set(unreadable)) == [-1, 2, 7]
    names = [damaged.train.name(index) for index in (2, 7)]
    assert [name[-14:] for name in names] == ["/china/002.jpg", "flower/001.jpg"]
    assert all(batch["image"].shape == (4, 16, 16, 3) for batch in seen)
    labels = np.concatenate([batch["label"] for batch in seen])
    assert (labels[unreadable == 2] == 0).all()
    assert (labels[unreadable == 7] == 1).all()


def test_unreadable_pictures_do_not_count_in_evaluation(damaged: Dataset) -> None:
    (batch,) = pipeline.evaluation_batches(damaged, 10, 0)
    assert np.flatnonzero(batch["unreadable"] >= 0).tolist() == [5]
    assert batch["unreadable"][5] == 5
    assert batch["weight"].tolist() == [1.0] * 5 + [0.0] + [1.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_disk_that_is_gone_is_no_unreadable_picture(tmp_path: pathlib.Path, workers: int) -> None:
    example.save_pictures(tmp_path, train=10, val=1)
    dataset = folder.load(tmp_path, 8)
    (tmp_path / "train").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"16 pictures in a row.*is the disk still there"):
        batches(dataset, 1, workers=workers)


@pytest.mark.slow
def test_a_worker_that_was_killed(pictures: pathlib.Path) -> None:
    iterator = pipeline.TrainingBatches(folder.load(pictures, 8), 4, seed=0, workers=1)
    next(iterator)
    for worker in multiprocessing.active_children():
        worker.kill()
    with pytest.raises(UserError, match=r"decodes pictures was killed.*--resume"):
        list(itertools.islice(iter(iterator.__next__, None), 10))  # some were decoded already
    iterator.close()


def test_what_pillow_says_is_passed_on(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "junk.jpg"
    path.write_bytes(b"junk")
    with pytest.raises(UnreadablePictureError, match=r"junk.jpg cannot be read \(Unidentified"):
        decode.centre_crop(path, 8)
    with pytest.raises(UnreadablePictureError, match="FileNotFoundError"):
        decode.centre_crop(tmp_path / "missing.jpg", 8)


def test_digits_and_noise_say_what_they_are() -> None:
    real, noise = digits.load(), synthetic.make(100, 16, 7)
    assert "DIGITS" in real.description
    assert "SYNTHETIC" in noise.description
    assert (len(real.train), len(real.val), len(real.classes)) == (1437, 360, 10)
    images = np.stack([real.train.for_evaluation(index) for index in range(len(real.train))])
    assert images.max() == 240
    np.testing.assert_allclose(
        [images.mean() / 255, images.std() / 255], [*real.mean, *real.std], rtol=1e-6
    )
    (batch,) = batches(noise, 1, size=64)
    assert batch["image"].shape == (64, 16, 16, 3)
    assert set(batch["label"]) <= set(range(7))
    assert len(set(batch["label"])) > 3
