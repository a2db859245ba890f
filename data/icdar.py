"""EAST's training data: ICDAR 2015 folders to batches of crops with their label maps.

Names, arrays and random draws are those of EAST's `icdar.py`: for the same files, in sorted order,
and the same seed it gives the same batches. Its command line is a check of a folder before the
training:

    python -m data.icdar --training_data_path=/data/ocr/icdar2015/

lists all that cannot be used in it, and draws some samples with their label maps.
"""

import functools
import hashlib
import os
import sys
import threading

import cv2
import numpy as np
from absl import logging

from data.data_util import GeneratorEnqueuer
from data.icdar_crops import (
    check_and_validate_polys,
    choose_crop,
    crop_area,
    random_state,
    scaled_crop,
    validate_polys,
)
from data.icdar_files import (
    MAX_BROKEN,
    annotation_path,
    get_images,
    load_annotation,
)
from data.icdar_formats import FileError, tell, warn_once
from data.icdar_labels import generate_rbox
from data.sample_cache import SampleCache
from data.sharding import Shard
from utils.geometry import polygon_area, restore_rectangle, restore_rectangle_rbox, shrink_poly

__all__ = [
    "IcdarGenerator",
    "check_and_validate_polys",
    "crop_area",
    "generate_rbox",
    "generator",
    "get_batch",
    "get_images",
    "load_annoataion",
    "load_annotation",
    "make_reader",
    "polygon_area",
    "restore_rectangle",
    "restore_rectangle_rbox",
    "shrink_poly",
]

load_annoataion = load_annotation  # the original's spelling

MAP_STRIDE = 4  # pixels of the image per element of a label map
RANDOM_SCALE = (0.5, 1, 2.0, 3.0)
CACHE_BYTES = 256 << 20
PATIENCE_EPOCHS = 10  # without a full batch, then unfinished batches go on into the next epoch
PATIENCE_IMAGES = 100  # usable ones, in at least 3 epochs without any sample, then it is an error

# What the generator knows of an image.
_USABLE, _UNLABELLED, _EMPTY, _BROKEN = range(4)

_cache = SampleCache(CACHE_BYTES)
_said = set()
_said_lock = threading.Lock()


def generator(
    input_size=512,
    batch_size=32,
    background_ratio=3.0 / 8,
    random_scale=RANDOM_SCALE,
    vis=False,
    **keywords,
):
    """The original's generator; see `IcdarGenerator`, also for further keywords.

    Raises:
      ValueError: an argument is out of range; also `vis=True`.
      FileNotFoundError: the folder does not exist or has no image.
    """
    if vis:
        raise ValueError(
            "vis=True needs a window, which a reader does not have; run "
            "`python -m data.icdar --training_data_path=...` for a picture of some samples"
        )
    return IcdarGenerator(
        input_size=input_size,
        batch_size=batch_size,
        background_ratio=background_ratio,
        random_scale=random_scale,
        **keywords,
    )


def make_reader(reader_index, *, seed=None, worker=0, num_workers=1, **keywords):
    """An `IcdarGenerator` for one of several readers, each with its own random numbers.

    `functools.partial(make_reader, seed=..., training_data_path=...)` is what
    `data_util.GeneratorEnqueuer` takes.

    Args:
      reader_index: from 0.
      seed: whole number from 0 to 2**32 - 1, the same in all workers; None: others each time.
      worker, num_workers: which worker's part of every epoch to read, see `data.sharding`. The
        readers of one number in all workers go through all images together.
      **keywords: of `IcdarGenerator`.

    Returns:
      IcdarGenerator.

    Raises:
      ValueError: several workers without a seed; what IcdarGenerator raises.
    """
    cv2.setNumThreads(1)  # the readers are the threads; OpenCV's own would fight them for the cores
    if num_workers == 1:
        rng = np.random.RandomState(None if seed is None else [seed, reader_index])
        return IcdarGenerator(rng=rng, **keywords)
    if seed is None:
        raise ValueError(
            f"seed is None with {num_workers} workers; they have to agree about the order; pass a"
            " whole number"
        )
    rng = np.random.RandomState([seed, reader_index, worker])
    shard = Shard(worker, num_workers, (seed, reader_index))
    return IcdarGenerator(rng=rng, shard=shard, **keywords)


def get_batch(num_workers, *, max_queue_size=24, reader="thread", **keywords):
    """Yields batches made by `num_workers` readers ahead of the caller.

    Args:
      num_workers: number of readers.
      max_queue_size: number of batches made ahead.
      reader: 'thread' or 'process'.
      **keywords: of `make_reader` and `IcdarGenerator`.

    Yields:
      Batches as `IcdarGenerator` returns them.
    """
    with GeneratorEnqueuer(
        functools.partial(make_reader, **keywords),
        num_readers=num_workers,
        max_queue_size=max_queue_size,
        reader=reader,
    ) as readers:
        while True:
            yield readers.get()


# --------------------------------------------------------------------------------- the generator


class IcdarGenerator:
    """Endless iterator of training batches over a folder of images with annotations.

    Each epoch goes through the images in a new random order: an image is scaled at random, cropped
    around text or (with probability `background_ratio`) beside it, padded with black to a square
    and resized. An image may give nothing, and an unfinished batch is dropped at the end of an
    epoch, both as in the original. Other than there, unfinished batches go on into the next epoch
    where the images are too few to fill one (with a warning), images without a quadrilateral
    serve as background, and files that cannot be used are reported once and then left alone.

    A batch is a list [images, image_fns, score_maps, geo_maps, training_masks] of lists, one
    element an image, where s is `input_size`:
      images: [s, s, 3] float32, red first, 0 to 255;
      image_fns: path;
      score_maps: [s/4, s/4, 1] float32, 1 for text;
      geo_maps: [s/4, s/4, 5] float32, see `generate_rbox`;
      training_masks: [s/4, s/4, 1] float32, 0 where the loss does not count.

    Args:
      training_data_path: folder of the images; not needed with `image_list`.
      image_list: paths of the images, in an order that is the same in every run.
      input_size: side of the crops in pixels.
      batch_size: images per batch.
      background_ratio: part of the images that are tried as background.
      random_scale: factors of which one is drawn for each image.
      min_text_size: pixels; smaller text is masked.
      min_crop_side_ratio: shortest side of a crop, as a part of the scaled image's.
      max_image_large_side, max_text_size: flags of the original that it never uses, nor do we.
      geometry: 'RBOX', the only one there are labels for.
      empty_annotations: what an image with a blank annotation file is: 'background', or 'skip' as
        in the original.
      seed: of a new random generator; None (and no rng) draws from NumPy's global one.
      rng: numpy.random.RandomState to draw from, in place of a seed.
      shard: data.sharding.Shard, the part of every epoch to read, or None for all. The order of
        the images then does not depend on `rng`.
      cache_bytes: of decoded images kept in memory for all generators of this process; the last
        generator made decides.
      image_dtype: numpy.uint8 keeps the images four times smaller.

    Raises:
      ValueError: an argument is out of range. From `next()`: more than half of the labelled images
        are broken, or none gives a sample.
      FileNotFoundError: the folder does not exist or has no image.
    """

    def __init__(
        self,
        training_data_path=None,
        *,
        image_list=None,
        input_size=512,
        batch_size=32,
        background_ratio=3.0 / 8,
        random_scale=RANDOM_SCALE,
        min_text_size=10,
        max_text_size=800,
        max_image_large_side=1280,
        min_crop_side_ratio=0.1,
        geometry="RBOX",
        empty_annotations="background",
        seed=None,
        rng=None,
        shard=None,
        cache_bytes=CACHE_BYTES,
        image_dtype=np.float32,
    ):
        check_geometry(geometry)
        _check_positive(input_size=input_size, batch_size=batch_size)
        if not len(random_scale) or min(random_scale) <= 0:
            raise ValueError(
                f"random_scale is {random_scale}; factors have to be positive; pass some, or [1]"
            )
        if empty_annotations not in ("background", "skip"):
            raise ValueError(
                f"empty_annotations is {empty_annotations!r}; pass 'background' or 'skip'"
            )
        if seed is not None and rng is not None:
            raise ValueError("seed and rng were both given; only one can be used; pass one of them")
        if image_list is None:
            if training_data_path is None:
                raise ValueError("neither training_data_path nor image_list was given; pass one")
            image_list = get_images(training_data_path)
        elif not len(image_list):
            raise ValueError("image_list is empty; there is nothing to read; pass image files")
        self._images = [os.fspath(path) for path in image_list]
        self._where = training_data_path or os.path.dirname(self._images[0])
        self._input_size = input_size
        self._batch_size = batch_size
        self._background_ratio = background_ratio
        self._random_scale = np.asarray(random_scale, np.float64)
        self._min_text_size = min_text_size
        self._min_crop_side_ratio = min_crop_side_ratio
        self._skip_empty = empty_annotations == "skip"
        self._image_dtype = image_dtype
        self._rng = np.random.RandomState(seed) if seed is not None else random_state(rng)
        self._shard = shard
        if shard is not None:
            shard.indices(len(self._images), 0)  # raises if there are too few images
        _cache.set_limit(cache_bytes)

        self._annotations = [None] * len(self._images)  # paths, found when first needed
        self._status = np.zeros(len(self._images), np.int8)
        self._index = np.arange(len(self._images))
        self._position = len(self._index)  # at the end of an epoch, so that the first one starts
        self._epoch = 0
        self._batches = 0  # in this epoch
        self._epochs_without_batch = 0
        self._fruitless = np.zeros(2, np.int64)  # epochs, images since the last sample
        self._carry_over = False
        self._reversed = 0  # quadrilaterals given anticlockwise, first epoch only
        self._first_problem = None

    def __iter__(self):
        return self

    def __next__(self):
        batch = []
        while len(batch) < self._batch_size:
            if self._position == len(self._index):
                if self._epoch:
                    self._end_epoch()
                if not self._carry_over:
                    batch.clear()
                self._begin_epoch()
                self._position = self._batches = 0
            number = self._index[self._position]
            sample = self._make_sample(number)
            self._position += 1
            self._fruitless[1] += self._status[number] == _USABLE
            if sample is not None:
                self._fruitless[:] = 0
                batch.append(sample)
        self._batches += 1
        return [list(column) for column in zip(*batch)]

    def get_state(self):
        """Where the generator is, right after the last batch it returned.

        Returns:
          Flat dict of arrays, numbers and strings.
        """
        kind, keys, position, has_gauss, cached_gaussian = self._rng.get_state()
        return {
            "rng_kind": kind,
            "rng_keys": keys.copy(),
            "rng_position": position,
            "rng_has_gauss": has_gauss,
            "rng_cached_gaussian": cached_gaussian,
            "index": self._index.copy(),
            "status": self._status.copy(),
            "fruitless": self._fruitless.copy(),
            "position": self._position,
            "epoch": self._epoch,
            "batches": self._batches,
            "epochs_without_batch": self._epochs_without_batch,
            "carry_over": int(self._carry_over),
            "reversed": self._reversed,
            "images": self._fingerprint(),
            "worker": 0 if self._shard is None else self._shard.worker,
        }

    def set_state(self, state):
        """Continues exactly where `get_state` was called, on the same images.

        With another worker's state: in the same epoch, as far on in this worker's own part of it.

        Raises:
          ValueError: the state belongs to another list of images.
        """
        if str(state["images"]) != self._fingerprint():
            raise ValueError(
                f"the saved reader state is of {len(state['index'])} images, not of the "
                f"{len(self._images)} in {self._where}, or their names differ; pass the folder "
                "that the training was started with, or start its data anew"
            )
        self._rng.set_state(
            (
                str(state["rng_kind"]),
                np.asarray(state["rng_keys"], np.uint32),
                int(state["rng_position"]),
                int(state["rng_has_gauss"]),
                float(state["rng_cached_gaussian"]),
            )
        )
        self._index = np.array(state["index"], self._index.dtype)
        self._status = np.array(state["status"], np.int8)
        self._fruitless = np.array(state["fruitless"], np.int64)
        self._position = int(state["position"])
        self._epoch = int(state["epoch"])
        self._batches = int(state["batches"])
        self._epochs_without_batch = int(state["epochs_without_batch"])
        self._carry_over = bool(state["carry_over"])
        self._reversed = int(state["reversed"])
        if self._shard is not None and int(state.get("worker", 0)) != self._shard.worker:
            self._index = self._shard.indices(len(self._images), self._epoch - 1)
            self._position = min(self._position, len(self._index))
            place = [*self._shard.seed, self._shard.worker, self._epoch, self._position]
            self._rng.seed(place)

    def _fingerprint(self):
        names = "\n".join(os.path.basename(path) for path in self._images)
        return hashlib.sha1(names.encode("utf-8", "surrogateescape")).hexdigest()

    # ------------------------------------------------------------------------------- one epoch

    def _begin_epoch(self):
        if self._shard is None:
            self._rng.shuffle(self._index)
        else:
            self._index = self._shard.indices(len(self._images), self._epoch)
        self._epoch += 1

    def _end_epoch(self):
        """Looks back at an epoch: is there enough data to go on, and does a batch get full?"""
        usable = int((self._status == _USABLE).sum())
        self._fruitless[0] += 1
        self._check_broken()
        if not usable or (self._fruitless[0] >= 3 and self._fruitless[1] >= PATIENCE_IMAGES):
            raise ValueError(f"no image gave a training sample {self._counts()}")
        unlabelled = int((self._status == _UNLABELLED).sum())
        if unlabelled:
            _say_once(f"{unlabelled} of {self._all()} have no annotation file and are left out")
        if self._reversed:
            _say_once(
                f"{self._reversed} quadrilaterals of {self._all()} were given anticlockwise and "
                "have been turned"
            )
        self._epochs_without_batch = 0 if self._batches else self._epochs_without_batch + 1
        if self._carry_over:
            return
        share = usable // (1 if self._shard is None else self._shard.num_workers)
        if share < self._batch_size or self._epochs_without_batch >= PATIENCE_EPOCHS:
            self._carry_over = True
            _say_once(
                f"{share} usable images of {self._all()} do not fill a batch of "
                f"{self._batch_size} in one epoch: images repeat within a batch from now on",
                logging.WARNING,
            )

    def _all(self):
        return f"the {len(self._images)} images in {self._where}"

    def _counts(self):
        count = [int((self._status == status).sum()) for status in range(4)]
        example = f" (the first is {self._first_problem})" if self._first_problem else ""
        return (
            f"in the last {self._fruitless[1]} tries over {self._all()}: "
            f"{count[_BROKEN]} are broken{example}, {count[_UNLABELLED]} have no annotation file, "
            f"{count[_EMPTY]} an empty one, {count[_USABLE]} could be read; check the folder with "
            "`python -m data.icdar --training_data_path=...`"
        )

    # ------------------------------------------------------------------------------- one image

    def _load(self, number):
        """(image, polys, tags) as in the files, or None where they cannot be used."""
        if self._status[number] != _USABLE:
            return None
        path = self._images[number]
        if self._annotations[number] is None:
            self._annotations[number] = annotation_path(path)
        if self._annotations[number] is None:
            self._status[number] = _UNLABELLED
            return None
        try:
            image, polys, tags, problems = _cache.load(path, self._annotations[number])
        except FileError as error:
            warn_once(error.problem)
            self._first_problem = self._first_problem or error.problem
            self._status[number] = _BROKEN
            self._check_broken()
            return None
        if self._epoch == 1:
            tell(problems)
        if self._skip_empty and not len(polys) and not problems:
            self._status[number] = _EMPTY
            return None
        return image, polys, tags

    def _check_broken(self):
        broken = int((self._status == _BROKEN).sum())
        labelled = len(self._images) - int((self._status == _UNLABELLED).sum())
        if broken > MAX_BROKEN * labelled:
            raise ValueError(f"too many images cannot be used {self._counts()}")

    def _make_sample(self, number):
        """The elements of a batch for one image, or None where it gives nothing this time."""
        loaded = self._load(number)
        if loaded is None:
            return None
        image, polys, tags = loaded
        polys, tags, num_reversed = validate_polys(polys.copy(), tags, image.shape[:2])
        if self._epoch == 1:
            self._reversed += num_reversed
        scale = self._rng.choice(self._random_scale)
        polys *= np.float32(scale)
        size = [round(side * scale) for side in image.shape[:2]]
        if not min(size):  # a picture one pixel high, at a small scale
            return None
        background = self._rng.rand() < self._background_ratio
        box, polys, tags = choose_crop(
            size, polys, tags, background, 50, self._min_crop_side_ratio, self._rng
        )
        # Background that was not found, or text that was not.
        if (len(polys) > 0) == background:
            return None
        side = max(box[1] - box[0], box[3] - box[2], self._input_size)
        polys *= self._input_size / side
        score_map, geo_map, training_mask = generate_rbox(
            (self._input_size, self._input_size), polys, tags, self._min_text_size, MAP_STRIDE
        )
        crop = scaled_crop(image, scale, box, self._input_size)
        return (
            cv2.cvtColor(crop, cv2.COLOR_BGR2RGB).astype(self._image_dtype, copy=False),
            self._images[number],
            score_map[:, :, np.newaxis].astype(np.float32),
            geo_map,
            training_mask[:, :, np.newaxis].astype(np.float32),
        )


def check_geometry(geometry):
    """Raises a ValueError for a geometry that there are no labels for."""
    if geometry != "RBOX":
        raise ValueError(
            f"geometry {geometry!r} has no labels, neither here nor in the original, which leaves "
            "them empty; pass RBOX"
        )


def _check_positive(**numbers):
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; it has to be positive; pass 1 or more")


def _say_once(text, level=logging.INFO):
    """Logs a text, unless another reader of this process has."""
    with _said_lock:
        if text in _said:
            return
        _said.add(text)
    logging.log(level, text)


def main(argv=None):
    """The check of a folder, see `data.icdar_check.main`."""
    from data import icdar_check  # which uses this module

    return icdar_check.main(argv)


if __name__ == "__main__":
    sys.exit(main())
