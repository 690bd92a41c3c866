"""Turns a dataset into this process's batches with grain: shuffled, and decoded by workers.

A batch depends only on its number: batch k is the same for any number of workers and, as a set of
pictures, for any number of processes. The iterator's state is therefore just that number, and a run
can be resumed on another machine.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any, Final

import grain
import numpy as np
from absl import flags

from resnet50.data.pictures import Dataset, Pictures, UnreadablePictureError
from resnet50.errors import UserError

# "image": uint8 (N, H, W, C); "label": int32 (N,); "unreadable": int64 (N,), the index of an
# unreadable picture, or -1. Evaluation adds "weight": float32 (N,).
Batch = dict[str, np.ndarray]

# This many unreadable pictures in a row are no coincidence: the disk is gone.
_MAX_UNREADABLE: Final = 16
_MAX_WORKERS: Final = 16
# Ctrl-C sends SIGINT, and clusters send SIGTERM.
_ENDING: Final = (signal.SIGINT, signal.SIGTERM)
_READ_AHEAD: Final = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
# Shared memory is for pictures; arrays as small as the labels go through the pipe.
_SHARED_MEMORY: Final = grain.experimental.DatasetOptions(min_shm_size=1 << 16)


class _TrainingView(grain.transforms.RandomMap):
    """Decodes and augments; an unreadable picture is replaced by the next readable one."""

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures

    def random_map(self, element: int, rng: np.random.Generator) -> Any:
        unreadable, problem = -1, None
        for offset in range(_MAX_UNREADABLE):
            index = (int(element) + offset) % len(self._pictures)
            try:
                image = self._pictures.for_training(index, rng)
            except UnreadablePictureError as error:
                unreadable = index if unreadable < 0 else unreadable
                problem = error
                continue
            return {
                "image": image,
                "label": np.int32(self._pictures.label(index)),
                "unreadable": np.int64(unreadable),
            }
        raise UnreadablePictureError(
            f"{_MAX_UNREADABLE} pictures in a row cannot be read; the last error: {problem}"
        )


class _EvaluationView(grain.transforms.Map):
    """Decodes; an unreadable picture gets weight 0."""

    def __init__(self, pictures: Pictures, shape: tuple[int, int, int]) -> None:
        self._pictures = pictures
        self._shape = shape

    def map(self, element: int) -> Any:
        index = int(element)
        try:
            image, unreadable = self._pictures.for_evaluation(index), -1
        except UnreadablePictureError:
            image, unreadable = np.zeros(self._shape, np.uint8), index
        return {
            "image": image,
            "label": np.int32(self._pictures.label(index)),
            "unreadable": np.int64(unreadable),
            "weight": np.float32(unreadable < 0),
        }


class TrainingBatches:
    """An endless iterator over this process's batches.

    Restoring the `state` that was read after a batch continues with the next batch.

    Args:
        dataset: the pictures.
        batch_size: pictures per batch in this process.
        seed: the seed of order and augmentation.
        workers: the number of processes that decode.
        shard: the index of this process and the number of processes that share each batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        workers: int,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        process, processes = shard
        order = grain.MapDataset.range(len(dataset.train)).seed(seed).shuffle().repeat()
        pictures = order.random_map(_TrainingView(dataset.train))[process::processes]
        self._batches = pictures.batch(batch_size, drop_remainder=True)
        self._fingerprint = f"{dataset.fingerprint}, seed {seed}, batch {batch_size * processes}"
        self._workers = workers
        self._next = 0
        self._iterator: Any = None

    @property
    def state(self) -> dict[str, Any]:
        return {"next_batch": self._next, "pictures": self._fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken; raises UserError if the pictures are not the same."""
        if state["pictures"] != self._fingerprint:
            raise UserError(
                f"the checkpoint was trained on other pictures, or in another order"
                f" ({state['pictures']}), than these ({self._fingerprint}): resume with the same,"
                " or begin a new run with --init-from."
            )
        self.close()
        self._next = state["next_batch"]

    def __next__(self) -> Batch:
        try:
            if self._iterator is None:
                self._iterator, first = _started(self._batches[self._next :], self._workers)
                batch = _own(first)
            else:
                batch = _own(_next(self._iterator))
        except UnreadablePictureError as error:
            raise UserError(f"{error}; is the disk still there?") from error
        self._next += 1
        return batch

    def close(self) -> None:
        """Stops the workers."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            _stop(iterator)
            del iterator
            _free_shared_memory()


def evaluation_batches(
    dataset: Dataset, batch_size: int, workers: int, shard: tuple[int, int] = (0, 1)
) -> Iterator[Batch]:
    """Every held-out picture of this process once, in batches of one size.

    The last batch is padded with weight 0. If another process has more pictures, this one adds
    batches of padding, because all processes must take part in each step.
    """
    process, processes = shard
    count = -(-len(dataset.val) // (batch_size * processes))
    view = _EvaluationView(dataset.val, dataset.image_shape)
    iterator, batch = None, None
    if process < len(dataset.val):
        pictures = grain.MapDataset.range(process, len(dataset.val), processes).map(view)
        iterator, batch = _started(pictures.batch(batch_size), workers)
    try:
        for _ in range(count):
            yield _padded(_own(batch) if batch else _empty(dataset.image_shape), batch_size)
            batch = None if iterator is None else _next(iterator)
    finally:
        if iterator is not None:
            _stop(iterator)
            del iterator, batch
            _free_shared_memory()


def default_workers(source: str) -> int:
    if source != "folder":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_MAX_WORKERS, (cores or 1) - 1))


def _own(batch: Batch) -> Batch:
    """A copy, because JAX may still read an array after the workers' shared memory is freed."""
    return {name: np.array(values) for name, values in batch.items()}


def _empty(shape: tuple[int, int, int]) -> Batch:
    return {
        "image": np.zeros((0, *shape), np.uint8),
        "label": np.zeros(0, np.int32),
        "unreadable": np.zeros(0, np.int64),
        "weight": np.zeros(0, np.float32),
    }


def _padded(batch: Batch, size: int) -> Batch:
    missing = size - len(batch["label"])
    if not missing:
        return batch
    filled = {
        name: np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])
        for name, values in batch.items()
    }
    filled["unreadable"][size - missing :] = -1
    return filled


def _iterator(batches: Any, workers: int) -> Any:
    if not flags.FLAGS.is_parsed():
        # grain reads absl flags, which raise in programs that have not parsed their flags.
        flags.FLAGS.mark_as_parsed()
    elements = grain.experimental.WithOptionsIterDataset(
        batches.to_iter_dataset(_READ_AHEAD), _SHARED_MEMORY
    )
    if workers:
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1)
        elements = elements.mp_prefetch(options, worker_init_fn=_start_worker)
    return iter(elements)


def _started(batches: Any, workers: int) -> tuple[Any, Any]:
    """The iterator and its first batch; once that is there, the workers have started."""
    with _signals_held() if workers else contextlib.nullcontext():
        iterator = _iterator(batches, workers)
        return iterator, _next(iterator)


def _next(iterator: Any) -> Any:
    """The next batch, or None after the last one."""
    try:
        return next(iterator, None)
    except RuntimeError as error:
        # This is how grain says that a worker is gone.
        if "terminated unexpectedly" not in str(error):
            raise
        raise UserError(
            "a process that decodes pictures was killed, most often because memory (or shared"
            " memory, /dev/shm) ran out; go on with --resume and fewer --workers."
        ) from error


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Holds back the signals that end a run, in this process and in those that it starts meanwhile.

    A worker needs seconds until it reaches `_start_worker`, which ignores them. A signal to the
    whole job would kill it before that, and then the training could not save.
    """
    # Starting the first worker would start the resource tracker, and that unblocks these signals.
    # So it is started before they are blocked.
    resource_tracker.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _stop(iterator: Any) -> None:
    if hasattr(iterator, "close"):
        iterator.close()


def _free_shared_memory() -> None:
    """Frees the semaphores of the workers, and their last batch, after the iterator was dropped.

    References in a cycle keep them alive until the garbage collector runs. If the program ends
    before that, Python reports leaked semaphores and shared memory.
    """
    gc.collect()


def _start_worker(index: int, count: int) -> None:
    """Leaves Ctrl-C and SIGTERM to the parent, and exits with it, even if the parent is killed."""
    del index, count
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent.sentinel,), daemon=True).start()


def _exit_with(sentinel: Any) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
