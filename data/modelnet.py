"""ModelNet40 for the scripts: which data set the flags mean, and batches that towers can share.

make_dataset = functools.partial(modelnet.make_dataset, "train", data_path="data")
make_reader = functools.partial(make_point_reader, make_dataset=make_dataset, seed=1)
with GeneratorEnqueuer(make_reader) as readers:
    batches = modelnet.SharedBatches(readers, smallest=4)
    batch = batches.get()
"""

import functools
import os

import numpy as np

from data import modelnet_dataset, modelnet_h5_dataset
from data.data_util import GeneratorEnqueuer
from data.point_batches import make_point_reader
from data.point_files import fingerprint
from utils.provider import getDataFiles


class BatchError(ValueError):
    """A batch cannot be used; the message says why."""


def make_dataset(
    split, *, data_path="data", normal=False, num_point=1024, batch_size=32, **keywords
):
    """The data set of train_multi_gpu.py and evaluate.py: HDF5 files, or text files with normals.

    Args:
      split: 'train', whose clouds come in random order, or 'test'.
      data_path: folder that holds modelnet40_ply_hdf5_2048/ or modelnet40_normal_resampled/.
      normal: whether to take the text files, and all six columns of them.
      num_point: points of a cloud.
      batch_size: clouds of a batch.
      **keywords: sampling and rng of the classes.

    Returns:
      ModelNetH5Dataset or ModelNetDataset.

    Raises:
      FileNotFoundError: it is not there.
      ValueError: an argument is out of range.
    """
    keywords |= {"data_path": data_path, "batch_size": batch_size, "npoints": num_point}
    if normal:
        return modelnet_dataset.ModelNetDataset(
            modelnet_dataset.DATA_SET, split=split, normal_channel=True, **keywords
        )
    return modelnet_h5_dataset.ModelNetH5Dataset(
        f"{modelnet_h5_dataset.DATA_SET}/{split}_files.txt", shuffle=split == "train", **keywords
    )


def class_names(dataset):
    """Names of the classes in the order of their numbers; empty where the data set has none.

    Args:
      dataset: of `make_dataset`.
    """
    if isinstance(dataset, modelnet_dataset.ModelNetDataset):
        return dataset.cat
    path = os.path.join(os.path.dirname(dataset.list_filename), "shape_names.txt")
    return getDataFiles(path) if os.path.isfile(path) else []


def folders(dataset):
    """Folders that the data set's files lie in.

    Args:
      dataset: of `make_dataset`.
    """
    if isinstance(dataset, modelnet_dataset.ModelNetDataset):
        return sorted({dataset.root, *(os.path.dirname(path) for _, path in dataset.datapath)})
    return sorted({os.path.dirname(path) for path in [dataset.list_filename, *dataset.h5_files]})


def check_dataset(dataset, num_classes):
    """Looks for what would end a run later: nothing that can be read, a label out of range.

    Reads the first batch and all labels.

    Args:
      dataset: of `make_dataset`.
      num_classes: labels must be below this.

    Returns:
      (number of clouds, checksum of their names and labels).

    Raises:
      ValueError: with the file's name.
    """
    dataset.has_next_batch()
    labels, names = dataset.all_labels()
    check_labels(labels, names, num_classes)
    known = [f"{os.path.basename(name)} {label}" for name, label in zip(names, labels)]
    return len(known), fingerprint(known)


def check_labels(labels, names, num_classes):
    """Raises a BatchError for a label that the network does not know.

    Args:
      labels: [B] int.
      names: where each cloud comes from.
      num_classes: labels must be below this.
    """
    for label, name in zip(labels, names):
        if not 0 <= label < num_classes:
            raise BatchError(
                f"{name} has the label {label}; the network knows 0 to {num_classes - 1}; correct"
                " the file"
            )


def make_readers(
    make_dataset,
    *,
    seed,
    augment,
    num_readers=1,
    reader="thread",
    max_queue_size=8,
    states=None,
    worker=0,
    num_workers=1,
):
    """Readers that make the batches of a data set ahead, epoch after epoch.

    Args:
      make_dataset: called with `rng=`, returns the data set.
      seed: of the order and the augmentation.
      augment: whether to augment.
      num_readers, reader, max_queue_size, states: of GeneratorEnqueuer. A state of one worker
        continues all others as well.
      worker, num_workers: whose share of the batches to make; `make_dataset` must then give
        batches for all workers together, see data.point_batches.TrainingBatches.

    Returns:
      data_util.GeneratorEnqueuer.
    """
    make_reader = functools.partial(
        make_point_reader,
        make_dataset=make_dataset,
        num_readers=num_readers,
        seed=seed,
        augment=augment,
        worker=worker,
        num_workers=num_workers,
    )
    return GeneratorEnqueuer(
        make_reader,
        num_readers=num_readers,
        max_queue_size=max_queue_size,
        reader=reader,
        states=states,
    )


class SharedBatches:
    """Batches of readers, none of them smaller than the towers need, every cloud used once.

    The last batch of a file or an epoch may be small. One with fewer than `smallest` clouds joins
    the batch before it, or, as the first of an epoch, the one after it; with several workers one of
    which any of them has fewer, so that all make the same number of batches.

    Args:
      readers: data_util.GeneratorEnqueuer over data.point_batches.TrainingBatches.
      smallest: least number of clouds in a batch.
      num_classes: number of classes that the network knows.
    """

    def __init__(self, readers, smallest=1, num_classes=40):
        self._readers = readers
        self._smallest = smallest
        self._num_classes = num_classes
        self._next = None  # (batch, state of the readers after it), fetched to see its size

    def get(self):
        """Waits for the next batch.

        Returns:
          (batch, state). batch: dict as of TrainingBatches. state: of the readers after the last
          cloud of this batch, for `GeneratorEnqueuer(states=...)`.

        Raises:
          BatchError: a whole epoch has fewer than `smallest` clouds, or a label is out of range.
          What `GeneratorEnqueuer.get` raises.
        """
        batch, state = self._next or self._fetch()
        self._next = None
        while not batch["last"]:
            following = self._fetch()
            if min(batch["fewest"], following[0]["fewest"]) >= self._smallest:
                self._next = following
                break
            batch, state = _joined(batch, following[0]), following[1]
        count = len(batch["labels"])
        if count < self._smallest:
            raise BatchError(
                f"an epoch has {count} clouds, but a batch needs at least {self._smallest}; pass"
                " fewer GPUs or more data"
            )
        return batch, state

    def wait_seconds(self):
        """Seconds spent waiting since this was last asked."""
        return self._readers.wait_seconds()

    def _fetch(self):
        batch = self._readers.get()
        check_labels(batch["labels"], batch["names"], self._num_classes)
        return batch, self._readers.get_state()


def _joined(first, second):
    arrays = {key: np.concatenate([first[key], second[key]]) for key in ("points", "labels")}
    fewest = first["fewest"] + second["fewest"]
    return {**second, **arrays, "names": [*first["names"], *second["names"]], "fewest": fewest}
