"""ScanNet items against what the original's training and evaluation loops fed."""

import json

import numpy as np
import pytest

from data.scannet_dataset import (
    ScannetDataset,
    ScannetDatasetWholeScene,
    get_batch,
    get_batch_wdp,
)
from tests.golden_sets import golden_dir, golden_path


@pytest.fixture
def root():
    folder = golden_dir("pointnet2") / "sample_data" / "scannet_data_pointnet2"
    if not folder.is_dir():
        pytest.skip(f"no sample data at {folder}")
    return folder


@pytest.fixture
def record():
    return json.loads(golden_path("pointnet2", "eval_scannet.json").read_text())


@pytest.fixture
def arrays():
    return np.load(golden_path("pointnet2", "eval_scannet.npz"))


def check(given, arrays, prefix, names):
    for array, name in zip(given, names):
        golden = arrays[f"{prefix}/{name}"]
        np.testing.assert_allclose(array, golden.reshape(array.shape), rtol=1e-6, atol=1e-6)


def test_golden_label_weights(root, record):
    dataset = ScannetDataset(root, 512, "train")
    np.testing.assert_allclose(dataset.labelweights, record["label_weights_train"], rtol=1e-6)


def test_golden_training_batch_with_dropout(root, record, arrays):
    dataset = ScannetDataset(root, arrays["get_batch_wdp/data"].shape[1], "train")
    np.random.seed(record["get_batch_wdp_seed"])
    batch = get_batch_wdp(dataset, np.arange(len(dataset)), 0, len(arrays["get_batch_wdp/data"]))
    check(batch, arrays, "get_batch_wdp", ("data", "label", "smpw"))


def test_golden_blocks_of_the_evaluation(root, record, arrays):
    name = "eval_one_epoch"
    calls, batch_size, npoints, _ = arrays[f"{name}/points_fed"].shape
    dataset = ScannetDataset(root, npoints, "test")
    np.random.seed(record[name]["numpy_seed_before_loop"])
    batches = [
        get_batch(dataset, np.arange(len(dataset)), call * batch_size, (call + 1) * batch_size)
        for call in range(calls)
    ]
    points, labels, weights = (np.stack(part) for part in zip(*batches))
    turned = arrays[f"{name}/points_fed"]
    check((labels, weights), arrays, name, ("labels", "smpw"))
    # The loop turns the clouds about the third axis afterwards.
    np.testing.assert_allclose(points[..., 2], turned[..., 2], rtol=1e-6, atol=1e-6)


def test_golden_whole_scenes(root, record, arrays):
    name = "eval_whole_scene_one_epoch"
    calls, batch_size, npoints, _ = arrays[f"{name}/points_fed"].shape
    dataset = ScannetDatasetWholeScene(root, npoints, "test")
    np.random.seed(record[name]["numpy_seed_before_loop"])
    fed = []
    waiting = None  # blocks of earlier scenes; the loop puts those of a new scene before them
    continued = False
    for number in range(len(dataset)):
        blocks = dataset[number]
        if waiting is not None:
            pairs = zip(waiting, blocks) if continued else zip(blocks, waiting)
            blocks = [np.concatenate(pair) for pair in pairs]
        continued = len(blocks[0]) < batch_size
        waiting = blocks if continued else [part[batch_size:] for part in blocks]
        if not continued:
            fed.append([part[:batch_size] for part in blocks])
    assert len(fed) == calls
    assert np.random.uniform() == record[name]["rng_next_uniform_after"]
    fed = [np.stack(part) for part in zip(*fed)]
    check(fed, arrays, name, ("points_fed", "labels", "smpw"))
