"""Files of point clouds, and what all data sets of clouds share.

A data set that is not there is one sentence with the path and where it is published; a file of it
that cannot be used is named in one warning and left out.
"""

import hashlib
import os
import re

import numpy as np

from data.icdar_formats import FileError

SAMPLINGS = ("first", "random", "farthest")

_SITE = "https://shapenet.cs.stanford.edu/media"
_SEPARATORS = re.compile(rb"[,;\t]")


class CloudError(FileError):
    """A file of point clouds that cannot be used."""


# ------------------------------------------------------------------------------ where it lies


def located(name, data_path):
    """Path of a data set or list: as given, or below `data_path`, then without a leading `data/`.

    Args:
      name: such as `data/modelnet40_ply_hdf5_2048/train_files.txt`.
      data_path: folder that holds the data sets, or None.

    Returns:
      Path.
    """
    if data_path is None:
        return os.fspath(name)
    return os.path.join(data_path, os.fspath(name).replace("\\", "/").removeprefix("data/"))


def require(path, data_set):
    """Raises a FileNotFoundError, which says what to do, unless `path` exists.

    Args:
      path: file or folder of the data set.
      data_set: folder name of the data set, which is also the name of the published archive.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"no data set at {os.path.abspath(path)}, which should be there; it is published as "
            f"{_SITE}/{data_set}.zip: unpack it there, or pass as data path the folder that holds "
            f"{data_set}/"
        )


# ---------------------------------------------------------------------------------- one cloud


def read_cloud(path):
    """Reads a text file of points: one a line, numbers separated by commas, blanks or tabs.

    Blank lines and lines that begin with `#` are left out.

    Args:
      path: of the file.

    Returns:
      [points, columns] float32.

    Raises:
      CloudError: not there, empty, not finite numbers, or lines of different lengths, as in a
        file that was cut off.
    """
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise CloudError(path, None, f"cannot be read ({error.strerror})") from error
    text = _SEPARATORS.sub(b" ", text.removeprefix(b"\xef\xbb\xbf"))
    if not text.strip():
        raise CloudError(path, None, "is empty")
    try:
        lines = text.decode("ascii").splitlines()
        cloud = np.loadtxt(lines, np.float32, ndmin=2)
    except (ValueError, UnicodeDecodeError) as error:
        reason = str(error).partition(";")[0]
        raise CloudError(path, None, f"is cut off, or not a table of numbers ({reason})") from error
    check_cloud(path, cloud)
    return cloud


def check_cloud(path, cloud):
    """Raises a CloudError for an array [..., points, columns] that is not of finite 3-D points."""
    if cloud.ndim < 2 or not cloud.size:
        raise CloudError(path, None, f"has no points (its shape is {cloud.shape})")
    if cloud.shape[-1] < 3:
        raise CloudError(path, None, f"has {cloud.shape[-1]} columns; x, y and z are required")
    if not np.isfinite(cloud).all():
        raise CloudError(path, None, "has values that are not finite numbers")


def pc_normalize(pc):
    """Moves the mean of a cloud to the origin and its farthest point to distance 1.

    Args:
      pc: [N, 3] float array.

    Returns:
      [N, 3], a new array; all zeros where all points coincide.
    """
    pc = pc - np.mean(pc, axis=0)
    radius = np.max(np.sqrt(np.sum(pc**2, axis=1)))
    return pc / radius if radius > 0 else pc


def farthest_points(xyz, npoints):
    """Farthest point sampling from the first point on.

    Args:
      xyz: [N, 3] array.
      npoints: at most N.

    Returns:
      [npoints] int64 indices; of equal distances the lowest index.
    """
    chosen = np.zeros(npoints, np.int64)
    distance = np.full(len(xyz), np.inf)
    for number in range(1, npoints):
        step = xyz - xyz[chosen[number - 1]]
        np.minimum(distance, np.einsum("nc,nc->n", step, step), out=distance)
        chosen[number] = distance.argmax()
    return chosen


def choose_points(xyz, npoints, sampling, rng):
    """Which points stand for a cloud; a cloud with fewer than `npoints` is taken whole.

    Args:
      xyz: [N, 3] array.
      npoints: number wanted.
      sampling: 'first', as the original; 'random', without repetition; or 'farthest'.
      rng: numpy.random.RandomState, drawn from for 'random' only.

    Returns:
      [min(N, npoints)] indices, or a slice.
    """
    if sampling == "random":
        return rng.permutation(len(xyz))[:npoints]
    if sampling == "farthest":
        return farthest_points(xyz, min(npoints, len(xyz)))
    return slice(npoints)


def repeated(cloud, npoints):
    """A cloud of `npoints` points: if it has fewer, its points in turn, as often as needed."""
    return cloud if len(cloud) == npoints else cloud[np.arange(npoints) % len(cloud)]


def check_arguments(batch_size, npoints, sampling):
    """Raises a ValueError for an argument out of range."""
    for name, value in (("batch_size", batch_size), ("npoints", npoints)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be positive; pass 1 or more")
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling is {sampling!r}; pass one of {', '.join(map(repr, SAMPLINGS))}")


# ----------------------------------------------------------------------------- where we stand


def rng_state(rng):
    """State of a RandomState as a flat dict of arrays, numbers and strings."""
    names = ("rng_kind", "rng_keys", "rng_position", "rng_has_gauss", "rng_cached_gaussian")
    return dict(zip(names, rng.get_state()))


def set_rng_state(rng, state):
    """Puts a RandomState where `rng_state` found it."""
    rng.set_state(
        (
            str(state["rng_kind"]),
            np.asarray(state["rng_keys"], np.uint32),
            int(state["rng_position"]),
            int(state["rng_has_gauss"]),
            float(state["rng_cached_gaussian"]),
        )
    )


def fingerprint(paths):
    """Short text that changes with the names, or the order, of a list of files."""
    names = "\n".join(os.path.basename(path) for path in paths)
    return hashlib.sha1(names.encode("utf-8", "surrogateescape")).hexdigest()


def check_fingerprint(state, paths, where):
    """Raises a ValueError if a state was taken with other files."""
    if str(state["files"]) != fingerprint(paths):
        raise ValueError(
            f"the saved reader state is of other files than the {len(paths)} in {where}; pass the "
            "data set that the training was started with, or start its data anew"
        )
