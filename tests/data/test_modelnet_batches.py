"""Which data set the flags mean, and batches that towers can share."""

import h5py
import numpy as np
import pytest

from data import modelnet
from data.data_util import GeneratorEnqueuer

NAMES = ["airplane", "cone"]


def write_h5_set(folder, counts, split="train", labels=None):
    """ModelNet40's HDF5 layout; point 0 of cloud n is (n, 0, 0)."""
    root = folder / "modelnet40_ply_hdf5_2048"
    root.mkdir(exist_ok=True)
    number = 0
    for index, count in enumerate(counts):
        clouds = np.zeros((count, 8, 3), np.float32)
        clouds[:, 0, 0] = np.arange(number, number + count)
        label = np.zeros((count, 1)) if labels is None else np.reshape(labels, (-1, 1))
        with h5py.File(root / f"{split}{index}.h5", "w") as file:
            file["data"], file["label"] = clouds, label.astype(np.uint8)
        number += count
    listed = "".join(f"data/{root.name}/{split}{index}.h5\n" for index in range(len(counts)))
    (root / f"{split}_files.txt").write_text(listed)
    (root / "shape_names.txt").write_text("\n".join(NAMES) + "\n")
    return folder


class FakeReaders:
    """Batches of given sizes, epoch after epoch; the state is the number of batches read."""

    def __init__(self, epochs):
        self._batches = [
            {"count": count, "last": index == len(sizes) - 1}
            for sizes in epochs
            for index, count in enumerate(sizes)
        ]
        self.read = self.clouds = 0

    def get(self):
        batch = self._batches[self.read]
        names = [f"cloud{self.clouds + i}" for i in range(batch["count"])]
        self.read += 1
        self.clouds += batch["count"]
        points = np.array([int(name[5:]) for name in names], np.float32).reshape(-1, 1, 1)
        labels = np.zeros(len(names), np.uint8)
        return {
            "points": points,
            "labels": labels,
            "names": names,
            "last": batch["last"],
            "fewest": batch["count"],
        }

    def get_state(self):
        return self.read

    def wait_seconds(self):
        return 1.5


@pytest.mark.parametrize(
    "smallest, epochs, expected, states",
    [
        (1, [[4, 4, 2]], [4, 4, 2], [1, 2, 3]),
        (3, [[4, 4, 2]], [4, 6], [1, 3]),  # joins the batch before it
        (3, [[4, 1, 4, 4], [4]], [5, 4, 4, 4], [2, 3, 4, 5]),  # also at the end of a file
        (3, [[1, 4, 4]], [5, 4], [2, 3]),  # the first of an epoch joins the one after it
        (3, [[1, 1, 1, 1, 4]], [4, 4], [4, 5]),
        (3, [[4, 0, 4]], [4, 4], [2, 3]),  # of unreadable files
        (1, [[0, 4, 0], [4]], [4, 4], [3, 4]),
    ],
)
def test_small_batches_join_others_and_every_cloud_comes_once(smallest, epochs, expected, states):
    readers = FakeReaders(epochs)
    batches = modelnet.SharedBatches(readers, smallest)
    found = [batches.get() for _ in expected]
    assert [len(batch["labels"]) for batch, _ in found] == expected
    assert [state for _, state in found] == states  # never counts what is not handed out yet
    points = np.concatenate([batch["points"].ravel() for batch, _ in found])
    np.testing.assert_array_equal(points, np.arange(sum(map(sum, epochs))))
    assert [n for b, _ in found for n in b["names"]] == [f"cloud{i}" for i in range(len(points))]
    assert sum(batch["last"] for batch, _ in found) == len(epochs)
    assert batches.wait_seconds() == 1.5


def test_an_epoch_smaller_than_the_towers_need_is_refused():
    with pytest.raises(modelnet.BatchError, match="epoch has 3 clouds.*at least 4"):
        modelnet.SharedBatches(FakeReaders([[2, 1]]), smallest=4).get()


@pytest.mark.parametrize("num_readers", [1, 2])
def test_every_cloud_of_a_data_set_once_an_epoch(tmp_path, num_readers):
    write_h5_set(tmp_path, [5, 4, 1])

    def make_dataset(rng):
        return modelnet.make_dataset(
            "train", data_path=tmp_path, batch_size=4, num_point=8, rng=rng
        )

    options = {"seed": 3, "augment": False, "num_readers": num_readers}
    with modelnet.make_readers(make_dataset, **options) as readers:
        assert isinstance(readers, GeneratorEnqueuer)
        batches = modelnet.SharedBatches(readers, smallest=2)
        for _ in range(2):
            seen, last = [], False
            while not last:
                batch, state = batches.get()
                last = batch["last"]
                assert len(batch["labels"]) >= 2
                seen += batch["points"][:, 0, 0].tolist()
            assert sorted(seen) == list(range(10))
        continued, _ = batches.get()
    with modelnet.make_readers(make_dataset, states=state, **options) as readers:
        again, _ = modelnet.SharedBatches(readers, smallest=2).get()
    np.testing.assert_array_equal(again["points"], continued["points"])


def test_labels_that_the_network_does_not_know_are_named(tmp_path):
    write_h5_set(tmp_path, [3], labels=[0, 40, 1])

    def make_dataset(rng):
        return modelnet.make_dataset("train", data_path=tmp_path, num_point=8, rng=rng)

    with modelnet.make_readers(make_dataset, seed=0, augment=False) as readers:
        with pytest.raises(
            modelnet.BatchError, match=r"train0.h5\[1\] has the label 40; .* 0 to 39"
        ):
            modelnet.SharedBatches(readers, num_classes=40).get()
    modelnet.check_labels(np.array([0, 39]), ["a", "b"], 40)


def test_names_of_classes(tmp_path):
    write_h5_set(tmp_path, [1], split="test")
    dataset = modelnet.make_dataset("test", data_path=tmp_path)
    assert modelnet.class_names(dataset) == NAMES
    (tmp_path / "modelnet40_ply_hdf5_2048/shape_names.txt").unlink()
    assert modelnet.class_names(dataset) == []


def test_normals_mean_the_text_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="modelnet40_normal_resampled"):
        modelnet.make_dataset("test", data_path=tmp_path, normal=True)
    root = tmp_path / "modelnet40_normal_resampled"
    (root / "cone").mkdir(parents=True)
    (root / "cone/cone_0001.txt").write_text("0,1,0,0,0,1\n1,0,0,0,1,0\n")
    (root / "modelnet40_shape_names.txt").write_text("\n".join(NAMES))
    (root / "modelnet40_test.txt").write_text("cone_0001\n")
    dataset = modelnet.make_dataset("test", data_path=tmp_path, normal=True, num_point=2)
    assert dataset.num_channel() == 6 and modelnet.class_names(dataset) == NAMES
    points, labels = dataset.next_batch()
    assert points.shape == (1, 2, 6) and labels.tolist() == [1]
