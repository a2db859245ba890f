"""Makes a small data set of point clouds of simple shapes in the folder layout of ModelNet40.

    python -m data.synthetic_shapes --output_dir demo/data --num_train 800 --num_test 200 --seed 0

writes

    OUTPUT_DIR/modelnet40_ply_hdf5_2048/train_files.txt  test_files.txt  shape_names.txt
    OUTPUT_DIR/modelnet40_ply_hdf5_2048/ply_data_train0.h5 ...  ply_data_test0.h5 ...
    OUTPUT_DIR/synthetic_shapes.json                                 (the parameters)

An HDF5 file has `data` [clouds, 2048, 3] float32 and `label` [clouds, 1] uint8, as ModelNet40's.
Points are uniform on the surface; the second axis, y, is up; clouds lie in the unit sphere. Each
cloud has its own proportions, turn about the up axis, noise, and part that a scanner has not seen.
"""

import argparse
import dataclasses
import os
import sys

import h5py
import numpy as np

from data.point_files import pc_normalize
from data.synthetic_folder import check_seed, write_folder

FORMAT_VERSION = 1  # raise it when the same parameters would give other clouds
MANIFEST = "synthetic_shapes.json"
FOLDER = "modelnet40_ply_hdf5_2048"


@dataclasses.dataclass(frozen=True)
class ShapeOptions:
    """How clouds are made; lengths are in radii of the cloud.

    Attributes:
      points: points of a cloud.
      clouds_per_file: most clouds in one HDF5 file.
      max_noise: largest standard deviation of the noise on each point.
      max_missing: largest part of the surface, on one side, that has no points.
      tilt: largest angle between the shape's axis and the up axis, in degrees.
    """

    points: int = 2048
    clouds_per_file: int = 2048
    max_noise: float = 0.015
    max_missing: float = 0.25
    tilt: float = 5.0


# ------------------------------------------------------------------------------- the shapes
#
# A surface is a list of patches (area, function from a generator and a number to [number, 3]
# points, uniform by area).


def _disc(rng, count, radius, height, inner=0.0):
    angle = rng.uniform(0, 2 * np.pi, count)
    distance = np.sqrt(rng.uniform(inner**2, radius**2, count))
    return np.stack(
        [distance * np.cos(angle), np.full(count, height), distance * np.sin(angle)], axis=1
    )


def _lateral(rng, count, low, high, length):
    """Side of a cone, radius `low` at the bottom and `high` at the top, or of a cylinder."""
    # The radius at a point has a density that grows with it.
    draw = rng.uniform(size=count)
    radius = np.sqrt(low**2 + draw * (high**2 - low**2))
    part = draw if low == high else (radius - low) / (high - low)
    angle = rng.uniform(0, 2 * np.pi, count)
    return np.stack([radius * np.cos(angle), (part - 0.5) * length, radius * np.sin(angle)], axis=1)


def _directions(rng, count):
    points = rng.randn(count, 3)
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def _triangle(rng, count, corners):
    one, two = np.sort(rng.uniform(size=(2, count)), axis=0)
    weights = np.stack([one, two - one, 1 - two], axis=1)
    return weights @ corners


def _sphere_patch(radius=1.0):
    return 4 * np.pi * radius**2, lambda rng, n: radius * _directions(rng, n)


def _triangle_patches(triangles):
    patches = []
    for corners in np.asarray(triangles, np.float64):
        area = np.linalg.norm(np.cross(corners[1] - corners[0], corners[2] - corners[0])) / 2
        patches.append((area, lambda rng, n, corners=corners: _triangle(rng, n, corners)))
    return patches


def _polygon(corners):
    """Triangles of a flat convex polygon."""
    return [[corners[0], corners[i], corners[i + 1]] for i in range(1, len(corners) - 1)]


def _box_patches(width, height, depth, centre=(0, 0, 0)):
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]) / 2
    corners = corners * (width, height, depth) + centre
    faces = ((0, 1, 3, 2), (4, 5, 7, 6), (0, 1, 5, 4), (2, 3, 7, 6), (0, 2, 6, 4), (1, 3, 7, 5))
    return _triangle_patches(sum((_polygon(corners[list(face)]) for face in faces), []))


def _tube_patches(low, high, length, bottom=True, top=True):
    slant = np.hypot(length, high - low)
    patches = [(np.pi * (low + high) * slant, lambda rng, n: _lateral(rng, n, low, high, length))]
    if bottom and low:
        patches.append((np.pi * low**2, lambda rng, n: _disc(rng, n, low, -length / 2)))
    if top and high:
        patches.append((np.pi * high**2, lambda rng, n: _disc(rng, n, high, length / 2)))
    return patches


def sphere(rng):
    """A ball."""
    del rng  # its size is taken out again
    return [_sphere_patch()]


def cube(rng):
    """A box with almost equal sides."""
    return _box_patches(*rng.uniform(0.9, 1.1, 3))


def cylinder(rng):
    """An upright cylinder."""
    return _tube_patches(1, 1, rng.uniform(2.0, 3.5))


def cone(rng):
    """An upright cone."""
    return _tube_patches(1, 0, rng.uniform(1.6, 2.8))


def torus(rng):
    """A lying ring."""
    thickness = rng.uniform(0.2, 0.4)

    def points(rng, count):
        found = np.zeros((0, 3))
        while len(found) < count:  # more area outside than inside: by rejection
            angle, around = rng.uniform(0, 2 * np.pi, (2, 2 * count))
            distance = 1 + thickness * np.cos(around)
            kept = rng.uniform(0, 1 + thickness, 2 * count) < distance
            ring = np.stack(
                [
                    distance * np.cos(angle),
                    thickness * np.sin(around),
                    distance * np.sin(angle),
                ],
                axis=1,
            )
            found = np.concatenate([found, ring[kept]])
        return found[:count]

    return [(4 * np.pi**2 * thickness, points)]


def pyramid(rng):
    """A pyramid on a square."""
    height = rng.uniform(1.3, 2.0)
    base = np.array([[-1, 0, -1], [1, 0, -1], [1, 0, 1], [-1, 0, 1]], np.float64)
    sides = [[base[i], base[(i + 1) % 4], [0, height, 0]] for i in range(4)]
    return _triangle_patches(_polygon(base) + sides)


def capsule(rng):
    """An upright cylinder with round ends."""
    length = rng.uniform(1.5, 2.5)

    def ends(rng, count):
        points = _directions(rng, count)
        points[:, 1] += np.where(points[:, 1] > 0, length / 2, -length / 2)
        return points

    return [*_tube_patches(1, 1, length, False, False), (4 * np.pi, ends)]


def plate(rng):
    """A flat lying box."""
    return _box_patches(rng.uniform(1.4, 2.0), rng.uniform(0.1, 0.2), rng.uniform(1.4, 2.0))


def table(rng):
    """A board on four legs."""
    width, depth, height = rng.uniform(1.4, 2.0), rng.uniform(1.0, 1.4), rng.uniform(0.9, 1.3)
    thick = rng.uniform(0.1, 0.16)
    patches = _box_patches(width, thick, depth, (0, height / 2, 0))
    for x in (-1, 1):
        for z in (-1, 1):
            centre = (x * (width - thick) / 2, 0, z * (depth - thick) / 2)
            patches += _box_patches(thick, height, thick, centre)
    return patches


def cross(rng):
    """Two crossing bars, upright."""
    thick = rng.uniform(0.25, 0.4)
    return _box_patches(2, thick, thick) + _box_patches(thick, rng.uniform(1.8, 2.4), thick)


SHAPES = (sphere, cube, cylinder, cone, torus, pyramid, capsule, plate, table, cross)
SHAPE_NAMES = tuple(shape.__name__ for shape in SHAPES)


def sample_surface(patches, count, rng):
    """Random points of a surface, uniform by area.

    Args:
      patches: list of (area, function), see above.
      count: number of points.
      rng: numpy.random.RandomState.

    Returns:
      [count, 3] float64, in random order.
    """
    areas = np.array([area for area, _ in patches])
    counts = rng.multinomial(count, areas / areas.sum())
    parts = [points(rng, number) for (_, points), number in zip(patches, counts)]
    return np.concatenate(parts)[rng.permutation(count)]


def make_cloud(label, options, rng):
    """One cloud of a class.

    Args:
      label: index into SHAPES.
      options: ShapeOptions.
      rng: numpy.random.RandomState.

    Returns:
      [options.points, 3] float32, in the unit sphere.
    """
    patches = SHAPES[label](rng)
    missing = rng.uniform(0, options.max_missing)
    candidates = int(np.ceil(options.points / (1 - missing)))
    points = sample_surface(patches, candidates, rng)
    # A scanner on one side does not see what is farthest from it.
    towards = _directions(rng, 1)[0]
    seen = np.sort(np.argsort(-(points @ towards), kind="stable")[: options.points])
    points = points[seen]
    about_x, about_z = np.radians(rng.uniform(-options.tilt, options.tilt, 2))
    about_y = rng.uniform(0, 2 * np.pi)
    for angle, (one, other) in ((about_x, (1, 2)), (about_z, (0, 1)), (about_y, (0, 2))):
        cos, sin = np.cos(angle), np.sin(angle)
        points[:, [one, other]] = points[:, [one, other]] @ [[cos, sin], [-sin, cos]]
    points = pc_normalize(points)
    points += rng.uniform(0, options.max_noise) * rng.randn(*points.shape)
    return pc_normalize(points).astype(np.float32)


# --------------------------------------------------------------------------------- the files


def _write_split(folder, split, count, options, seed):
    names = []
    # Every class is there equally often; the order is random.
    order = np.random.RandomState([seed, split == "test", 0]).permutation(count)
    labels = order % len(SHAPES)
    for first in range(0, count, options.clouds_per_file):
        some = labels[first : first + options.clouds_per_file]
        clouds = [
            make_cloud(label, options, np.random.RandomState([seed, split == "test", number]))
            for number, label in enumerate(some, first + 1)
        ]
        name = f"ply_data_{split}{len(names)}.h5"
        with h5py.File(os.path.join(folder, name), "w") as file:
            for key, array in (
                ("data", np.stack(clouds)),
                ("label", some.astype(np.uint8)[:, np.newaxis]),
            ):
                file.create_dataset(
                    key, data=array, compression="gzip", compression_opts=1, track_times=False
                )
        names.append(f"data/{FOLDER}/{name}")
    with open(os.path.join(folder, f"{split}_files.txt"), "w", encoding="utf-8") as file:
        file.writelines(f"{name}\n" for name in names)


def make_dataset(output_dir, num_train, num_test, options=None, seed=0):
    """Writes a data set; the same arguments give the same arrays.

    Args:
      output_dir: folder to make; it appears only once it is complete.
      num_train, num_test: numbers of clouds.
      options: ShapeOptions.
      seed: whole number from 0 to 2**32 - 1.

    Returns:
      True if it was written, False if the folder already holds the data set of these arguments.

    Raises:
      ValueError: arguments out of range, or the folder holds something else.
    """
    options = options or ShapeOptions()
    _check(num_train, num_test, options, seed)
    parameters = {
        "format_version": FORMAT_VERSION,
        "num_train": num_train,
        "num_test": num_test,
        "seed": seed,
        **dataclasses.asdict(options),
    }

    def write(unfinished):
        folder = os.path.join(unfinished, FOLDER)
        os.mkdir(folder)
        _write_split(folder, "train", num_train, options, seed)
        _write_split(folder, "test", num_test, options, seed)
        with open(os.path.join(folder, "shape_names.txt"), "w", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in SHAPE_NAMES)

    return write_folder(output_dir, MANIFEST, parameters, write)


def _check(num_train, num_test, options, seed):
    for name, value in (("num_train", num_train), ("num_test", num_test)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be positive; pass 1 or more")
    check_seed(seed)
    for name in ("points", "clouds_per_file"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; it must be positive; pass 2048")
    if options.max_noise < 0 or not 0 <= options.max_missing < 1:
        raise ValueError(
            f"max_noise is {options.max_noise} and max_missing {options.max_missing}; the first "
            "must not be negative and the second lie within 0 and 1, pass 0.015 and 0.25"
        )


def main(argv=None):
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m data.synthetic_shapes", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--output_dir", required=True, help="folder to make")
    parser.add_argument("--num_train", type=int, default=800, help="training clouds")
    parser.add_argument("--num_test", type=int, default=200, help="test clouds")
    parser.add_argument("--seed", type=int, default=0)
    for field in dataclasses.fields(ShapeOptions):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    args = parser.parse_args(argv)
    options = ShapeOptions(
        **{f.name: getattr(args, f.name) for f in dataclasses.fields(ShapeOptions)}
    )
    try:
        written = make_dataset(args.output_dir, args.num_train, args.num_test, options, args.seed)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    counts = f"{args.num_train} training and {args.num_test} test clouds"
    if written:
        print(f"{counts} written to {args.output_dir}")
    else:
        print(f"{args.output_dir} already holds these {counts}; left as it is")
    return 0


if __name__ == "__main__":
    sys.exit(main())
