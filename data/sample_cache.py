"""A bounded memory of decoded images, shared by the reader threads of a process."""

import collections
import os
import threading

import numpy as np

from data.icdar_files import read_image
from data.icdar_formats import parse_annotation


class SampleCache:
    """Images and annotations that were read last, up to a number of bytes.

    Decoding a photograph takes longer than making its labels, so a data set that fits is decoded
    once. A file that changes on the disk is read again. Safe to use from several threads.

    Args:
      limit: bytes of decoded images kept; 0 keeps none.
    """

    def __init__(self, limit):
        self._limit = limit
        self._entries = collections.OrderedDict()  # (paths, what identifies the files) -> sample
        self._bytes = 0
        self._lock = threading.Lock()

    def set_limit(self, limit):
        """Changes the number of bytes kept, and forgets what is too much."""
        with self._lock:
            self._limit = limit
            self._trim()

    def load(self, image_path, annotation_path):
        """Reads one sample, or remembers it.

        Returns:
          (image [height, width, 3] uint8, blue first, read-only; polys [N, 4, 2] float32;
          tags [N] bool; list of the annotation's `Problem`). The caller must not change them.

        Raises:
          FileError: one of the files cannot be used.
        """
        key = (_identity(image_path), _identity(annotation_path))
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        image = read_image(image_path)
        polys, tags, _, problems = parse_annotation(annotation_path)
        for array in (image, polys, tags):
            array.setflags(write=False)
        sample = image, polys, tags, problems
        with self._lock:
            if key not in self._entries:
                self._entries[key] = sample
                self._bytes += image.nbytes
            self._trim()
        return sample

    def _trim(self):
        while self._bytes > self._limit:
            self._bytes -= self._entries.popitem(last=False)[1][0].nbytes


def _identity(path):
    try:
        status = os.stat(path)
    except OSError:
        return path, np.nan, np.nan  # equal to nothing; reading it will say what is wrong
    return path, status.st_mtime_ns, status.st_size
