"""ScanNet scenes with a label for each point (`scannet_data_pointnet2`).

The classes have the names, arguments, items and random draws of PointNet++'s
`scannet/scannet_dataset.py`. The third axis is up; distances are in metres.
"""

import os
import pickle

import numpy as np
from absl import logging

from data.point_files import CloudError, check_arguments, located, require
from utils.provider import random_state

DATA_SET = "scannet_data_pointnet2"
NUM_CLASSES = 21  # 0: not labelled
BLOCK = np.array([1.5, 1.5, 3.0])  # a training item is what is in a block of a scene
MAX_TRIES = 10
VOXELS = np.array([31.0, 31.0, 62.0])  # of a block, about 5 cm wide


class _Unpickler(pickle.Unpickler):
    """Lists of arrays only: a pickle could otherwise run any code."""

    _ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
        ("__builtin__", "bytes"),  # of an empty array, if Python 3 wrote it for Python 2
    }

    def find_class(self, module, name):
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a list of arrays")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


class _Scenes:
    """The scenes of a file, and the weights of their labels; scenes without points are left out."""

    def __init__(self, root, npoints=8192, split="train", *, data_path=None, rng=None):
        check_arguments(1, npoints, "first")
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}; pass 'train' or 'test'")
        self.root = located(root, data_path)
        self.npoints = npoints
        self.split = split
        self.data_filename = os.path.join(self.root, f"scannet_{split}.pickle")
        self._rng = random_state(rng)
        require(self.data_filename, DATA_SET)
        self.scene_points_list, self.semantic_labels_list = _read_scenes(self.data_filename)
        self.labelweights = np.ones(NUM_CLASSES)
        if split == "train":
            counts = np.zeros(NUM_CLASSES)
            for labels in self.semantic_labels_list:
                counts += np.histogram(labels, range(NUM_CLASSES + 1))[0]
            counts = counts.astype(np.float32)
            self.labelweights = 1 / np.log(1.2 + counts / np.sum(counts))

    def __len__(self):
        return len(self.scene_points_list)

    def _scene(self, index):
        """(points, labels int32, lowest corner, highest corner)."""
        points = self.scene_points_list[index]
        labels = self.semantic_labels_list[index].astype(np.int32)
        return points, labels, np.min(points, axis=0), np.max(points, axis=0)

    def _item(self, points, labels, counted, choice):
        """Chosen points, labels and weights; points that are there for context only weigh 0."""
        return points[choice], labels[choice], self.labelweights[labels[choice]] * counted[choice]


class ScannetDataset(_Scenes):
    """One block of each scene, around a point drawn at random.

    A block counts if enough of its points are labelled and 2 % of its voxels are occupied; after
    ten tries any is taken.

    Args:
      root: folder of the data set.
      npoints: points of an item, drawn with repetition.
      split: 'train' or 'test'.
      min_labelled: part of a block's points that must be labelled. The original says 0.7, but its
        division of whole numbers in Python 2 accepts 1 only, the default here.
      data_path: folder that holds the data sets; `root` is then relative to it.
      rng: numpy.random.RandomState; None: NumPy's global one.

    Raises:
      ValueError: an argument is out of range.
      CloudError: the file cannot be used.
      FileNotFoundError: there is no such file.
    """

    def __init__(self, root, npoints=8192, split="train", *, min_labelled=1.0, **keywords):
        super().__init__(root, npoints, split, **keywords)
        self.min_labelled = min_labelled

    def __getitem__(self, index):
        """(points [npoints, 3], labels [npoints] int32, weights [npoints] float64)."""
        points, labels, lowest, highest = self._scene(index)
        for _ in range(MAX_TRIES):
            centre = points[self._rng.choice(len(labels), 1)[0]]
            low, high = centre - BLOCK / 2, centre + BLOCK / 2
            low[2], high[2] = lowest[2], highest[2]
            near = _within(points, low - 0.2, high + 0.2)
            block, block_labels = points[near], labels[near]
            counted = _within(block, low - 0.01, high + 0.01)
            with np.errstate(divide="ignore", invalid="ignore"):  # a scene without any height
                voxels = np.ceil((block[counted] - low) / (high - low) * VOXELS)
            voxels = (voxels[:, 0] * VOXELS[1] + voxels[:, 1]) * VOXELS[2] + voxels[:, 2]
            occupied = len(np.unique(voxels)) / VOXELS.prod()
            if np.mean(block_labels > 0) >= self.min_labelled and occupied >= 0.02:
                break
        choice = self._rng.choice(len(block_labels), self.npoints, replace=True)
        return self._item(block, block_labels, counted, choice)


class ScannetDatasetWholeScene(_Scenes):
    """All blocks of a scene, side by side; an item has as many as there are with points.

    Args:
      root: folder of the data set.
      npoints: points of a block, drawn with repetition.
      split: 'train' or 'test'.
      data_path: folder that holds the data sets; `root` is then relative to it.
      rng: numpy.random.RandomState; None: NumPy's global one.

    Raises:
      As ScannetDataset.
    """

    def __getitem__(self, index):
        """(points [blocks, npoints, 3], labels [blocks, npoints] int32, weights float64)."""
        points, labels, lowest, highest = self._scene(index)
        columns, rows = np.ceil((highest - lowest)[:2] / BLOCK[:2]).astype(int)
        items = []
        for column in range(columns):
            for row in range(rows):
                low = lowest + [column * BLOCK[0], row * BLOCK[1], 0]
                corner = [(column + 1) * BLOCK[0], (row + 1) * BLOCK[1], highest[2] - lowest[2]]
                high = lowest + corner
                near = _within(points, low - 0.2, high + 0.2)
                if not near.any():
                    continue
                block, block_labels = points[near], labels[near]
                counted = _within(block, low - 0.001, high + 0.001)
                choice = self._rng.choice(len(block_labels), self.npoints, replace=True)
                if np.mean(counted[choice]) >= 0.01:
                    items.append(self._item(block, block_labels, counted, choice))
        if not items:
            empty = np.zeros((0, self.npoints))
            return np.zeros((0, self.npoints, 3), points.dtype), empty.astype(np.int32), empty
        return tuple(np.stack(arrays) for arrays in zip(*items))


def get_batch(dataset, idxs, start_idx, end_idx):
    """Items of a ScannetDataset as a batch, as in the original's training script.

    Args:
      dataset: ScannetDataset.
      idxs: order of the items.
      start_idx, end_idx: part of `idxs`.

    Returns:
      (points [B, npoints, 3] float64, labels [B, npoints] int32, weights [B, npoints] float32).
    """
    return _batch(dataset, idxs[start_idx:end_idx], dropout=False, rng=None)


def get_batch_wdp(dataset, idxs, start_idx, end_idx, *, rng=None):
    """`get_batch` with dropout: up to 7/8 of the points become the first one, with weight 0.

    Args:
      dataset, idxs, start_idx, end_idx: as `get_batch`.
      rng: numpy.random.RandomState of the dropout; the original draws it and the items from the
        same one. None: NumPy's global one.
    """
    return _batch(dataset, idxs[start_idx:end_idx], dropout=True, rng=random_state(rng))


def _batch(dataset, idxs, dropout, rng):
    shape = (len(idxs), dataset.npoints)
    points, labels = np.zeros((*shape, 3)), np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    for row, index in enumerate(idxs):
        points[row], labels[row], weights[row] = dataset[int(index)]
        if dropout:
            ratio = rng.random_sample() * 0.875
            dropped = rng.random_sample(dataset.npoints) <= ratio
            points[row, dropped] = points[row, 0]
            labels[row, dropped] = labels[row, 0]
            weights[row, dropped] = 0
    return points, labels, weights


def _within(points, low, high):
    """[N] bool: which points are in a box."""
    return ((points >= low) & (points <= high)).all(axis=1)


def _read_scenes(path):
    """(points, labels) of the scenes: lists of [N, 3] and [N] arrays, N at least 1."""
    try:
        with open(path, "rb") as file:
            # latin1: how NumPy's arrays of Python 2 come through
            points = _Unpickler(file, encoding="latin1").load()
            labels = _Unpickler(file, encoding="latin1").load()
    # What damaged and other files raise.
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        ImportError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        reason = f"is cut off, or not two pickled lists of arrays ({type(error).__name__}: {error})"
        raise CloudError(path, None, reason) from error
    if not all(isinstance(arrays, list | np.ndarray) for arrays in (points, labels)):
        raise CloudError(path, None, "has something else than two lists of arrays")
    if len(points) != len(labels):
        raise CloudError(path, None, f"has {len(points)} scenes and {len(labels)} lists of labels")
    for number, (scene, scene_labels) in enumerate(zip(points, labels)):
        fault = _fault(scene, scene_labels)
        if fault:
            raise CloudError(path, None, f"scene {number} {fault}")
    empty = [number for number, scene in enumerate(points) if len(scene) == 0]
    if len(empty) == len(points):
        raise CloudError(path, None, "has no scene with points")
    if empty:
        logging.warning("%s: scenes without points are left out: %s", path, empty)
        points = [scene for scene in points if len(scene)]
        labels = [scene_labels for scene_labels in labels if len(scene_labels)]
    return points, labels


def _fault(points, labels):
    """What is wrong with a scene, or None."""
    for array in (points, labels):
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
            return f"has {type(array).__name__} where an array of numbers is required"
    if points.ndim != 2 or points.shape[1] != 3 or labels.shape != points.shape[:1]:
        return f"has the shapes {points.shape} and {labels.shape}; [N, 3] and [N] are required"
    if not np.isfinite(points).all():
        return "has coordinates that are not finite numbers"
    if len(labels) and not (labels.min() >= 0 and labels.max() < NUM_CLASSES):
        return f"has labels {labels.min()} to {labels.max()}; 0 to {NUM_CLASSES - 1} are known"
    return None
