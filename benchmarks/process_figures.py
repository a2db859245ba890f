"""Figures of processes: resident memory of a training, and start and memory of a reader process."""

import contextlib
import functools
import gc
import multiprocessing
import os
import time

import numpy as np
import tensorflow.compat.v1 as tf

from benchmarks import reader_probe, reference_net
from benchmarks.data_figures import many_word_pictures
from benchmarks.measure import Figure
from benchmarks.reference_net import BATCH, CHANNELS, SIDE, logical_cpus, one_thread
from data import icdar
from data.readers import ProcessReader
from utils.towers import feeding, input_queue, input_sources

SPECS = [("images", tf.float32, [None, SIDE, SIDE, CHANNELS])]
STEPS = (100, 1000)
START_ROUNDS, START_SECONDS = 7, 60.0


def memory():
    """Growth of the resident memory with the towers, and with the steps, on the reference net.

    Each training is a process of its own, fed from a queue. With the towers: that of 4 towers over
    that of one after 100 steps, the same total batch. With the steps: that of 2 towers after 1,000
    steps over that after 100.

    Returns:
        List of two Figure.
    """
    megabytes = {}
    for num_towers, steps in ((1, STEPS[:1]), (4, STEPS[:1]), (2, STEPS)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            megabytes[num_towers] = pool.apply(_resident_after, (num_towers, steps))
    return [
        Figure(
            "resident_memory_k4",
            megabytes[4][0] / megabytes[1][0],
            "ratio",
            "<=",
            1.15,
            {"megabytes": [round(megabytes[k][0], 1) for k in (1, 4)]},
        ),
        Figure(
            "resident_memory_steps",
            megabytes[2][1] / megabytes[2][0],
            "ratio",
            "<=",
            1.01,
            {"steps": STEPS, "megabytes": [round(value, 1) for value in megabytes[2]]},
        ),
    ]


def _resident_after(num_towers, steps):
    """Resident megabytes of this process after some numbers of steps, in increasing order."""
    limited = one_thread()
    made = []

    def make_images(place):
        made.append(input_queue.training_inputs("queue", place, SPECS))
        slices, _ = made[0].split(feeding.split_equally)
        return made[0].tensors[0], [images for (images,) in slices]

    training = reference_net.tower_graph(logical_cpus(num_towers), make_images=make_images)
    rng = np.random.RandomState(0)
    with contextlib.closing(reference_net.start(training, limited)) as session:
        source = input_sources.make_source(
            made[0],
            session,
            lambda: (rng.uniform(size=[BATCH, SIDE, SIDE, CHANNELS]), None),
            arrays=lambda batch: [batch],
            keep=lambda batch: None,
            stop_readers=lambda: None,
        )
        found = []
        with source:
            for step in range(1, max(steps) + 1):
                session.run(training.fetches, source.get()[0])
                if step in steps:
                    gc.collect()
                    found.append(reader_probe.resident_megabytes())
    return found


def reader_start():
    """Time until a reader process can begin its first batch, and its resident memory then.

    The reader is EAST's, for pictures of 1280 x 720. The time is wall time, from before the process
    is started until it has imported what it needs and has made its reader; the value is the median.
    The memory after a first batch, which holds decoded pictures, is in the detail.

    Returns:
        List of two Figure.
    """
    seconds, reports = [], []
    with many_word_pictures() as folder:
        make_reader = functools.partial(
            icdar.make_reader, training_data_path=folder, seed=0, input_size=512, batch_size=4
        )
        for _ in range(START_ROUNDS):
            began = time.monotonic()
            reports.append(
                _reports(functools.partial(reader_probe.make_probe, make_reader=make_reader))
            )
            seconds.append(reports[-1][0]["ready"] - began)
    ready, busy = (np.median([pair[i]["megabytes"] for pair in reports]) for i in (0, 1))
    spread = {
        "rounds": START_ROUNDS,
        "fastest": round(min(seconds), 3),
        "load_average": round(os.getloadavg()[0], 1),
        "cpus": len(os.sched_getaffinity(0)),
    }
    imported = any(report["tensorflow"] for pair in reports for report in pair)
    detail = {"after_a_batch": round(busy, 1), "tensorflow_imported": imported}
    return [
        Figure("reader_start", np.median(seconds), "s wall", "<", 0.5, spread),
        Figure("reader_memory", ready, "MB", "<", 150, detail),
    ]


def _reports(make_generator):
    """What a reader process of a probe reports."""
    reader = ProcessReader(make_generator, 0, None, 1)
    try:
        found = []
        while len(found) < 2:
            message = reader.receive(START_SECONDS)
            if message is None or message[0] != "batch":
                raise RuntimeError(f"the reader process did not report, but gave {message}")
            found.append(message[1])
        return found
    finally:
        reader.end()
        reader.join(time.monotonic() + START_SECONDS)
        reader.close()
