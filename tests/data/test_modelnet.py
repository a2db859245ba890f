"""ModelNet data sets in the shapes people have them."""

import functools
import logging

import h5py
import numpy as np
import pytest

from data import modelnet
from data.data_util import GeneratorEnqueuer, load_reader_state, save_reader_state
from data.modelnet_dataset import ModelNetDataset
from data.modelnet_h5_dataset import ModelNetH5Dataset
from data.point_batches import TrainingBatches, make_point_reader
from tests.cloud_files import epoch_of, write_h5_set, write_text_set


@pytest.fixture
def clouds():
    rng = np.random.RandomState(1)
    names = ["cup_0001", "cup_0002", "night_stand_0001", "cup_0003", "night_stand_0002"]
    return {name: rng.uniform(-1, 1, (40, 6)) for name in names}


# ----------------------------------------------------------------------------------- HDF5


def test_every_cloud_once_and_true_sizes(tmp_path):
    path = write_h5_set(tmp_path, [5, 1, 4])
    dataset = ModelNetH5Dataset(path, 4, 8, rng=np.random.RandomState(0))
    for _ in range(2):
        batches = epoch_of(dataset)
        assert sorted(np.concatenate([labels for _, labels in batches])) == list(range(10))
        assert sorted(len(points) for points, _ in batches) == [1, 1, 4, 4]
        for points, labels in batches:
            np.testing.assert_array_equal(points[:, 0, 0], labels)
        dataset.reset()
    with pytest.raises(StopIteration):
        epoch_of(dataset)
        dataset.next_batch()


def test_h5_list_in_all_shapes_and_files_beside_it_win(tmp_path, monkeypatch):
    path = write_h5_set(tmp_path / "here", [2, 3])
    write_h5_set(tmp_path / "data", [9, 9])
    monkeypatch.chdir(tmp_path)  # where the list's own paths lead to the other set
    names = path.read_text().split()
    path.write_text("\r\n".join([names[0].replace("/", "\\"), "", names[1], " "]))
    dataset = ModelNetH5Dataset(path, 4, 8, shuffle=False)
    assert [len(labels) for _, labels in epoch_of(dataset)] == [2, 3]


@pytest.mark.parametrize(
    "name", ["train_files.txt", "data/modelnet40_ply_hdf5_2048/train_files.txt"]
)
def test_data_path(tmp_path, name):
    write_h5_set(tmp_path, [2])
    name = name if "/" in name else f"modelnet40_ply_hdf5_2048/{name}"
    assert len(epoch_of(ModelNetH5Dataset(name, data_path=tmp_path, npoints=4))) == 1


def test_unusable_h5_files_are_named_and_left_out(tmp_path, caplog):
    path = write_h5_set(tmp_path, [2, 2, 2, 2, 2, 2, 3])
    folder = path.parent
    (folder / "train0.h5").write_bytes((folder / "train0.h5").read_bytes()[:700])
    (folder / "train1.h5").write_bytes(b"")
    (folder / "train2.h5").unlink()
    with h5py.File(folder / "train3.h5", "w") as file:
        file["data"] = np.zeros((2, 8, 3))
    with h5py.File(folder / "train4.h5", "w") as file:
        file["data"] = np.zeros((0, 8, 3))
        file["label"] = np.zeros((0, 1))
    with h5py.File(folder / "train5.h5", "r+") as file:
        file["data"][0, 0, 0] = np.nan
    dataset = ModelNetH5Dataset(path, 4, 8)
    with caplog.at_level(logging.WARNING):
        batches = epoch_of(dataset)
    assert [len(labels) for _, labels in batches] == [3]
    for number in range(6):
        assert str(folder / f"train{number}.h5") in caplog.text


@pytest.mark.parametrize(
    "content, said",
    [
        ({"data": np.ones((2, 3, 16)), "label": np.ones(2)}, "(2, 3, 16)"),  # axes exchanged
        ({"data": np.full((2, 8, 3), b"x"), "label": np.ones(2)}, "needs numbers"),
        ({"data": np.ones((2, 8, 3), np.complex64), "label": np.ones(2)}, "needs numbers"),
        ({"data": np.full((2, 8, 3), 1e300), "label": np.ones(2)}, "not finite"),
        ({"data": np.ones((2, 8, 3)), "label": np.array([b"a", b"b"])}, "no whole numbers"),
        ({"data": np.ones((2, 8, 3)), "label": np.array([1, 1.5])}, "no whole numbers"),
        ({"data": np.ones((2, 8, 3)), "label": np.array([1, np.nan])}, "no whole numbers"),
        (None, "cannot be read as HDF5"),  # a folder
    ],
)
def test_h5_files_of_other_kinds_are_named_in_one_line(tmp_path, caplog, content, said):
    path = write_h5_set(tmp_path, [2, 3])
    wrong = path.parent / "train0.h5"
    wrong.unlink()
    if content is None:
        wrong.mkdir()
    else:
        with h5py.File(wrong, "w") as file:
            file.update(content)
    with caplog.at_level(logging.WARNING):
        batches = epoch_of(ModelNetH5Dataset(path, 4, 8))
    assert [len(labels) for _, labels in batches] == [3]
    (record,) = caplog.records
    assert str(wrong) in record.getMessage() and said in record.getMessage()
    assert "\n" not in record.getMessage()


def test_what_would_end_a_run_later_is_found_before(tmp_path, clouds):
    """A label out of range in the last file, nothing to read, a file without normals."""
    path = write_h5_set(tmp_path / "h5", [2, 40])
    make = functools.partial(modelnet.make_dataset, "train", num_point=8, batch_size=2)
    dataset = make(data_path=tmp_path / "h5")
    modelnet.check_dataset(dataset, 42)
    with pytest.raises(ValueError, match=r"train1.h5\[38\] has the label 40"):
        modelnet.check_dataset(dataset, 40)
    for file in path.parent.glob("*.h5"):
        file.write_bytes(b"x")
    with pytest.raises(ValueError, match="none of the 2 files"):
        modelnet.check_dataset(make(data_path=tmp_path / "h5"), 42)

    write_text_set(tmp_path / "text", clouds)
    dataset = make(data_path=tmp_path / "text", normal=True)
    modelnet.check_dataset(dataset, 2)
    with pytest.raises(ValueError, match=r"night_stand_000..txt has the label 1"):
        modelnet.check_dataset(dataset, 1)
    write_text_set(tmp_path / "text", {name: cloud[:, :3] for name, cloud in clouds.items()})
    with pytest.raises(ValueError, match="has 3 columns; normals need 6"):
        modelnet.check_dataset(make(data_path=tmp_path / "text", normal=True), 2)


def test_folders_of_the_files(tmp_path, clouds):
    folder = write_h5_set(tmp_path, [2]).parent
    assert modelnet.folders(modelnet.make_dataset("train", data_path=tmp_path)) == [str(folder)]
    folder = write_text_set(tmp_path, clouds)
    dataset = modelnet.make_dataset("train", data_path=tmp_path, normal=True)
    expected = [str(folder / name) for name in ("", "cup", "night_stand")]
    assert modelnet.folders(dataset) == [expected[0].rstrip("/"), *expected[1:]]


def test_no_usable_h5_file_is_an_error(tmp_path):
    path = write_h5_set(tmp_path, [2])
    (path.parent / "train0.h5").write_bytes(b"x")
    with pytest.raises(ValueError, match="none of the 1 files"):
        ModelNetH5Dataset(path, 4, 8).has_next_batch()


def test_missing_data_sets_say_where_they_are_published(tmp_path):
    with pytest.raises(FileNotFoundError, match="modelnet40_ply_hdf5_2048.zip") as error:
        ModelNetH5Dataset("data/modelnet40_ply_hdf5_2048/x.txt", data_path=tmp_path)
    assert str(tmp_path / "modelnet40_ply_hdf5_2048" / "x.txt") in str(error.value)
    with pytest.raises(FileNotFoundError, match="modelnet40_normal_resampled.zip"):
        ModelNetDataset(tmp_path / "modelnet40_normal_resampled")
    path = write_h5_set(tmp_path, [2])
    (path.parent / "train0.h5").unlink()
    with pytest.raises(FileNotFoundError, match="train0.h5"):
        ModelNetH5Dataset(path)


def test_h5_points_repeat_or_are_sampled(tmp_path):
    path = write_h5_set(tmp_path, [3], points=5)
    points, _ = epoch_of(ModelNetH5Dataset(path, 3, 12, shuffle=False))[0]
    np.testing.assert_array_equal(points[:, 5:10], points[:, :5])
    np.testing.assert_array_equal(points[:, 10:], points[:, :2])
    for sampling in ("random", "farthest"):
        make = functools.partial(ModelNetH5Dataset, path, 3, 3, sampling=sampling)
        one, two = (epoch_of(make(rng=np.random.RandomState(4)))[0][0] for _ in range(2))
        np.testing.assert_array_equal(one, two)
        assert all(len(np.unique(cloud[:, 0])) == 3 for cloud in one)
    # Of points on a line the second one is the other end.
    assert set(one[0, :2, 0] % 1 * 1024) == {0, 4}


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"npoints": 0}, {"sampling": "best"}])
def test_arguments_out_of_range(tmp_path, wrong):
    path = write_h5_set(tmp_path, [3])
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ModelNetH5Dataset(path, **wrong)


# ----------------------------------------------------------------------------------- text


@pytest.mark.parametrize("separator", [",", " ", "\t", ", ", "  "])
@pytest.mark.parametrize("normal", [False, True])
def test_separators_and_columns(tmp_path, clouds, separator, normal):
    root = write_text_set(tmp_path, clouds, separator=separator)
    dataset = ModelNetDataset(root, 5, 40, normal_channel=normal, normalize=False, shuffle=False)
    points, labels = dataset.next_batch()
    channels = 6 if normal else 3
    expected = np.stack(list(clouds.values()))[:, :, :channels]
    np.testing.assert_allclose(points, expected, atol=1e-6)
    assert labels.tolist() == [0, 0, 1, 0, 1] and dataset.num_channel() == channels


def test_lists_with_other_line_ends_blank_lines_and_folders(tmp_path, clouds):
    root = write_text_set(tmp_path, clouds)
    (root / "modelnet40_train.txt").write_bytes(b"cup_0001\r\n\r\ncup\\cup_0002.txt\r\n")
    (root / "shape_names.txt").rename(root / "modelnet40_shape_names.txt")
    (root / "modelnet40_shape_names.txt").write_bytes(b"cup\r\nnight_stand\r\n\r\n")
    assert len(ModelNetDataset(root, 4, 8)) == 2


def test_file_without_normals_is_refused_where_they_are_wanted(tmp_path, clouds):
    clouds["cup_0001"] = clouds["cup_0001"][:, :3]
    root = write_text_set(tmp_path, clouds)
    assert len(epoch_of(ModelNetDataset(root, 5, 8))[0][0]) == 5
    dataset = ModelNetDataset(root, 5, 8, normal_channel=True)
    with pytest.raises(ValueError, match=r"cup_0001.txt has 3 columns; normals need 6"):
        dataset.has_next_batch()


def test_clouds_of_any_size(tmp_path, clouds):
    rng = np.random.RandomState(2)
    clouds = {"cup_0001": rng.rand(5, 3), "cup_0002": rng.rand(5000, 3), "cup_0003": rng.rand(1, 3)}
    root = write_text_set(tmp_path, clouds)
    for sampling in ("first", "random", "farthest"):
        dataset = ModelNetDataset(root, 3, 64, shuffle=False, sampling=sampling)
        points, _ = dataset.next_batch()
        assert points.shape == (3, 64, 3) and np.isfinite(points).all()
        assert len(np.unique(points[0], axis=0)) == 5 and len(np.unique(points[1], axis=0)) == 64
        np.testing.assert_allclose(np.linalg.norm(points[:2], axis=2).max(axis=1), 1, rtol=1e-6)


def test_unusable_clouds_are_named_and_left_out(tmp_path, clouds, caplog):
    clouds.update({f"cup_{n:04}": np.ones((3, 3)) for n in range(10, 16)})
    root = write_text_set(tmp_path, clouds)
    (root / "cup" / "cup_0010.txt").write_text("")
    (root / "cup" / "cup_0011.txt").unlink()
    (root / "cup" / "cup_0012.txt").write_text("1,2,3\n4,5")
    (root / "cup" / "cup_0013.txt").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    (root / "cup" / "cup_0014.txt").write_text("1,2,nan\n")
    (root / "cup" / "cup_0015.txt").write_text(" \n\n")
    with caplog.at_level(logging.WARNING):
        dataset = ModelNetDataset(root, 2, 8, shuffle=False)
        for _ in range(2):
            batches = epoch_of(dataset)
            assert [len(labels) for _, labels in batches] == [2, 2, 1]
            dataset.reset()
    for number in range(10, 16):
        assert caplog.text.count(f"cup_{number:04}.txt") == 1


def test_no_usable_cloud_is_an_error(tmp_path, clouds):
    root = write_text_set(tmp_path, {"cup_0001": np.ones((2, 3))})
    (root / "cup" / "cup_0001.txt").write_text("x")
    with pytest.raises(ValueError, match="none of the 1 clouds"):
        epoch_of(ModelNetDataset(root, 2, 8))
    (root / "cup" / "cup_0001.txt").unlink()
    with pytest.raises(FileNotFoundError, match="cup_0001.txt"):
        ModelNetDataset(root, 2, 8)


def test_cache_changes_nothing(tmp_path, clouds):
    root = write_text_set(tmp_path, clouds)
    results = []
    for cache_size in (0, 2, 100):
        dataset = ModelNetDataset(
            root, 2, 8, cache_size=cache_size, rng=np.random.RandomState(3), sampling="random"
        )
        results.append(epoch_of(dataset, augment=True))
        dataset.reset()
        results[-1] += epoch_of(dataset, augment=True)
    for other in results[1:]:
        for (points, labels), (other_points, other_labels) in zip(results[0], other):
            np.testing.assert_array_equal(points, other_points)
            np.testing.assert_array_equal(labels, other_labels)


# -------------------------------------------------------------------------------- readers


@pytest.fixture(params=["h5", "text"])
def make_dataset(request, tmp_path, clouds):
    """A data set of 10 or 5 clouds, in batches that do not divide."""
    if request.param == "h5":
        return functools.partial(ModelNetH5Dataset, write_h5_set(tmp_path, [5, 1, 4]), 2, 8)
    return functools.partial(ModelNetDataset, write_text_set(tmp_path, clouds), 2, 8)


def check_equal(one, other):
    assert len(one) == len(other) > 0
    for first, second in zip(one, other):
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])


def taken(make_dataset, num_readers, count=None, states=None, num_epochs=None):
    make_reader = functools.partial(
        make_point_reader,
        make_dataset=make_dataset,
        num_readers=num_readers,
        seed=3,
        num_epochs=num_epochs,
    )
    with GeneratorEnqueuer(make_reader, num_readers=num_readers, states=states) as readers:
        if count is None:
            return list(readers), None
        return [readers.get() for _ in range(count)], readers.get_state()


@pytest.mark.parametrize("num_readers", [1, 2, 3])
def test_readers_use_every_cloud_once_an_epoch(make_dataset, num_readers):
    batches, _ = taken(make_dataset, num_readers, num_epochs=3)
    per_epoch = [[b for b in batches if b["epoch"] == epoch] for epoch in range(3)]
    assert [b for epoch in per_epoch for b in epoch] == batches
    reference = np.concatenate([b["labels"] for b in per_epoch[0]])
    for epoch in per_epoch:
        assert [b["batch"] for b in epoch] == list(range(len(epoch)))
        assert [b["last"] for b in epoch] == [False] * (len(epoch) - 1) + [True]
        labels = np.concatenate([b["labels"] for b in epoch])
        assert sorted(labels) == sorted(reference)


def test_several_readers_give_the_same_batches(make_dataset):
    check_equal(taken(make_dataset, 2, 14)[0], taken(make_dataset, 3, 14)[0])


@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize("stop", [1, 3, 6, 7])
def test_readers_go_on_exactly(make_dataset, tmp_path, num_readers, stop):
    whole, _ = taken(make_dataset, num_readers, 12)
    _, state = taken(make_dataset, num_readers, stop)
    save_reader_state(tmp_path / "state.npz", state)
    state = load_reader_state(tmp_path / "state.npz")
    check_equal(taken(make_dataset, num_readers, 12 - stop, states=state)[0], whole[stop:])


def test_state_of_other_files_is_refused(tmp_path, clouds):
    state = ModelNetH5Dataset(write_h5_set(tmp_path / "a", [2]), 2, 8).get_state()
    other = ModelNetH5Dataset(write_h5_set(tmp_path / "b", [2, 2]), 2, 8)
    with pytest.raises(ValueError, match="other files"):
        other.set_state(state)


def test_state_of_a_changed_file_is_refused(tmp_path):
    dataset = ModelNetH5Dataset(write_h5_set(tmp_path, [4]), 2, 8)
    dataset.has_next_batch()
    state = dataset.get_state()
    changed = ModelNetH5Dataset(write_h5_set(tmp_path, [3]), 2, 8)
    with pytest.raises(ValueError, match="has 3 clouds, but 4"):
        changed.set_state(state)


def test_reader_reads_its_next_batch_when_whole_batches_are_broken(tmp_path, clouds):
    root = write_text_set(tmp_path, clouds)
    for name in ("cup/cup_0001", "cup/cup_0002"):
        (root / f"{name}.txt").write_text("x")
    dataset = ModelNetDataset(root, 2, 8, shuffle=False)
    batches = list(TrainingBatches(dataset, num_epochs=2))
    assert [len(b["labels"]) for b in batches] == [2, 1] * 2
    assert [b["last"] for b in batches] == [False, True] * 2


def test_several_readers_need_a_seed(tmp_path):
    dataset = ModelNetH5Dataset(write_h5_set(tmp_path, [4]), 2, 8)
    with pytest.raises(ValueError, match="seed is None with 2 readers"):
        TrainingBatches(dataset, num_readers=2)
    with pytest.raises(ValueError, match="reader_index is 2 of 2"):
        TrainingBatches(dataset, num_readers=2, reader_index=2, seed=1)
