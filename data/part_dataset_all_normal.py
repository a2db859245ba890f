"""ShapeNetPart with normals (`shapenetcore_partanno_segmentation_benchmark_v0_normal`).

The class has the name, arguments, items and random draws of PointNet++'s
`part_seg/part_dataset_all_normal.py`, and its numbers of the classes.
"""

import json
import os

import numpy as np
from absl import logging

from data.icdar_formats import warn_once
from data.point_files import CloudError, check_arguments, located, pc_normalize, read_cloud, require
from data.python2_order import dict_order
from utils.provider import getDataFiles, random_state

DATA_SET = "shapenetcore_partanno_segmentation_benchmark_v0_normal"
SEG_CLASSES = {
    "Airplane": [0, 1, 2, 3],
    "Bag": [4, 5],
    "Cap": [6, 7],
    "Car": [8, 9, 10, 11],
    "Chair": [12, 13, 14, 15],
    "Earphone": [16, 17, 18],
    "Guitar": [19, 20, 21],
    "Knife": [22, 23],
    "Lamp": [24, 25, 26, 27],
    "Laptop": [28, 29],
    "Motorbike": [30, 31, 32, 33, 34, 35],
    "Mug": [36, 37],
    "Pistol": [38, 39, 40],
    "Rocket": [41, 42, 43],
    "Skateboard": [44, 45, 46],
    "Table": [47, 48, 49],
}  # numbers of the parts of each class
NUM_PARTS = 1 + max(max(parts) for parts in SEG_CLASSES.values())
SPLITS = {"train": ["train"], "val": ["val"], "trainval": ["train", "val"], "test": ["test"]}


class PartNormalDataset:
    """Clouds with a part number for each point.

    The classes are numbered in the order of a dict of CPython 2.7, as checkpoints of the original
    expect: `classes`. `datapath` lists (class name, path) in the order of the items.

    Args:
      root: folder of the data set.
      npoints: points of an item, drawn with repetition.
      classification: whether items are (points, normals, class).
      split: 'train', 'val', 'trainval' or 'test'.
      normalize: whether clouds are moved and scaled into the unit sphere.
      return_cls_label: whether items are (points, normals, parts, class).
      data_path: folder that holds the data sets; `root` is then relative to it.
      cache_size: most clouds kept in memory.
      rng: numpy.random.RandomState to draw points from; None: NumPy's global one.

    Raises:
      ValueError: an argument is out of range.
      FileNotFoundError: the data set, or all clouds of the split, do not exist.
      CloudError: the list of classes, or of the split, is damaged.
    """

    def __init__(
        self,
        root,
        npoints=2500,
        classification=False,
        split="train",
        normalize=True,
        return_cls_label=False,
        *,
        data_path=None,
        cache_size=20000,
        rng=None,
    ):
        check_arguments(1, npoints, "first")
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; pass one of {', '.join(map(repr, SPLITS))}")
        self.root = located(root, data_path)
        self.npoints = npoints
        self.classification = classification
        self.normalize = normalize
        self.return_cls_label = return_cls_label
        self.seg_classes = {name: list(parts) for name, parts in SEG_CLASSES.items()}
        self.cache_size = cache_size
        self.cache = {}  # index -> (points, normals, parts, class)
        self._rng = random_state(rng)
        self.catfile = os.path.join(self.root, "synsetoffset2category.txt")
        require(self.catfile, DATA_SET)
        folders = _read_classes(self.catfile)
        self.cat = {name: folders[name] for name in dict_order(folders)}  # class name -> folder
        self.classes = {name: number for number, name in enumerate(self.cat)}
        self.datapath = self._find(split)

    def _find(self, split):
        wanted = set()
        for part in SPLITS[split]:
            name = f"shuffled_{part}_file_list.json"
            path = os.path.join(self.root, "train_test_split", name)
            require(path, DATA_SET)
            wanted.update(_read_split(path))
        found, unusable = [], []
        for name, folder in self.cat.items():
            folder = os.path.join(self.root, folder)
            require(folder, DATA_SET)
            for entry in sorted(os.listdir(folder)):
                if entry[:-4] in wanted:
                    path = os.path.join(folder, os.path.splitext(entry)[0] + ".txt")
                    usable = os.path.exists(path) and os.path.getsize(path)
                    (found if usable else unusable).append((name, path))
        if unusable:
            paths = ", ".join(path for _, path in unusable)
            text = "%d files that are empty or missing are left out: %s"
            logging.warning(text, len(unusable), paths)
        if not found:
            raise FileNotFoundError(
                f"none of the {len(wanted)} clouds of split {split!r} is in "
                f"{os.path.abspath(self.root)}; unpack the data set again"
            )
        return found

    def __len__(self):
        return len(self.datapath)

    def __getitem__(self, index):
        """One item; its arrays are [npoints, 3] float32 points and normals, [npoints] int32 parts.

        The class is [1] int32.

        Raises:
          CloudError: the file cannot be used.
        """
        points, normals, parts, label = self._load(index)
        choice = self._rng.choice(len(parts), self.npoints, replace=True)
        points, normals, parts = points[choice], normals[choice], parts[choice]
        if self.classification:
            return points, normals, label
        if self.return_cls_label:
            return points, normals, parts, label
        return points, normals, parts

    def _load(self, index):
        if index in self.cache:
            return self.cache[index]
        name, path = self.datapath[index]
        cloud = read_cloud(path)
        if cloud.shape[1] < 7:
            reason = f"has {cloud.shape[1]} columns; 7 are required: x, y, z, normal, part"
            raise CloudError(path, None, reason)
        parts = cloud[:, -1]
        if parts.min() < 0 or parts.max() >= NUM_PARTS:
            reason = f"has parts {parts.min():g} to {parts.max():g}; 0 to {NUM_PARTS - 1} are known"
            raise CloudError(path, None, reason)
        points = cloud[:, :3]
        if self.normalize:
            points = pc_normalize(points)
        label = np.array([self.classes[name]], np.int32)
        item = points, cloud[:, 3:6], parts.astype(np.int32), label
        if len(self.cache) < self.cache_size:
            self.cache[index] = item
        return item


def _read_classes(path):
    """{class name: folder} of `synsetoffset2category.txt`."""
    lines = [line.split() for line in getDataFiles(path)]
    for line in lines:
        if len(line) < 2:
            reason = f"has the line {line[0]!r}; each line must have a class and its folder"
            raise CloudError(path, None, reason)
    return dict(line[:2] for line in lines)


def _read_split(path):
    """Names of the clouds in a list such as `shuffled_train_file_list.json`."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            listed = json.load(file)
    except ValueError as error:  # of another encoding, too
        raise CloudError(path, None, f"is cut off, or not JSON ({error})") from error
    if not isinstance(listed, list):
        raise CloudError(path, None, "must have a list of clouds such as shape_data/02691156/1a04")
    names = []
    for cloud in listed:
        steps = cloud.replace("\\", "/").split("/") if isinstance(cloud, str) else []
        if len(steps) < 3:
            reason = f"lists {cloud!r}; a cloud must be like shape_data/02691156/1a04"
            raise CloudError(path, None, reason)
        names.append(steps[2])
    return names


def get_batch(dataset, idxs, start_idx, end_idx):
    """Items of a PartNormalDataset as a batch, as in the original's training script.

    Items whose file cannot be used are named in a warning and left out.

    Args:
      dataset: PartNormalDataset whose items have parts.
      idxs: order of the items.
      start_idx, end_idx: part of `idxs`.

    Returns:
      (points [B, npoints, 6] float64 with normals, parts [B, npoints] int32), and the class
      [B] int32 where the data set returns it.
    """
    items = []
    for index in idxs[start_idx:end_idx]:
        try:
            items.append(dataset[int(index)])
        except CloudError as error:
            warn_once(error.problem)
    points = np.zeros((len(items), dataset.npoints, 6))
    parts = np.zeros((len(items), dataset.npoints), np.int32)
    labels = np.zeros(len(items), np.int32)
    for row, (xyz, normal, part, *label) in enumerate(items):
        points[row, :, :3] = xyz
        points[row, :, 3:] = normal
        parts[row] = part
        labels[row] = label[0][0] if label else 0
    return (points, parts, labels) if dataset.return_cls_label else (points, parts)
