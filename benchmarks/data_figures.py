"""Figures of the readers' side: generator, label maps, readers, locality-aware NMS."""

import contextlib
import functools
import os
import tempfile
import time
import unittest.mock

import cv2
import numpy as np

from benchmarks import reference_labels
from benchmarks.measure import Figure, interleave, ratio_figure
from data import data_util, icdar, synthetic_scenes, synthetic_text
from utils import geometry, nms

PICTURES, MIN_WORDS = 12, 10
SCENES = synthetic_scenes.SceneOptions(
    width=1280,
    height=720,
    max_words=30,
    min_word_height=14,
    max_word_height=50,
    dont_care_share=0.2,
)


def generator():
    """Images per CPU second of EAST's generator against the same with point-by-point label maps.

    Both make the same batches (same seed) of size 512 from made-up pictures of 1280 x 720 with 10
    to 30 words. Once with the generator's cache, in which these few pictures stay, and once
    without it: every picture is read and decoded each time, as with a data set that is larger than
    the cache. Other savings, such as scaling no more of a picture than the crop, are in both.

    Returns:
        List of two Figure.
    """
    batch_size, rounds = 4, 12
    name = "generator_512_many_words"
    caches = {name: icdar.CACHE_BYTES, f"{name}_uncached": 0}
    figures = []
    with many_word_pictures() as folder:
        for name, cache_bytes in caches.items():
            ours, reference = (
                icdar.generator(
                    input_size=512,
                    batch_size=batch_size,
                    training_data_path=folder,
                    seed=0,
                    cache_bytes=cache_bytes,
                )
                for _ in range(2)
            )
            seconds = interleave(
                {
                    "ours": functools.partial(next, ours),
                    "reference": functools.partial(_next_point_by_point, reference),
                },
                rounds=rounds,
                warm_up=4,
            )
            # Crops differ much in how many words they hold: the sum counts, not the median batch.
            totals = {which: values.sum() for which, values in seconds.items()}
            detail = {
                "images": rounds * batch_size,
                "images_per_cpu_second": round(rounds * batch_size / totals["ours"], 1),
                "point_by_point": round(rounds * batch_size / totals["reference"], 2),
            }
            ratio = totals["reference"] / totals["ours"]
            figures.append(Figure(name, ratio, "ratio", ">=", 10, detail))
    return figures


def _next_point_by_point(generator):
    with unittest.mock.patch.object(icdar, "generate_rbox", reference_labels.generate_rbox):
        next(generator)


def label_maps():
    """CPU time of the label maps of a 512 x 512 crop with 30 quadrilaterals, at full size.

    The detail has the time of the maps that training uses, a quarter of the size.

    Returns:
        List of one Figure.
    """
    polys = random_quads(30, 512, np.random.RandomState(0))
    tags = np.arange(30) % 5 == 0
    seconds = interleave(
        {
            stride: functools.partial(icdar.generate_rbox, (512, 512), polys, tags, stride=stride)
            for stride in (1, 4)
        }
    )
    milliseconds = {stride: float(np.median(values)) * 1e3 for stride, values in seconds.items()}
    score_map, _, _ = icdar.generate_rbox((512, 512), polys, tags)
    detail = {
        "at_stride_4": round(milliseconds[4], 2),
        "p90": round(float(np.percentile(seconds[1], 90)) * 1e3, 2),
        "text_pixels": int(score_map.sum()),
    }
    return [Figure("label_maps_512_30_quads", milliseconds[1], "ms CPU", "<=", 12, detail)]


def readers():
    """Batches per second of two readers over one, for reader threads and reader processes.

    Returns:
        List of Figure.
    """
    with many_word_pictures() as folder:
        make_reader = functools.partial(
            icdar.make_reader, training_data_path=folder, seed=0, input_size=512, batch_size=4
        )
        kinds = (("thread", "threads"), ("process", "processes"))
        # A data set that the cache of pictures holds, and one that it does not.
        cases = (("", make_reader), ("_uncached", functools.partial(make_reader, cache_bytes=0)))
        return [
            _two_readers(f"readers_two_{plural}{case}", kind, make)
            for case, make in cases
            for kind, plural in kinds
        ]


def _two_readers(name, kind, make_reader, *, rounds=5, batches=24):
    """Figure of two readers over one, taken in turn, each on a fresh set of readers."""
    seconds = {1: [], 2: []}
    for number in range(rounds):
        for num_readers in (1, 2) if number % 2 else (2, 1):
            with data_util.GeneratorEnqueuer(
                make_reader, num_readers=num_readers, max_queue_size=8, reader=kind
            ) as queue:
                # Until the readers have started, have seen each picture, and are waited for.
                for _ in range(2 * PICTURES // 4):
                    queue.get()
                start = time.perf_counter()
                for _ in range(batches):
                    queue.get()
                seconds[num_readers].append(time.perf_counter() - start)
    seconds = {num_readers: np.array(values) for num_readers, values in seconds.items()}
    return ratio_figure(
        name,
        seconds[1],
        seconds[2],
        ">=",
        1.7,
        time="wall",
        batches_per_second=[round(batches / np.median(seconds[n]), 2) for n in (1, 2)],
        load_average=round(os.getloadavg()[0], 1),
        cpus=len(os.sched_getaffinity(0)),
    )


def lanms():
    """CPU time of locality-aware NMS on 3,000 boxes, as one finds them and as unlike as can be.

    The value is that of the slowest of three sets: 30 words of 100 boxes, 300 of 10, and 3,000
    boxes that have no other near them.

    Returns:
        List of one Figure.
    """
    sets = {words: detected_boxes(words, 3000 // words) for words in (30, 300, 3000)}
    seconds = interleave(
        {words: functools.partial(nms.merge_quadrangle_n9, b, 0.2) for words, b in sets.items()},
        rounds=9,
        warm_up=1,
    )
    medians = {words: float(np.median(values)) for words, values in seconds.items()}
    detail = {
        "seconds_by_words": {words: round(value, 3) for words, value in medians.items()},
        "boxes_left": {words: len(nms.merge_quadrangle_n9(b, 0.2)) for words, b in sets.items()},
    }
    return [Figure("lanms_3000", max(medians.values()), "s CPU", "<", 0.3, detail)]


@contextlib.contextmanager
def many_word_pictures():
    """A folder of JPEG pictures of 1280 x 720 with 10 to 30 words, in the layout of ICDAR 2015."""
    rng = np.random.RandomState(0)
    with tempfile.TemporaryDirectory() as folder:
        number = 0
        while number < PICTURES:
            image, words = synthetic_scenes.make_picture(rng, SCENES)
            if len(words) < MIN_WORDS:
                continue
            number += 1
            cv2.imwrite(os.path.join(folder, f"img_{number}.jpg"), image)
            text = synthetic_text.annotation_text(words, byte_order_mark=True)
            with open(os.path.join(folder, f"gt_img_{number}.txt"), "w", encoding="utf-8") as file:
                file.write(text)
        yield folder


def random_quads(count, side, rng):
    """Turned and slightly distorted rectangles of the size of words, [count, 4, 2] float32."""
    height = rng.uniform(16, 48, count)
    width = height * rng.uniform(1.5, 4, count)
    angle = rng.uniform(-0.4, 0.4, count)
    centre = rng.uniform(60, side - 60, (count, 1, 2))
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) / 2
    corners = corners * np.stack([width, height], -1)[:, None]
    corners = corners + rng.uniform(-2, 2, corners.shape)
    cos, sin = np.cos(angle), np.sin(angle)
    turn = np.stack([np.stack([cos, sin], -1), np.stack([-sin, cos], -1)], axis=1)
    return (centre + corners @ turn).clip(0, side - 1).astype(np.float32)


def detected_boxes(words, pixels):
    """Boxes as the network gives them: `pixels` slightly different ones a word, in raster order.

    Args:
        words: number of words, on a grid that keeps them apart.
        pixels: boxes of each.

    Returns:
        [words * pixels, 9] float32, four corners (x, y) and the score.
    """
    rng = np.random.RandomState(words)
    columns = int(np.ceil(np.sqrt(words)))
    number = np.repeat(np.arange(words), pixels)
    width, height = 90.0, 24.0
    # Pixels of a word lie on its own raster of 4 by 4.
    inside = np.tile(np.arange(pixels), words)
    across = max(1, int(np.ceil(np.sqrt(pixels * width / height))))
    shift = np.stack([inside % across, inside // across], -1) * 4.0
    origin = np.stack([number % columns * 110.0, number // columns * 40.0], -1) + shift
    left, top = shift.T + rng.normal(0, 1, (2, len(number)))
    distances = np.stack([top, width - left, height - top, left], -1)
    angle = rng.uniform(-0.1, 0.1, words)[number] + rng.normal(0, 0.01, len(number))
    quads = geometry.restore_rectangle_rbox(origin, np.column_stack([distances, angle]))
    quads = quads.reshape(-1, 8)
    order = np.lexsort((quads[:, 0], np.round(quads[:, 1] / 4)))
    scores = rng.uniform(0.8, 1, len(quads))
    return np.column_stack([quads, scores])[order].astype(np.float32)
