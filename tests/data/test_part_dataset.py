"""ShapeNetPart folders beyond the golden cases, and the order of a Python 2 dict."""

import json
import logging

import numpy as np
import pytest

from data.part_dataset_all_normal import PartNormalDataset, get_batch
from data.point_files import CloudError
from data.python2_order import dict_order


@pytest.fixture
def root(tmp_path):
    (tmp_path / "synsetoffset2category.txt").write_bytes(b"Bag\t01\r\nMug\t02\r\n\r\n")
    (tmp_path / "train_test_split").mkdir()
    lists = {"train": ["shape_data/01/a", "shape_data/02/b"], "val": [], "test": []}
    for split, names in lists.items():
        path = tmp_path / "train_test_split" / f"shuffled_{split}_file_list.json"
        path.write_text(json.dumps(names))
    rng = np.random.RandomState(0)
    for name in ("01/a", "02/b"):
        path = tmp_path / f"{name}.txt"
        path.parent.mkdir()
        np.savetxt(path, np.column_stack([rng.rand(9, 6), np.full(9, 5)]))
    return tmp_path


def test_items(root):
    dataset = PartNormalDataset(root, 20, classification=True, rng=np.random.RandomState(1))
    points, normals, label = dataset[0]
    assert points.shape == normals.shape == (20, 3)
    assert label[0] == dataset.classes[dataset.datapath[0][0]]
    assert sorted(dataset.classes.values()) == [0, 1]


def test_unusable_files_are_named_and_left_out(root, caplog):
    (root / "02" / "b.txt").write_text("1 2 3 4 5 6\n")
    dataset = PartNormalDataset(root, 20)
    with caplog.at_level(logging.WARNING):
        points, parts = get_batch(dataset, [0, 1], 0, 2)
    assert points.shape == (1, 20, 6) and parts.tolist() == [[5] * 20]
    assert "b.txt: has 6 columns; 7 are required" in caplog.text
    (root / "01" / "a.txt").write_text("")
    with caplog.at_level(logging.WARNING):
        assert len(PartNormalDataset(root, 20)) == 1
    assert "a.txt" in caplog.text


@pytest.mark.parametrize("part", [-1, 50])
def test_parts_that_no_class_has_are_named(root, caplog, part):
    np.savetxt(root / "02" / "b.txt", [[0, 0, 0, 0, 0, 1, 5], [1, 0, 0, 0, 0, 1, part]])
    with caplog.at_level(logging.WARNING):
        points, _ = get_batch(PartNormalDataset(root, 20), [0, 1], 0, 2)
    assert len(points) == 1 and "0 to 49 are known" in caplog.text


def test_cloud_that_is_only_there_in_another_format_is_left_out(root, caplog):
    (root / "02" / "b.txt").rename(root / "02" / "b.pts")
    with caplog.at_level(logging.WARNING):
        assert len(PartNormalDataset(root, 20)) == 1
    assert "b.txt" in caplog.text


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("train_test_split/shuffled_train_file_list.json", '["shape_data/', "not JSON"),
        ("train_test_split/shuffled_train_file_list.json", '{"a": 1}', "must have a list"),
        ("train_test_split/shuffled_train_file_list.json", '["a"]', "lists 'a'"),
        ("train_test_split/shuffled_train_file_list.json", "[1]", "lists 1"),
        ("synsetoffset2category.txt", "Bag\n", "has the line 'Bag'"),
    ],
)
def test_damaged_lists_are_named(root, name, content, reason):
    (root / name).write_text(content)
    with pytest.raises(CloudError, match=f"{name}: .*{reason}"):
        PartNormalDataset(root)


def test_list_with_byte_order_mark_and_back_slashes(root):
    path = root / "train_test_split" / "shuffled_train_file_list.json"
    path.write_text("\ufeff" + json.dumps(["shape_data\\01\\a"]), encoding="utf-8")
    assert [name for name, _ in PartNormalDataset(root).datapath] == ["Bag"]


def test_wrong_arguments(root):
    with pytest.raises(ValueError, match="split is 'all'"):
        PartNormalDataset(root, split="all")
    with pytest.raises(FileNotFoundError, match="none of the 0 clouds of split 'test'"):
        PartNormalDataset(root, split="test")
    with pytest.raises(FileNotFoundError, match="benchmark_v0_normal.zip"):
        PartNormalDataset(root / "elsewhere")


def test_dict_order_of_python_2():
    # As in texts of that time: {'a': 1, 'c': 3, 'b': 2}.
    assert dict_order("abc") == ["a", "c", "b"]
    assert dict_order("abcde") == ["a", "c", "b", "e", "d"]
    assert sorted(dict_order(map(str, range(300)))) == sorted(map(str, range(300)))
