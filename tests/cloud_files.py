"""Small data sets of clouds for the tests, and the augmentation step by step."""

import h5py
import numpy as np

from utils import provider


def staged_augmentation(batch, rng=None):
    """What `provider.augment_batch` does, with the original's functions one after the other."""
    suffix = "_with_normal" if batch.shape[2] == 6 else ""
    batch = getattr(provider, "rotate_point_cloud" + suffix)(batch.copy(), rng=rng)
    batch = getattr(provider, "rotate_perturbation_point_cloud" + suffix)(batch, rng=rng)
    moved = provider.random_scale_point_cloud(batch[:, :, :3], rng=rng)
    moved = provider.shift_point_cloud(moved, rng=rng)
    batch[:, :, :3] = provider.jitter_point_cloud(moved, rng=rng)
    return provider.shuffle_points(batch, rng=rng)


def write_h5_set(folder, counts, points=16, kind="train"):
    """HDF5 files with that many clouds each; cloud k of all is filled with k, its label is k.

    Returns:
      Path of the list.
    """
    folder = folder / "modelnet40_ply_hdf5_2048"
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    names = []
    for number, count in enumerate(counts):
        labels = np.arange(first, first + count, dtype=np.uint8)
        data = np.ones((count, points, 3), np.float32) * labels[:, None, None]
        data += np.arange(points)[:, None] / 1024
        with h5py.File(folder / f"{kind}{number}.h5", "w") as file:
            file["data"] = data
            file["label"] = labels[:, None]
        names.append(f"data/{folder.name}/{kind}{number}.h5")
        first += count
    path = folder / f"{kind}_files.txt"
    path.write_text("\n".join(names) + "\n")
    return path


def write_text_set(folder, clouds, kind="train", separator=","):
    """A text data set; `clouds` maps names such as cup_0001 to [N, columns] arrays."""
    folder = folder / "modelnet40_normal_resampled"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shape_names.txt").write_text("cup\nnight_stand\n")
    (folder / f"modelnet40_{kind}.txt").write_text("".join(f"{name}\n" for name in clouds))
    for name, cloud in clouds.items():
        path = folder / name.rpartition("_")[0] / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        lines = [separator.join(f"{value:.6f}" for value in point) for point in cloud]
        path.write_text("".join(line + "\n" for line in lines))
    return folder


def epoch_of(dataset, augment=False):
    """All batches up to the end of the epoch."""
    batches = []
    while dataset.has_next_batch():
        batches.append(dataset.next_batch(augment))
    return batches
