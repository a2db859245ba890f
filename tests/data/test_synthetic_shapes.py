"""The made-up data set of shapes."""

import numpy as np
import pytest

from data import synthetic_shapes
from data.modelnet_h5_dataset import ModelNetH5Dataset
from data.synthetic_shapes import SHAPE_NAMES, SHAPES, ShapeOptions, make_cloud, make_dataset
from tests.cloud_files import epoch_of

FOLDER = "modelnet40_ply_hdf5_2048"
SMALL = ShapeOptions(points=64, clouds_per_file=15)


def read(folder, kind):
    path = folder / FOLDER / f"{kind}_files.txt"
    batches = epoch_of(ModelNetH5Dataset(path, 100, 64, shuffle=False))
    return [np.concatenate(part) for part in zip(*batches)]


def test_layout_and_contents(tmp_path):
    assert make_dataset(tmp_path / "set", 40, 20, SMALL, seed=1)
    folder = tmp_path / "set" / FOLDER
    lines = (folder / "train_files.txt").read_text().splitlines()
    assert lines == [f"data/{FOLDER}/ply_data_train{n}.h5" for n in range(3)]
    assert (folder / "shape_names.txt").read_text().split() == list(SHAPE_NAMES)
    for kind, count in (("train", 40), ("test", 20)):
        points, labels = read(tmp_path / "set", kind)
        assert points.shape == (count, 64, 3) and labels.dtype == np.uint8
        assert (np.bincount(labels, minlength=len(SHAPES)) == count // len(SHAPES)).all()
        assert np.abs(points.mean(axis=1)).max() < 1e-5
        np.testing.assert_allclose(np.linalg.norm(points, axis=2).max(axis=1), 1, rtol=1e-5)


def test_seed_decides_everything_and_the_splits_differ(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_dataset(tmp_path / name, 20, 20, SMALL, seed=seed)
    first, same, other = (read(tmp_path / name, "train")[0] for name in "abc")
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)
    test = read(tmp_path / "a", "test")[0]
    assert not any(np.array_equal(one, two) for one in first for two in test)


def test_same_again_is_left_and_other_contents_are_refused(tmp_path):
    target = tmp_path / "set"
    assert make_dataset(target, 10, 10, SMALL)
    assert not make_dataset(target, 10, 10, SMALL)
    with pytest.raises(ValueError, match="is not empty"):
        make_dataset(target, 11, 10, SMALL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["set"]


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((0, 10), "num_train is 0"),
        ((10, -1), "num_test is -1"),
        ((10, 10, ShapeOptions(points=0)), "points is 0"),
        ((10, 10, ShapeOptions(max_missing=1.0)), "max_missing 1.0"),
        ((10, 10, None, 2**32), "seed is 4294967296"),
    ],
)
def test_arguments_out_of_range(tmp_path, arguments, text):
    with pytest.raises(ValueError, match=text):
        make_dataset(tmp_path / "set", *arguments)
    assert not list(tmp_path.iterdir())


def sampled(shape, count=20000):
    rng = np.random.RandomState(0)
    return synthetic_shapes.sample_surface(getattr(synthetic_shapes, shape)(rng), count, rng)


def test_surfaces_are_sampled_by_area():
    sphere = sampled("sphere")
    np.testing.assert_allclose(np.linalg.norm(sphere, axis=1), 1)
    # Archimedes: the area between two heights is in proportion to their distance.
    np.testing.assert_allclose(np.mean(np.abs(sphere), axis=0), 0.5, atol=0.01)
    cone = sampled("cone")
    base = np.isclose(cone[:, 1], cone[:, 1].min())
    height = np.ptp(cone[:, 1])
    assert np.mean(base) == pytest.approx(1 / (1 + np.hypot(1, height)), abs=0.01)
    side = cone[~base]
    middle = side[:, 1].min() + height / 2
    assert np.mean(side[:, 1] < middle) == pytest.approx(0.75, abs=0.02)
    torus = sampled("torus")
    outside = np.hypot(torus[:, 0], torus[:, 2]) > 1
    thickness = np.ptp(torus[:, 1]) / 2
    assert np.mean(outside) == pytest.approx(0.5 + thickness / np.pi, abs=0.015)
    cube = sampled("cube")
    sides = np.ptp(cube, axis=0)
    on_x = np.isclose(np.abs(cube[:, 0]), sides[0] / 2).mean()
    areas = sides.prod() / sides
    assert on_x == pytest.approx(areas[0] / areas.sum(), abs=0.015)


@pytest.mark.parametrize("label", range(len(SHAPES)), ids=SHAPE_NAMES)
def test_clouds_have_all_points_and_differ(label):
    one, two = (make_cloud(label, SMALL, np.random.RandomState(seed)) for seed in (1, 2))
    assert one.shape == (64, 3) and one.dtype == np.float32
    assert not np.array_equal(one, two)


def test_command_line(tmp_path, capsys):
    command = ["--output_dir", str(tmp_path / "x"), "--num_train", "10", "--num_test", "10"]
    assert synthetic_shapes.main([*command, "--points", "32"]) == 0
    assert synthetic_shapes.main([*command, "--points", "32"]) == 0
    assert "left as it is" in capsys.readouterr().out
    assert synthetic_shapes.main(command) == 1
    assert "is not empty" in capsys.readouterr().err
