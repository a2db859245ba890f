"""A reader that tells about its process; it imports little, as real readers do."""

import os
import sys
import time


def resident_megabytes():
    """Resident memory of this process, in 10^6 bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def make_probe(index, make_reader):
    """A generator of two reports of its process, in the place of batches.

    Args:
        index: of the reader.
        make_reader: function of the index that makes the reader.

    Yields:
        Dicts ready (seconds of the monotonic clock), megabytes (resident memory) and tensorflow
        (whether it was imported): when the reader could begin its first batch, and when it had made
        one.
    """
    batches = iter(make_reader(index))
    yield _report()
    next(batches)
    yield _report()


def _report():
    return {
        "ready": time.monotonic(),
        "megabytes": resident_megabytes(),
        "tensorflow": "tensorflow" in sys.modules,
    }
