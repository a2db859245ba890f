"""ScanNet files beyond the golden cases."""

import logging
import os
import pickle

import numpy as np
import pytest

from data.point_files import CloudError
from data.scannet_dataset import ScannetDataset, ScannetDatasetWholeScene


def write(folder, scenes, labels, kind="train", protocol=2):
    with open(folder / f"scannet_{kind}.pickle", "wb") as file:
        pickle.dump(scenes, file, protocol=protocol)
        pickle.dump(labels, file, protocol=protocol)


@pytest.fixture
def scene():
    rng = np.random.RandomState(0)
    points = (rng.rand(3000, 3) * [3, 3, 2.5]).astype(np.float32)
    return points, rng.randint(0, 21, 3000).astype(np.int32)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_blocks_have_the_size_and_the_weights(tmp_path, scene, protocol):
    points, labels = scene
    write(tmp_path, [points], [labels], protocol=protocol)
    dataset = ScannetDataset(tmp_path, 256, rng=np.random.RandomState(1))
    block, block_labels, weights = dataset[0]
    assert block.shape == (256, 3) and block_labels.shape == weights.shape == (256,)
    assert (np.ptp(block[:, :2], axis=0) <= 1.9 + 1e-6).all()
    assert 0 < (weights > 0).mean() < 1  # those around the block are context only
    counted = weights > 0
    np.testing.assert_array_equal(weights[counted], dataset.labelweights[block_labels[counted]])


def test_share_of_labelled_points_can_be_asked_for(tmp_path, scene):
    points = np.concatenate([scene[0] + np.float32(shift) for shift in (0, 0.01, 0.02, 0.03)])
    labels = (points[:, 0] > 1.2).astype(np.int32)  # 60 % of the scene
    write(tmp_path, [points], [labels], "test")
    shares = {}
    for least in (0.0, 0.9):
        dataset = ScannetDataset(
            tmp_path, 256, "test", min_labelled=least, rng=np.random.RandomState(1)
        )
        shares[least] = [np.mean(dataset[0][1] > 0) for _ in range(20)]
    assert np.mean(shares[0.9]) > np.mean(shares[0.0]) + 0.1


def test_whole_scene_covers_the_scene(tmp_path, scene):
    write(tmp_path, [scene[0]], [scene[1]], "test")
    blocks, labels, weights = ScannetDatasetWholeScene(tmp_path, 400, "test")[0]
    assert blocks.shape == (4, 400, 3) and labels.shape == weights.shape == (4, 400)
    centres = [block[weight > 0][:, :2].mean(axis=0) for block, weight in zip(blocks, weights)]
    np.testing.assert_allclose(
        centres, [[0.75, 0.75], [0.75, 2.25], [2.25, 0.75], [2.25, 2.25]], atol=0.15
    )


def test_scene_without_height_is_no_crash(tmp_path, scene):
    points = scene[0] * [1, 1, 0]
    write(tmp_path, [points], [scene[1]], "test")
    assert np.isfinite(ScannetDataset(tmp_path, 64, "test")[0][0]).all()


class _Harmful:
    def __reduce__(self):
        return os.mkdir, ("made_by_a_pickle",)


@pytest.mark.parametrize("content", ["cut", "text", "harmful", "lengths", "shapes"])
def test_unusable_files_are_named(tmp_path, scene, content, monkeypatch):
    monkeypatch.chdir(tmp_path)
    points, labels = scene
    write(tmp_path, [points], [labels])
    path = tmp_path / "scannet_train.pickle"
    if content == "cut":
        path.write_bytes(path.read_bytes()[:2000])
    elif content == "text":
        path.write_text("no pickle")
    elif content == "harmful":
        write(tmp_path, _Harmful(), [labels])
    elif content == "lengths":
        write(tmp_path, [points], [])
    else:
        write(tmp_path, [points], [labels[1:]])
    with pytest.raises(CloudError, match="scannet_train.pickle"):
        ScannetDataset(tmp_path)
    assert not (tmp_path / "made_by_a_pickle").exists()


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda points, labels: ([points * np.nan], [labels]), "scene 0 has coordinates that"),
        (lambda points, labels: ([points], [labels + 1]), "scene 0 has labels 1 to 21"),
        (lambda points, labels: ([points], [labels - 1]), "scene 0 has labels -1 to 19"),
        (lambda points, labels: ([points.tolist()], [labels]), "scene 0 has list where"),
        (lambda points, labels: (5, 6), "something else than two lists"),
        (lambda points, labels: ([], []), "no scene with points"),
        (lambda points, labels: ([points[:0]], [labels[:0]]), "no scene with points"),
    ],
)
def test_scenes_that_cannot_be_used_are_named(tmp_path, scene, change, reason):
    write(tmp_path, *change(*scene))
    with pytest.raises(CloudError, match=f"scannet_train.pickle: .*{reason}"):
        ScannetDataset(tmp_path)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_scenes_without_points_are_left_out(tmp_path, scene, protocol, caplog):
    points, labels = scene
    write(tmp_path, [points[:0], points], [labels[:0], labels], protocol=protocol)
    with caplog.at_level(logging.WARNING):
        dataset = ScannetDataset(tmp_path, 64, rng=np.random.RandomState(1))
    assert len(dataset) == 1 and dataset[0][0].shape == (64, 3)
    assert "without points are left out: [0]" in caplog.text


def test_missing_file_and_wrong_split(tmp_path):
    with pytest.raises(FileNotFoundError, match="scannet_data_pointnet2.zip"):
        ScannetDataset(tmp_path)
    with pytest.raises(ValueError, match="split is 'val'"):
        ScannetDataset(tmp_path, split="val")
