"""ModelNet batches against those of the original's classes."""

import json
import re
import shutil

import numpy as np
import pytest

from data.modelnet_dataset import ModelNetDataset
from data.modelnet_h5_dataset import ModelNetH5Dataset
from data.point_batches import TrainingBatches
from tests.golden_sets import golden_dir, golden_path


def cases():
    path = golden_dir("pointnet2") / "datasets.json"
    return list(json.loads(path.read_text())["cases"]) if path.is_file() else []


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    """A folder `data` with the sample sets."""
    source = golden_dir("pointnet2") / "sample_data"
    if not source.is_dir():
        pytest.skip(f"no sample data at {source}")
    folder = tmp_path_factory.mktemp("samples") / "data"
    shutil.copytree(source, folder)
    return folder


def make_dataset(name, case, folder, **keywords):
    """The data set of a golden case; what the record does not tell follows from its batches."""
    shapes = [batch["shape"] for batch in case["batches"]]
    size = re.search(r"_b(\d+)$", name)
    full = max(shape[0] for shape in shapes)
    batch_size = int(size[1]) if size else max(full, 4 if "nonormalize" not in name else full)
    npoints = shapes[0][1]
    if name.startswith("h5"):
        kind = "test" if "test" in name else "train"
        shuffle = "shuffle0" not in name and kind == "train"
        path = folder / "modelnet40_ply_hdf5_2048" / f"{kind}_files.txt"
        return ModelNetH5Dataset(path, batch_size, npoints, shuffle, **keywords)
    return ModelNetDataset(
        folder / "modelnet40_normal_resampled",
        batch_size,
        npoints,
        "test" if "test" in name else "train",
        normalize="nonormalize" not in name,
        normal_channel=shapes[0][2] == 6,
        modelnet10="modelnet10" in name,
        shuffle=False if "noshuffle" in name else None,
        **keywords,
    )


def check_batch(points, labels, expected, array):
    assert labels.tolist() == expected["labels"]
    assert str(labels.dtype) == expected["label_dtype"]
    assert list(points.shape) == expected["shape"]
    assert str(points.dtype) == expected["dtype"]
    np.testing.assert_allclose(np.abs(points).sum(dtype="f8"), expected["abs_sum"], rtol=1e-6)
    if array is not None:
        np.testing.assert_allclose(points, array, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", cases())
def test_golden_batches(name, data_folder):
    case = json.loads(golden_path("pointnet2", "datasets.json").read_text())["cases"][name]
    arrays = np.load(golden_path("pointnet2", "datasets.npz"))
    np.random.seed(case["numpy_seed"])
    dataset = make_dataset(name, case, data_folder)
    number = 0
    for epoch in range(case["epochs"]):
        while dataset.has_next_batch():
            points, labels = dataset.next_batch(augment=case["augment"])
            expected = case["batches"][number]
            assert expected["epoch"] == epoch
            key = f"{name}_b{number}"
            check_batch(points, labels, expected, arrays.get(key))
            number += 1
        dataset.reset()
    assert number == len(case["batches"])
    assert np.random.uniform() == case["rng_next_uniform_after"]


@pytest.mark.parametrize("name", cases())
def test_golden_batches_of_one_reader(name, data_folder):
    case = json.loads(golden_path("pointnet2", "datasets.json").read_text())["cases"][name]
    arrays = np.load(golden_path("pointnet2", "datasets.npz"))
    rng = np.random.RandomState(case["numpy_seed"])
    dataset = make_dataset(name, case, data_folder, rng=rng)
    batches = TrainingBatches(dataset, augment=case["augment"], num_epochs=case["epochs"])
    for number, (batch, expected) in enumerate(zip(batches, case["batches"])):
        key = f"{name}_b{number}"
        array = arrays.get(key)
        check_batch(batch["points"], batch["labels"], expected, array)
        assert batch["epoch"] == expected["epoch"]
        following = case["batches"][number + 1 : number + 2]
        assert batch["last"] == (not following or following[0]["epoch"] > batch["epoch"])
    assert number == len(case["batches"]) - 1
