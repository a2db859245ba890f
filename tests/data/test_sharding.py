"""Several workers: the parts of an epoch are disjoint, balanced, complete, and new every epoch."""

import collections

import h5py
import numpy as np
import pytest

from data import icdar, modelnet, point_batches, sharding

SIZE = 32


@pytest.mark.parametrize("count, num_workers", [(7, 1), (7, 2), (8, 2), (10, 3), (5, 5), (101, 4)])
def test_parts_of_an_epoch_are_disjoint_balanced_and_complete(count, num_workers):
    partitions = []
    for epoch in range(4):
        parts = [
            sharding.Shard(worker, num_workers, (3, 0)).indices(count, epoch).tolist()
            for worker in range(num_workers)
        ]
        assert sorted(sum(parts, [])) == list(range(count))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        partitions.append([sorted(part) for part in parts])
    if 1 < num_workers < count:
        assert any(partitions[0] != other for other in partitions[1:])


def test_orders_differ_between_seeds_and_epochs_and_repeat_for_equal_ones():
    shard = sharding.Shard(1, 2, (3, 0))
    assert shard.indices(50, 4).tolist() == sharding.Shard(1, 2, (3, 0)).indices(50, 4).tolist()
    assert shard.indices(50, 4).tolist() != shard.indices(50, 5).tolist()
    assert shard.indices(50, 4).tolist() != sharding.Shard(1, 2, (4, 0)).indices(50, 4).tolist()


def test_there_must_be_a_sample_for_each_worker():
    with pytest.raises(ValueError, match="2 samples cannot be shared by 3 workers; use fewer"):
        sharding.Shard(0, 3, (1,)).indices(2, 0)
    with pytest.raises(ValueError, match="worker is 3 of 3 workers"):
        sharding.Shard(3, 3, (1,))


# ------------------------------------------------------------------------------------- pictures


@pytest.fixture
def pictures(tmp_path):
    """Eleven small pictures, each with one box that every crop contains."""
    cv2 = pytest.importorskip("cv2")
    paths = []
    for number in range(11):
        path = tmp_path / f"img_{number:02d}.png"
        cv2.imwrite(str(path), np.full((SIZE, SIZE, 3), number * 20, np.uint8))
        path.with_suffix(".txt").write_text("4,4,28,4,28,28,4,28,text\n")
        paths.append(str(path))
    return paths


def picture_reader(pictures, worker, num_workers, **keywords):
    return icdar.make_reader(
        0,
        seed=5,
        worker=worker,
        num_workers=num_workers,
        image_list=pictures,
        input_size=SIZE,
        batch_size=1,
        background_ratio=0.0,
        random_scale=[1],
        **keywords,
    )


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_workers_share_the_pictures_of_every_epoch(pictures, num_workers):
    readers = [picture_reader(pictures, worker, num_workers) for worker in range(num_workers)]
    partitions = []
    for epoch in range(3):
        parts = []
        for worker, reader in enumerate(readers):
            size = (len(pictures) + num_workers - 1 - worker) // num_workers
            parts.append([next(reader)[1][0] for _ in range(size)])
            assert reader.get_state()["epoch"] == epoch + 1
        assert sorted(sum(parts, [])) == pictures
        partitions.append([sorted(part) for part in parts])
    if num_workers > 1:
        assert partitions[0] != partitions[1] != partitions[2]


def test_the_state_of_one_worker_continues_all(pictures):
    readers = [picture_reader(pictures, worker, 2) for worker in range(2)]
    for reader in readers:
        for _ in range(8):  # six in the first epoch or five, then two or three of the second
            next(reader)
    state = readers[0].get_state()
    assert state["epoch"] == 2 and state["position"] == 2
    restored = [picture_reader(pictures, worker, 2) for worker in range(2)]
    for reader in restored:
        reader.set_state(state)
    rest = [[next(reader)[1][0] for _ in range(3)] for reader in restored]
    assert rest[0] == [next(readers[0])[1][0] for _ in range(3)]
    second = sharding.Shard(1, 2, (5, 0)).indices(11, 1)
    assert rest[1] == [pictures[number] for number in second[2:5]]


def test_workers_without_a_common_seed_are_refused(pictures):
    with pytest.raises(ValueError, match="seed is None with 2 workers"):
        icdar.make_reader(0, num_workers=2, image_list=pictures)


# --------------------------------------------------------------------------------------- clouds


@pytest.fixture
def h5_data(tmp_path):
    """Two files of 13 and 6 clouds; the first coordinate tells a cloud from all others."""
    folder = tmp_path / "modelnet40_ply_hdf5_2048"
    folder.mkdir()
    number = 0
    names = []
    for index, count in enumerate((13, 6)):
        clouds = np.zeros((count, 8, 3), np.float32)
        clouds[:, :, 0] = np.arange(number, number + count)[:, np.newaxis]
        number += count
        names.append(f"ply_data_train{index}.h5")
        with h5py.File(folder / names[-1], "w") as file:
            file["data"] = clouds
            file["label"] = np.zeros((count, 1), np.uint8)
    (folder / "train_files.txt").write_text("\n".join(names) + "\n")
    return str(tmp_path)


class Readers:
    """What SharedBatches needs of GeneratorEnqueuer, without a thread."""

    def __init__(self, batches):
        self._batches = batches

    def get(self):
        return next(self._batches)

    def get_state(self):
        return self._batches.get_state()


def cloud_batches(data_path, worker, num_workers, batch_size, num_readers=1, reader_index=0):
    return point_batches.make_point_reader(
        reader_index,
        make_dataset=lambda rng: modelnet.make_dataset(
            "train",
            data_path=data_path,
            num_point=8,
            batch_size=batch_size * num_workers,
            rng=rng,
        ),
        num_readers=num_readers,
        seed=7,
        augment=False,
        worker=worker,
        num_workers=num_workers,
    )


def one_epoch(get):
    """[clouds of a batch] of one epoch."""
    found = []
    while True:
        batch = get()
        found.append(batch["points"][:, 0, 0].astype(int).tolist())
        if batch["last"]:
            return found


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_workers_share_the_clouds_of_every_epoch(h5_data, num_workers, batch_size):
    batches = [cloud_batches(h5_data, w, num_workers, batch_size) for w in range(num_workers)]
    partitions = []
    for _ in range(3):
        epochs = [one_epoch(lambda b=b: next(b)) for b in batches]
        assert len({len(epoch) for epoch in epochs}) == 1  # nobody waits for another batch
        parts = [sum(epoch, []) for epoch in epochs]
        assert sorted(sum(parts, [])) == list(range(19))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        partitions.append([sorted(part) for part in parts])
    if num_workers > 1:
        assert partitions[0] != partitions[1] != partitions[2]


@pytest.mark.parametrize("smallest", [1, 2])
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_joined_batches_are_the_same_number_for_all_workers(h5_data, num_workers, smallest):
    shared = [
        modelnet.SharedBatches(Readers(cloud_batches(h5_data, w, num_workers, 2)), smallest)
        for w in range(num_workers)
    ]
    for _ in range(3):
        epochs = [one_epoch(lambda s=s: s.get()[0]) for s in shared]
        assert len({len(epoch) for epoch in epochs}) == 1
        assert min(len(batch) for epoch in epochs for batch in epoch) >= smallest
        counts = collections.Counter(cloud for epoch in epochs for b in epoch for cloud in b)
        assert counts == dict.fromkeys(range(19), 1)


def test_several_readers_of_a_worker_make_what_one_makes(h5_data):
    one = cloud_batches(h5_data, 1, 2, 2)
    pair = [cloud_batches(h5_data, 1, 2, 2, 2, index) for index in range(2)]
    for number in range(14):
        expected, found = next(one), next(pair[number % 2])
        assert found["names"] == expected["names"]
        assert found["fewest"] == expected["fewest"]


def test_the_state_of_one_worker_continues_the_clouds_of_all(h5_data):
    batches = [cloud_batches(h5_data, worker, 2, 2) for worker in range(2)]
    for b in batches:
        for _ in range(7):
            next(b)
    state = batches[0].get_state()
    restored = [cloud_batches(h5_data, worker, 2, 2) for worker in range(2)]
    for own, original in zip(restored, batches):
        own.set_state(state)
        for _ in range(7):
            assert next(own)["names"] == next(original)["names"]
