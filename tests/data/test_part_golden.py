"""ShapeNetPart items and class numbers against the original's."""

import json

import numpy as np
import pytest

from data.part_dataset_all_normal import PartNormalDataset, get_batch
from tests.golden_sets import golden_dir, golden_path

FOLDER = "shapenetcore_partanno_segmentation_benchmark_v0_normal"


@pytest.fixture
def root():
    folder = golden_dir("pointnet2") / "sample_data"
    if not (folder / FOLDER).is_dir():
        pytest.skip(f"no sample data at {folder}")
    return folder / FOLDER


@pytest.mark.parametrize("split", ["train", "val", "trainval", "test"])
def test_golden_items(split, root):
    record = json.loads(golden_path("pointnet2", "datasets.json").read_text())["part"][split]
    arrays = np.load(golden_path("pointnet2", "datasets.npz"))
    np.random.seed(record["numpy_seed"])
    dataset = PartNormalDataset(root, npoints=record["npoints"], split=split, return_cls_label=True)
    items = record["items_in_original_order"]
    assert len(dataset) == len(items)
    for number, expected in enumerate(items):
        category, path = dataset.datapath[number]
        assert category == expected["category"]
        assert path.replace("\\", "/").endswith(expected["file"])
        item = dataset[number]
        assert [str(array.dtype) for array in item] == expected["dtypes"]
        assert item[3].tolist() == [expected["cls"]]
        for array, name in zip(item, ("xyz", "normal", "seg")):
            golden = arrays[f"part_{split}_{number}_{name}"]
            np.testing.assert_allclose(array, golden, rtol=1e-6, atol=1e-6)


def test_golden_class_numbers(root):
    record = json.loads(golden_path("pointnet2", "datasets.json").read_text())
    dataset = PartNormalDataset(root, split="test")
    assert dataset.classes == record["part_class_ids_cpython27"]
    assert dataset.seg_classes == record["part_seg_classes"]


def test_golden_batch_is_its_items(root):
    record = json.loads(golden_path("pointnet2", "datasets.json").read_text())["part"]["val"]
    arrays = np.load(golden_path("pointnet2", "datasets.npz"))
    np.random.seed(record["numpy_seed"])
    dataset = PartNormalDataset(root, record["npoints"], split="val", return_cls_label=True)
    count = len(dataset)
    points, parts, labels = get_batch(dataset, np.arange(count), 0, count + 3)
    assert points.shape == (count, record["npoints"], 6)
    for number, expected in enumerate(record["items_in_original_order"]):
        assert labels[number] == expected["cls"]
        for array, name in ((points[..., :3], "xyz"), (points[..., 3:], "normal"), (parts, "seg")):
            golden = arrays[f"part_val_{number}_{name}"]
            np.testing.assert_allclose(array[number], golden, rtol=1e-6, atol=1e-6)
