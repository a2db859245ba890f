"""ModelNet40 and ModelNet10 as text files with normals (`modelnet40_normal_resampled`).

The class has the name, arguments, methods and random draws of PointNet++'s `modelnet_dataset.py`:
same files, same seed, same batches.
"""

import os

import numpy as np
from absl import logging

from data.icdar_formats import warn_once
from data.point_files import (
    CloudError,
    check_arguments,
    check_fingerprint,
    choose_points,
    fingerprint,
    located,
    pc_normalize,
    read_cloud,
    repeated,
    require,
    rng_state,
    set_rng_state,
)
from utils.provider import augment_batch, getDataFiles, random_state

__all__ = ["ModelNetDataset", "pc_normalize"]

DATA_SET = "modelnet40_normal_resampled"


class ModelNetDataset:
    """Batches of clouds of one split; the last one of an epoch may be smaller than the others.

    Of a cloud `npoints` points are taken, then moved and scaled into the unit sphere; if it has
    fewer they repeat in turn. Files that are missing or empty are named in a warning and left out
    from the start. A file that turns out to be unreadable is named when its turn comes, and its
    batch is smaller by one.

    Args:
      root: folder of the data set.
      batch_size: clouds in a batch.
      npoints: points of a cloud.
      split: 'train' or 'test'.
      normalize: whether clouds are moved and scaled into the unit sphere.
      normal_channel: whether points come with their normals, six columns; else x, y and z are used
        whatever the file has.
      modelnet10: whether to take the lists of ModelNet10.
      cache_size: most clouds kept in memory.
      shuffle: whether they come in random order; None: for split 'train'.
      data_path: folder that holds the data sets; `root` is then relative to it.
      sampling: which points: 'first', as the original; 'random'; or 'farthest'.
      rng: numpy.random.RandomState for order and augmentation; None: NumPy's global one.

    Attributes:
      batch_names: paths of the clouds of the last batch.

    Raises:
      ValueError: an argument is out of range.
      FileNotFoundError: the data set, or all of its clouds, do not exist.
    """

    def __init__(
        self,
        root,
        batch_size=32,
        npoints=1024,
        split="train",
        normalize=True,
        normal_channel=False,
        modelnet10=False,
        cache_size=15000,
        shuffle=None,
        *,
        data_path=None,
        sampling="first",
        rng=None,
    ):
        check_arguments(batch_size, npoints, sampling)
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}; pass 'train' or 'test'")
        self.root = located(root, data_path)
        self.batch_size = batch_size
        self.npoints = npoints
        self.normalize = normalize
        self.normal_channel = normal_channel
        self.cache_size = cache_size
        self.cache = {}  # index -> (points, class)
        self.shuffle = split == "train" if shuffle is None else shuffle
        self.sampling = sampling
        self._rng = random_state(rng)
        require(self.root, DATA_SET)
        version = "modelnet10" if modelnet10 else "modelnet40"
        names = ["modelnet10_shape_names.txt"]
        if not modelnet10:  # the published archive has the second name only
            names = ["shape_names.txt", "modelnet40_shape_names.txt"]
        paths = [os.path.join(self.root, name) for name in names]
        self.catfile = next(filter(os.path.exists, paths), paths[-1])
        listed = os.path.join(self.root, f"{version}_{split}.txt")
        require(self.catfile, DATA_SET)
        require(listed, DATA_SET)
        self.cat = getDataFiles(self.catfile)
        self.classes = dict(zip(self.cat, range(len(self.cat))))
        self.datapath = self._find(listed)  # list of (class name, path)
        self.reset()

    def _find(self, listed):
        found, problems = [], []
        for line in getDataFiles(listed):
            shape_id = os.path.basename(line).removesuffix(".txt")
            name = shape_id.rpartition("_")[0]
            path = os.path.join(self.root, name, shape_id + ".txt")
            if name not in self.classes:
                problems.append(f"{shape_id} is of no class in {self.catfile}")
            elif not os.path.isfile(path):
                problems.append(f"{path} does not exist")
            elif not os.path.getsize(path):
                problems.append(f"{path} is empty")
            else:
                found.append((name, path))
        if problems:
            text = "%d clouds in %s are left out: %s"
            shown = "; ".join(problems[:10]) + ("; ..." if len(problems) > 10 else "")
            if not found:
                raise FileNotFoundError(f"all {text % (len(problems), listed, shown)}")
            logging.warning(text, len(problems), listed, shown)
        if not found:
            raise ValueError(f"{listed} lists no cloud; it must have lines such as airplane_0001")
        return found

    def __len__(self):
        return len(self.datapath)

    def __getitem__(self, index):
        """(points [npoints, 3 or 6] float32, class [1] int32) of one cloud.

        Raises:
          CloudError: the file cannot be used.
          ValueError: normals are wanted and the file has none.
        """
        points, label = self._load(index)
        return self._sampled(points, self._rng), label

    def num_channel(self):
        """Channels of a point: 3, or 6 with normals."""
        return 6 if self.normal_channel else 3

    def reset(self):
        """Begins an epoch, in a new random order if `shuffle`."""
        self.idxs = np.arange(len(self.datapath))
        if self.shuffle:
            self._rng.shuffle(self.idxs)
        self.num_batches = (len(self.datapath) + self.batch_size - 1) // self.batch_size
        self.batch_idx = 0
        self._ready = None  # (index of a batch, its clouds)
        self.batch_names = []
        self._used_clouds = False

    def more_batches(self):
        """Whether the epoch has another batch, be its clouds readable or not."""
        return self.batch_idx < self.num_batches

    def has_next_batch(self):
        """Whether the epoch has another batch with at least one cloud that can be read.

        Raises:
          ValueError: an epoch is over and none of its clouds could be read.
        """
        while self.more_batches():
            if self._batch():
                return True
            self.batch_idx += 1
        if not self._used_clouds:
            raise ValueError(
                f"none of the {len(self)} clouds in {self.root} can be read, see the warnings; "
                "unpack the data set again"
            )
        return False

    def batch_clouds(self):
        """Number of clouds of the next batch, readable or not; while there is one."""
        return min(self.batch_size, len(self.idxs) - self.batch_idx * self.batch_size)

    def next_batch(self, augment=False, *, rng=None, rows=slice(None)):
        """The next batch; call it while `has_next_batch()`.

        Args:
          augment: whether to turn, scale, shift, jitter and shuffle (`provider.augment_batch`).
          rng: numpy.random.RandomState for this batch's augmentation and random points; None: the
            data set's.
          rows: slice of the batch to make.

        Returns:
          (points, labels): [B, npoints, 3 or 6] float64, float32 if augmented, and [B] int32; B is
          the number of clouds that are left and can be read, at most batch_size.

        Raises:
          StopIteration: the epoch is over.
        """
        if not self.more_batches():
            raise StopIteration("the epoch is over; call reset()")
        rng = self._rng if rng is None else rng
        items = self._batch(rows)
        self.batch_idx += 1
        self.batch_names = [path for _, _, path in items]
        data = np.zeros((len(items), self.npoints, self.num_channel()))
        labels = np.zeros(len(items), np.int32)
        for row, (points, label, _) in enumerate(items):
            data[row] = self._sampled(points, rng)
            labels[row] = label[0]
        return (augment_batch(data, rng=rng) if augment else data), labels

    def skip_batch(self):
        """Goes on as `next_batch` does, without making the batch or drawing for it."""
        if not self.more_batches():
            raise StopIteration("the epoch is over; call reset()")
        self.batch_idx += 1
        self._used_clouds = True  # others read it

    def all_labels(self):
        """(labels, names) of the whole data set, without its clouds."""
        labels = [self.classes[name] for name, _ in self.datapath]
        return labels, [path for _, path in self.datapath]

    def get_state(self):
        """Where the data set is, as a flat dict of arrays, numbers and strings."""
        return {
            **rng_state(self._rng),
            "files": fingerprint([path for _, path in self.datapath]),
            "idxs": self.idxs.copy(),
            "batch_idx": self.batch_idx,
            "used_clouds": self._used_clouds,
        }

    def set_state(self, state):
        """Continues exactly where `get_state` was called.

        Raises:
          ValueError: the state belongs to other files.
        """
        check_fingerprint(state, [path for _, path in self.datapath], self.root)
        set_rng_state(self._rng, state)
        self.idxs = np.array(state["idxs"], self.idxs.dtype)
        self.batch_idx = int(state["batch_idx"])
        self._ready = None
        self._used_clouds = bool(state["used_clouds"])

    # -------------------------------------------------------------------------------- clouds

    def _batch(self, rows=slice(None)):
        """(points, class, path) of each cloud of the next batch that can be read; see `_load`."""
        if self._ready is None or self._ready[0] != self.batch_idx:
            start = self.batch_idx * self.batch_size
            items = []
            for index in self.idxs[start : start + self.batch_size][rows].tolist():
                try:
                    items.append((*self._load(index), self.datapath[index][1]))
                except CloudError as error:
                    warn_once(error.problem)
            self._ready = self.batch_idx, items
            self._used_clouds = self._used_clouds or bool(items)
        return self._ready[1]

    def _load(self, index):
        """(points, class) of a cloud: the points that are used, or all where they are random."""
        if index in self.cache:
            return self.cache[index]
        name, path = self.datapath[index]
        cloud = read_cloud(path)
        if self.normal_channel and cloud.shape[1] < 6:
            raise ValueError(
                f"{path} has {cloud.shape[1]} columns; normals need 6 (x, y, z and the normal's); "
                "pass normal_channel=False (without --normal) or files with normals"
            )
        points = np.ascontiguousarray(cloud[:, : self.num_channel()])
        if self.sampling != "random":
            points = self._chosen(points, self._rng)
        item = points, np.array([self.classes[name]], np.int32)
        if len(self.cache) < self.cache_size:
            self.cache[index] = item
        return item

    def _chosen(self, points, rng):
        """Copy of the points that are used, in the unit sphere if wanted."""
        chosen = choose_points(points[:, :3], self.npoints, self.sampling, rng)
        points = points[chosen].copy()
        if self.normalize:
            points[:, :3] = pc_normalize(points[:, :3])
        return points

    def _sampled(self, points, rng):
        """[npoints, channels] of what `_load` returned."""
        if self.sampling == "random":
            points = self._chosen(points, rng)
        return repeated(points, self.npoints)
