"""Which part of the data a worker reads where several train together.

Every worker draws the same order of an epoch and takes every `num_workers`-th sample of it: the
parts of an epoch have no sample in common, none is left out, their sizes differ by at most 1, and
every epoch is divided differently.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shard:
    """One worker's part of the data.

    Attributes:
      worker: number of the worker.
      num_workers: number of workers.
      seed: whole numbers from which all workers draw the same orders.

    Raises:
      ValueError: there is no such worker.
    """

    worker: int
    num_workers: int
    seed: tuple[int, ...]

    def __post_init__(self):
        if not 0 <= self.worker < self.num_workers:
            raise ValueError(
                f"worker is {self.worker} of {self.num_workers} workers; it must be at least 0 and"
                " below their number; pass one of them"
            )

    def indices(self, count, epoch):
        """This worker's samples of an epoch, in the order in which it reads them.

        Args:
          count: number of samples of all workers.
          epoch: number of the epoch.

        Returns:
          [count / num_workers, rounded up or down] int64, numbers below `count`.

        Raises:
          ValueError: there are fewer samples than workers.
        """
        if count < self.num_workers:
            raise ValueError(
                f"{count} samples cannot be shared by {self.num_workers} workers; use fewer workers"
                " or more data"
            )
        order = np.random.RandomState([*self.seed, epoch]).permutation(count)
        return order[self.worker :: self.num_workers]


def rows(worker, num_workers, before):
    """Which of some samples that follow each other are a worker's.

    Args:
      worker, num_workers: as of `Shard`.
      before: number of samples of the epoch before these.

    Returns:
      slice.
    """
    return slice((worker - before) % num_workers, None, num_workers)
