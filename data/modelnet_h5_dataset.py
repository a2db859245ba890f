"""ModelNet40 as HDF5 files: 2048 points a cloud, x, y and z (`modelnet40_ply_hdf5_2048`).

The class has the name, arguments, methods and random draws of PointNet++'s
`modelnet_h5_dataset.py`: same files, same seed, same batches.

    dataset = ModelNetH5Dataset("data/modelnet40_ply_hdf5_2048/train_files.txt", 16, 1024)
    while dataset.has_next_batch():
        points, labels = dataset.next_batch(augment=True)
    dataset.reset()
"""

import os

import h5py
import numpy as np

from data.icdar_formats import warn_once
from data.point_files import (
    CloudError,
    check_arguments,
    check_cloud,
    check_fingerprint,
    choose_points,
    fingerprint,
    located,
    require,
    rng_state,
    set_rng_state,
)
from utils.provider import (
    augment_batch,
    getDataFiles,
    load_h5,
    loadDataFile,
    random_state,
    shuffle_data,
)

__all__ = ["ModelNetH5Dataset", "getDataFiles", "load_h5", "loadDataFile", "shuffle_data"]

DATA_SET = "modelnet40_ply_hdf5_2048"
# What h5py raises over missing, damaged and other files, and over other contents.
_READ_ERRORS = (OSError, KeyError, RuntimeError, TypeError, ValueError)


class ModelNetH5Dataset:
    """Batches of clouds, file by file: each file's last batch may be smaller than the others.

    Files that are missing, damaged or empty are named in a warning and left out. A listed file is
    looked for beside the list first, then where the list says.

    Args:
      list_filename: text file with one HDF5 file a line.
      batch_size: clouds in a batch.
      npoints: points of a cloud that are used; if it has fewer they repeat in turn.
      shuffle: whether files, and clouds within a file, come in random order.
      data_path: folder that holds the data sets; `list_filename` is then relative to it.
      sampling: which points: 'first', as the original; 'random'; or 'farthest'.
      rng: numpy.random.RandomState for order and augmentation; None: NumPy's global one.

    Attributes:
      batch_names: where the clouds of the last batch come from, such as `ply_data_train0.h5[7]`.

    Raises:
      ValueError: an argument is out of range.
      FileNotFoundError: the list, or all files in it, do not exist.
    """

    def __init__(
        self,
        list_filename,
        batch_size=32,
        npoints=1024,
        shuffle=True,
        *,
        data_path=None,
        sampling="first",
        rng=None,
    ):
        check_arguments(batch_size, npoints, sampling)
        self.list_filename = located(list_filename, data_path)
        self.batch_size = batch_size
        self.npoints = npoints
        self.shuffle = shuffle
        self.sampling = sampling
        self._rng = random_state(rng)
        require(self.list_filename, DATA_SET)
        folder = os.path.dirname(self.list_filename)
        self.h5_files = []
        for name in getDataFiles(self.list_filename):
            beside = os.path.join(folder, os.path.basename(name))
            elsewhere = os.path.exists(name) and not os.path.exists(beside)
            self.h5_files.append(name if elsewhere else beside)
        if not self.h5_files:
            raise ValueError(f"{self.list_filename} lists no file; it must name HDF5 files")
        if not any(map(os.path.exists, self.h5_files)):
            require(self.h5_files[0], DATA_SET)
        self.reset()

    def reset(self):
        """Begins an epoch, in a new random order if `shuffle`."""
        self.file_idxs = np.arange(len(self.h5_files))
        if self.shuffle:
            self._rng.shuffle(self.file_idxs)
        self.current_data = None  # [clouds, points, 3] of one file, in the order of this epoch
        self.current_label = None  # [clouds]
        self.current_file_idx = 0
        self.batch_idx = 0
        self._order = None
        self._used_files = 0
        self.batch_names = []

    def num_channel(self):
        """Channels of a point: 3."""
        return 3

    def has_next_batch(self):
        """Whether the epoch has another batch; reads the next file when it is needed.

        Raises:
          ValueError: an epoch is over and none of its files could be used.
        """
        while self.current_data is None or not self._has_next_batch_in_file():
            if self.current_file_idx >= len(self.h5_files):
                if not self._used_files:
                    raise ValueError(
                        f"none of the {len(self.h5_files)} files in {self.list_filename} can be "
                        "used, see the warnings; unpack the data set again"
                    )
                return False
            self._load_data_file(self.h5_files[self.file_idxs[self.current_file_idx]])
            self.current_file_idx += 1
        return True

    more_batches = has_next_batch

    def batch_clouds(self):
        """Number of clouds of the next batch; after `has_next_batch()`."""
        return min(self.batch_size, len(self.current_data) - self.batch_idx * self.batch_size)

    def next_batch(self, augment=False, *, rng=None, rows=slice(None)):
        """The next batch; call it while `has_next_batch()`.

        Args:
          augment: whether to turn, scale, shift, jitter and shuffle (`provider.augment_batch`).
          rng: numpy.random.RandomState for this batch's augmentation and random points; None: the
            data set's.
          rows: slice of the batch to make.

        Returns:
          (points, labels): [B, npoints, 3] float32 and [B] as stored (uint8), B being what is left
          of the file, at most batch_size.

        Raises:
          StopIteration: the epoch is over.
        """
        if not self.has_next_batch():
            raise StopIteration("the epoch is over; call reset()")
        rng = self._rng if rng is None else rng
        start = self.batch_idx * self.batch_size
        data = self._sampled(self.current_data[start : start + self.batch_size][rows], rng)
        labels = self.current_label[start : start + self.batch_size][rows].copy()
        self.batch_idx += 1
        path = self.h5_files[self.file_idxs[self.current_file_idx - 1]]
        numbers = self._order[start : start + self.batch_size][rows]
        self.batch_names = [f"{path}[{number}]" for number in numbers]
        return (augment_batch(data, rng=rng) if augment else data), labels

    def skip_batch(self):
        """Goes on as `next_batch` does, without making the batch or drawing for it."""
        if not self.has_next_batch():
            raise StopIteration("the epoch is over; call reset()")
        self.batch_idx += 1

    def all_labels(self):
        """(labels, names) of the whole data set, without its clouds; damaged files are left out."""
        all_labels, names = [], []
        for path in self.h5_files:
            try:
                with h5py.File(path, "r") as file:
                    labels = _checked_labels(path, file["label"][:])
            except (CloudError, *_READ_ERRORS):  # named when its turn comes
                continue
            all_labels += labels.tolist()
            names += [f"{path}[{row}]" for row in range(len(labels))]
        return all_labels, names

    def get_state(self):
        """Where the data set is, as a flat dict of arrays, numbers and strings."""
        return {
            **rng_state(self._rng),
            "files": fingerprint(self.h5_files),
            "file_idxs": self.file_idxs.copy(),
            "current_file_idx": self.current_file_idx,
            "batch_idx": self.batch_idx,
            "used_files": self._used_files,
            "loaded": self.current_data is not None,
            "order": np.zeros(0, np.int64) if self._order is None else self._order.copy(),
        }

    def set_state(self, state):
        """Continues exactly where `get_state` was called.

        Raises:
          ValueError: the state belongs to other files, or the file it was in has changed.
        """
        check_fingerprint(state, self.h5_files, self.list_filename)
        set_rng_state(self._rng, state)
        self.file_idxs = np.array(state["file_idxs"], self.file_idxs.dtype)
        self.current_file_idx = int(state["current_file_idx"])
        self.current_data = self.current_label = self._order = None
        if state["loaded"]:
            path = self.h5_files[self.file_idxs[self.current_file_idx - 1]]
            data, labels = self._read(path)
            self._order = np.array(state["order"], np.int64)
            if len(self._order) != len(data):
                raise ValueError(
                    f"{path} has {len(data)} clouds, but {len(self._order)} when the reader state "
                    "was saved; restore the file, or start the data anew"
                )
            self.current_data, self.current_label = data[self._order], labels[self._order]
        self.batch_idx = int(state["batch_idx"])
        self._used_files = int(state["used_files"])

    def _has_next_batch_in_file(self):
        return self.batch_idx * self.batch_size < len(self.current_data)

    def _load_data_file(self, filename):
        self.current_data = self.current_label = self._order = None
        self.batch_idx = 0
        try:
            data, labels = self._read(filename)
        except CloudError as error:
            warn_once(error.problem)
            return
        self._used_files += 1
        if self.shuffle:
            data, labels, self._order = shuffle_data(data, labels, rng=self._rng)
        else:
            self._order = np.arange(len(labels))
        self.current_data, self.current_label = data, labels

    def _read(self, path):
        """(data [clouds, points, 3] float32, labels [clouds]) of one file."""
        try:
            data, labels = load_h5(path)
        except _READ_ERRORS as error:
            raise _unreadable(path, error) from error
        if data.ndim != 3 or labels.size != len(data):
            reason = f"needs data [clouds, points, 3] and a label each, has {data.shape}, "
            raise CloudError(path, None, reason + f"{labels.shape}")
        if data.dtype.kind not in "fiu" or data.shape[2] > 6:
            raise CloudError(
                path, None, f"needs numbers [clouds, points, 3], has {data.dtype} {data.shape}"
            )
        with np.errstate(over="ignore"):  # infinity then, which is named
            data = data[:, :, :3].astype(np.float32, copy=False)
        check_cloud(path, data)
        return data, _checked_labels(path, labels)

    def _sampled(self, clouds, rng):
        """[B, npoints, 3] copy."""
        available = clouds.shape[1]
        if self.sampling == "first" or not len(clouds):
            chosen = clouds[:, : self.npoints].copy()
        else:
            chosen = np.stack(
                [c[choose_points(c, self.npoints, self.sampling, rng)] for c in clouds]
            )
        if available < self.npoints:
            chosen = chosen[:, np.arange(self.npoints) % available]
        return chosen


def _unreadable(path, error):
    """The CloudError for one of _READ_ERRORS, whose own text may have several lines."""
    if isinstance(error, FileNotFoundError):
        return CloudError(path, None, "does not exist")
    text = " ".join(str(error).strip("\"'").split())
    return CloudError(path, None, f"cannot be read as HDF5 clouds ({text})")


def _checked_labels(path, labels):
    """[clouds] labels as stored."""
    labels = labels.reshape(-1)
    whole = labels.dtype.kind in "iu"
    if labels.dtype.kind == "f":
        whole = bool((labels == np.round(labels)).all())
    if not whole:
        raise CloudError(path, None, f"has labels that are no whole numbers ({labels.dtype})")
    return labels
