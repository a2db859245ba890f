"""Generators for the reader tests; reader processes import this module, so it stays light."""

import os
import signal
import sys
import time

import numpy as np


class RandomBatches:
    """Continuable: batch k of reader i holds i, k, and numbers drawn from a seeded state."""

    def __init__(self, reader_index, seed=0, size=5, grow=0):
        self.reader_index = reader_index
        self.rng = np.random.RandomState(seed + reader_index)
        self.count = 0
        self.size = size
        self.grow = grow

    def __iter__(self):
        return self

    def __next__(self):
        size = self.size + self.grow * (self.count % 3)
        image = self.rng.uniform(size=(size, size, 3)).astype(np.float32)
        batch = [
            [image, image[:, ::2]],
            [f"img_{self.reader_index}_{self.count}.jpg"],
            {"map": self.rng.randint(0, 255, (2, 3)).astype(np.uint8), "none": np.zeros((0, 4, 2))},
            (self.reader_index, self.count),
        ]
        self.count += 1
        return batch

    def get_state(self):
        kind, keys, position, has_gauss, gauss = self.rng.get_state()
        return {
            "kind": kind,
            "keys": keys,
            "position": position,
            "has_gauss": has_gauss,
            "gauss": gauss,
            "count": self.count,
        }

    def set_state(self, state):
        self.rng.set_state(
            tuple(state[name] for name in ("kind", "keys", "position", "has_gauss", "gauss"))
        )
        self.count = state["count"]


def numbered(reader_index, lengths=None):
    """Yields (reader, k) for ever, or lengths[reader] of them."""
    count = 0
    while lengths is None or count < lengths[reader_index]:
        yield reader_index, count
        count += 1


def counting_files(reader_index, folder):
    """Leaves a file behind for each batch made."""
    count = 0
    while True:
        open(os.path.join(folder, f"{reader_index}_{count}"), "w").close()
        yield reader_index, count
        count += 1


def failing(reader_index, bad_reader, good_batches):
    """One reader fails after some batches."""
    for count in range(good_batches):
        yield reader_index, count
    if reader_index == bad_reader:
        raise OSError("cannot read img_7.jpg")
    while True:
        count += 1
        yield reader_index, count


def failing_at_start(reader_index):
    raise FileNotFoundError("no folder /data/none")


def calling_exit(reader_index):
    yield reader_index
    sys.exit(3)


def ending_hard(reader_index, code):
    yield reader_index
    os._exit(code)


def process_facts(reader_index):
    """Yields what a test wants to know about the process that a reader runs in."""
    with open("/proc/self/status") as file:
        peak_kb = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    while True:
        yield {
            "pid": os.getpid(),
            "tensorflow": any(name.split(".")[0] == "tensorflow" for name in sys.modules),
            "peak_kb": peak_kb,
            "main": getattr(sys.modules["__main__"], "__file__", None),
            "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        }


def waiting_for_file(reader_index, path):
    """Makes no batch before the file exists."""
    while not os.path.exists(path):
        time.sleep(0.02)
    while True:
        yield reader_index


def sleeping(reader_index):
    """Sits in one call for a minute, as a slow picture or a lost network folder does."""
    time.sleep(60)
    yield reader_index
