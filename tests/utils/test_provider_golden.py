"""Augmentations against the original's numbers, input changes and random draws."""

import json
import re

import numpy as np
import pytest

from tests.golden_sets import golden_dir, golden_path
from utils import provider

GIVEN = re.compile(r"(?:_s(?P<s>[\d.]+)_c(?P<c>[\d.]+)|_(?P<a>[\d.]+)(?:_(?P<b>[\d.]+))?)$")


def cases():
    path = golden_dir("pointnet2") / "provider.json"
    if not path.is_file():
        return []
    return [key for key, value in json.loads(path.read_text()).items() if isinstance(value, dict)]


def staged(batch, normal):
    """The data sets' augmentation, step by step."""
    suffix = "_with_normal" if normal else ""
    batch = getattr(provider, "rotate_point_cloud" + suffix)(batch)
    batch = getattr(provider, "rotate_perturbation_point_cloud" + suffix)(batch)
    moved = provider.random_scale_point_cloud(batch[:, :, :3])
    moved = provider.shift_point_cloud(moved)
    batch[:, :, :3] = provider.jitter_point_cloud(moved)
    return provider.shuffle_points(batch)


def function_of(key, record):
    """(function, name of its input) for a key of the set."""
    name = key.removesuffix("_f64")
    normal = "normal" in name or name == "shuffle_points"
    source = "xyz_normal" if normal else "xyz"
    if name.startswith("pipeline_"):
        return lambda batch: staged(batch, normal), source
    angle = re.fullmatch(r"(rotate_point_cloud_by_angle(?:_with_normal)?)_(\d)", name)
    if angle:
        value = record[f"angle_{angle[2]}"]
        return lambda batch: getattr(provider, angle[1])(batch, value), source
    if name == "rotate_perturbation_big_sigma":
        return lambda batch: provider.rotate_perturbation_point_cloud(batch, 0.5), source
    given = GIVEN.search(name)
    values = [float(v) for v in given.groups() if v] if given else []
    function = getattr(provider, name[: given.start()] if given else name)
    return lambda batch: function(batch, *values), source


@pytest.mark.parametrize("key", cases())
def test_golden_function(key):
    record = json.loads(golden_path("pointnet2", "provider.json").read_text())
    arrays = np.load(golden_path("pointnet2", "provider.npz"))
    function, source = function_of(key, record)
    batch = arrays[source].astype(np.float64 if key.endswith("_f64") else np.float32)
    before = batch.copy()
    np.random.seed(record["numpy_seed"])
    result = function(batch)
    assert np.random.uniform() == record[key]["rng_next_uniform_after"]
    np.testing.assert_allclose(result, arrays[key], rtol=1e-6, atol=1e-6)
    assert result.dtype == record[key]["out_dtype"]
    assert (not np.array_equal(batch, before)) == record[key]["input_modified_in_place"]


@pytest.mark.parametrize("key", [key for key in cases() if key.startswith("pipeline_")])
def test_golden_whole_augmentation_in_one_go(key):
    record = json.loads(golden_path("pointnet2", "provider.json").read_text())
    arrays = np.load(golden_path("pointnet2", "provider.npz"))
    batch = arrays[function_of(key, record)[1]]
    batch = batch.astype(np.float64 if key.endswith("_f64") else np.float32)
    np.random.seed(record["numpy_seed"])
    result = provider.augment_batch(batch)
    assert np.random.uniform() == record[key]["rng_next_uniform_after"]
    np.testing.assert_allclose(result, arrays[key], rtol=1e-6, atol=1e-6)
    assert result.dtype == record[key]["out_dtype"]


def test_golden_shuffle_data():
    record = json.loads(golden_path("pointnet2", "provider.json").read_text())
    arrays = np.load(golden_path("pointnet2", "provider.npz"))
    np.random.seed(record["numpy_seed"])
    data, labels, order = provider.shuffle_data(arrays["xyz"], arrays["labels"])
    np.testing.assert_array_equal(data, arrays["shuffle_data_data"])
    np.testing.assert_array_equal(labels, arrays["shuffle_data_labels"])
    np.testing.assert_array_equal(order, arrays["shuffle_data_idx"])
