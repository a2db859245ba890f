"""Endless training batches of clouds, for readers that work ahead of the training step.

    make_dataset = functools.partial(ModelNetH5Dataset, "train_files.txt", 16, 1024)
    make_reader = functools.partial(
        make_point_reader, make_dataset=make_dataset, num_readers=2, seed=1
    )
    with GeneratorEnqueuer(make_reader, num_readers=2, max_queue_size=8) as readers:
        while True:
            batch = readers.get()
            train(batch["points"], batch["labels"])
            if batch["last"]:
                print("epoch", batch["epoch"], "ends")

Every cloud is used once an epoch, and the batches come in the order of the epochs, with any number
of readers:

* With one reader order and augmentation are drawn from one sequence of random numbers, as in
  PointNet++: `RandomState(seed)` gives the batches that its data set gives after
  `numpy.random.seed(seed)`.
* Of R > 1 readers each goes through the same order, drawn from `RandomState(seed)`, and makes every
  R-th batch: batch j of the training, counted through all epochs, is made by reader j % R and
  augmented with `RandomState([seed, j])`. So the batches are the same for any R > 1.
"""

import numpy as np

from data.sharding import rows


def make_point_reader(
    reader_index,
    *,
    make_dataset,
    num_readers=1,
    seed=None,
    augment=True,
    num_epochs=None,
    worker=0,
    num_workers=1,
):
    """`TrainingBatches` of one of several readers: what `GeneratorEnqueuer` calls.

    Args:
      reader_index: from 0.
      make_dataset: called with `rng=`, returns the data set.
      num_readers: number of readers.
      seed: whole number from 0 to 2**32 - 1; None: another order each time, for one reader only.
      augment, num_epochs, worker, num_workers: of `TrainingBatches`.

    Returns:
      TrainingBatches.
    """
    return TrainingBatches(
        make_dataset(rng=np.random.RandomState(seed)),
        augment=augment,
        num_epochs=num_epochs,
        reader_index=reader_index,
        num_readers=num_readers,
        seed=seed,
        worker=worker,
        num_workers=num_workers,
    )


class TrainingBatches:
    """Iterator over the batches of a data set, epoch after epoch.

    A batch is a dict:
      points: [B, npoints, channels] float32 (float64 of a text data set without augmentation);
      labels: [B]; B is the true number of clouds, smaller at the end of a file or an epoch. It is
        0 if no file of a batch can be read, which happens with several readers of text files only;
      names: where each cloud comes from;
      epoch: number of the epoch, from 0;
      batch: number of the batch within its epoch, from 0;
      last: whether it is the last one of its epoch;
      fewest: number of clouds in this batch of the worker that has fewest, the same number in all
        workers; B with one worker.

    Several workers divide every batch of the data set among them, cloud by cloud: make it with
    `num_workers` times the batch size. In an epoch they have the same number of batches, no cloud
    in common, none left out, and numbers of clouds that differ by at most 1.

    Args:
      dataset: ModelNetH5Dataset or ModelNetDataset, new or after `reset()`.
      augment: whether to augment the batches.
      num_epochs: number of epochs after which the iterator ends; None: it does not.
      reader_index, num_readers: which share of the batches this reader makes.
      seed: of the augmentation where there are several readers or workers.
      worker, num_workers: whose share of each batch to make.

    Raises:
      ValueError: an argument is out of range. From `next()`: no file of an epoch can be read.
    """

    def __init__(
        self,
        dataset,
        *,
        augment=True,
        num_epochs=None,
        reader_index=0,
        num_readers=1,
        seed=None,
        worker=0,
        num_workers=1,
    ):
        if not 0 <= reader_index < num_readers:
            raise ValueError(
                f"reader_index is {reader_index} of {num_readers} readers; it must be at least 0 "
                "and below their number; pass one of them"
            )
        if not 0 <= worker < num_workers:
            raise ValueError(
                f"worker is {worker} of {num_workers} workers; it must be at least 0 and below "
                "their number; pass one of them"
            )
        if (num_readers > 1 or num_workers > 1) and seed is None:
            several = f"{num_readers} readers" if num_readers > 1 else f"{num_workers} workers"
            raise ValueError(
                f"seed is None with {several}; they have to agree about the order; pass a whole "
                "number"
            )
        self._dataset = dataset
        self._augment = augment
        self._num_epochs = num_epochs
        self._reader_index = reader_index
        self._num_readers = num_readers
        self._seed = seed
        self._worker = worker
        self._num_workers = num_workers
        self._alone = num_readers == num_workers == 1
        self._clouds = 0  # in this epoch, before the next batch, of all workers
        self._number = 0  # of the next batch, in the whole training
        self._epoch = 0
        self._batch = 0

    def __iter__(self):
        return self

    def __next__(self):
        while self._num_epochs is None or self._epoch < self._num_epochs:
            if not self._more():
                raise ValueError("the data set has no batch at the start of an epoch; reset() it")
            place = {"epoch": self._epoch, "batch": self._batch}
            made = None
            size = self._dataset.batch_clouds()
            if self._number % self._num_readers == self._reader_index:
                share = rows(self._worker, self._num_workers, self._clouds)
                made = self._dataset.next_batch(self._augment, rng=self._rng(), rows=share)
                names = self._dataset.batch_names
            else:
                self._dataset.skip_batch()
            self._number += 1
            self._batch += 1
            self._clouds += size
            last = not self._more()
            if last:
                self._dataset.reset()
                self._epoch += 1
                self._batch = self._clouds = 0
            if made is not None:
                points, labels = made
                place["fewest"] = (
                    size // self._num_workers if self._num_workers > 1 else len(labels)
                )
                return {"points": points, "labels": labels, "names": names, **place, "last": last}
        raise StopIteration

    def get_state(self):
        """Where the iterator is, right after the last batch it returned.

        Returns:
          Flat dict of arrays, numbers and strings.
        """
        own = {"number": self._number, "epoch": self._epoch, "batch": self._batch}
        own["clouds"] = self._clouds
        return {**own, **{f"dataset_{k}": v for k, v in self._dataset.get_state().items()}}

    def set_state(self, state):
        """Continues exactly where `get_state` was called.

        Raises:
          ValueError: the state belongs to another data set.
        """
        prefix = "dataset_"
        self._dataset.set_state(
            {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        )
        self._number = int(state["number"])
        self._epoch = int(state["epoch"])
        self._batch = int(state["batch"])
        self._clouds = int(
            state.get("clouds", 0)
        )  # not in states of one worker before there were several

    def _more(self):
        if self._alone:
            return self._dataset.has_next_batch()
        return self._dataset.more_batches()  # all must agree without reading each other's clouds

    def _rng(self):
        if self._alone:
            return None
        own = [self._worker] if self._num_workers > 1 else []
        return np.random.RandomState([self._seed, self._number, *own])
