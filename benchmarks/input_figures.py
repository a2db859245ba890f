"""Figures of the input: how well reading is hidden behind the steps, and whether waiting is true.

Wall times, with readers that sleep: they need a machine that does nothing else.
"""

import functools
import itertools
import time

import numpy as np
import tensorflow.compat.v1 as tf

from benchmarks.measure import Figure, ratio_figure
from benchmarks.reference_net import (
    BATCH,
    CHANNELS,
    SIDE,
    logical_cpus,
    one_thread,
    start,
    tower_graph,
)
from data.data_util import GeneratorEnqueuer
from utils.towers import feeding, input_queue, input_sources

SPECS = [("images", tf.float32, [None, SIDE, SIDE, CHANNELS])]
SETTLE, STEPS = 6, 20  # steps of a round before and within the measured time
OVERLAP_BARS = {"half": (0.5, 1.05), "nine_tenths": (0.9, 1.10)}  # of a step, and the figure's bar
# A stall as long as the measured steps, in a batch that is asked for and used within them.
STALLED_BATCH = SETTLE + STEPS // 2


class Training:
    """The reference net with an input of one mode.

    Args:
        mode: of `input_queue.training_inputs`.
        limited: what `one_thread` returned.
        place: the towers' Devices.
    """

    def __init__(self, mode, limited, place):
        made = []

        def make_images(place):
            made.append(input_queue.training_inputs(mode, place, SPECS))
            slices, _ = made[0].split(feeding.split_equally)
            return made[0].tensors[0], [images for (images,) in slices]

        training = tower_graph(place, make_images=make_images)
        self._fetches = training.fetches
        self._inputs = made[0]
        self._session = start(training, limited)

    def alone(self):
        """Times steps that nobody has to read for; returns the [2] wall and CPU seconds of one."""
        feed = self._inputs.feed([_batch()])
        return self._timed(lambda: self._session.run(self._fetches, feed))

    def with_reader(self, seconds):
        """Times steps with a reader that sleeps.

        Args:
            seconds: function of the number of a batch that returns the sleep before it, in seconds.

        Returns:
            (times, waiting): [2] wall and CPU seconds of a step, and the share of the time that
            went by waiting for input as the source counts it.
        """
        make_reader = functools.partial(_sleeping_reader, seconds=seconds)
        with (
            GeneratorEnqueuer(make_reader, max_queue_size=2) as readers,
            input_sources.make_source(
                self._inputs,
                self._session,
                lambda: (readers.get(), readers.get_state()),
                arrays=lambda batch: [batch],
                keep=lambda batch: None,
                stop_readers=readers.stop,
            ) as source,
        ):

            def step():
                self._session.run(self._fetches, source.get()[0])

            times = self._timed(step, begin=source.wait_seconds)
            return times, source.wait_seconds() / (times[0] * STEPS)

    @staticmethod
    def _timed(step, begin=lambda: None):
        for _ in range(SETTLE):
            step()
        begin()
        start = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            step()
        return (np.array([time.perf_counter(), time.process_time()]) - start) / STEPS


def overlap(rounds=15, place=None, limit=one_thread):
    """Wall time of a step with a reader that sleeps 0.5 and 0.9 of a step, queued inputs.

    Over the longer of the two, which is the step fed with a batch that is at hand. The same with
    fed inputs, for which the reader works ahead as well, and the CPU times are in the detail.

    Args:
        rounds: measured rounds; in each the step alone is measured before and after the others.
        place: the towers' Devices; two logical CPUs without.
        limit: function like `one_thread`.

    Returns:
        List of Figure.
    """
    limited = limit()
    place = place or logical_cpus(2)
    trainings = {mode: Training(mode, limited, place) for mode in input_queue.MODES}
    alone, times = [], {}
    for training in trainings.values():
        training.alone()
    for _ in range(rounds):
        before = trainings["feed"].alone()
        for name, (share, _) in OVERLAP_BARS.items():
            for mode, training in trainings.items():
                measured, _ = training.with_reader(_always(share * before[0]))
                times.setdefault((name, mode), []).append(measured)
        alone.append((before + trainings["feed"].alone()) / 2)
    alone = np.array(alone)
    figures = []
    for name, (_, bar) in OVERLAP_BARS.items():
        ratios = {mode: np.array(times[name, mode]) / alone for mode in trainings}
        queue = np.array(times[name, "queue"])
        figures.append(
            ratio_figure(
                f"input_overlap_{name}",
                queue[:, 0],
                alone[:, 0],
                "<=",
                bar,
                fed=round(np.median(ratios["feed"][:, 0]), 3),
                cpu_queue=round(np.median(ratios["queue"][:, 1]), 3),
                cpu_fed=round(np.median(ratios["feed"][:, 1]), 3),
            )
        )
    return figures


def waiting(rounds=15):
    """Whether the share of waiting that the log shows is that of injected stalls.

    A reader sleeps before one of the batches for as long as all measured steps take, of which the
    batches that wait hide a part. What is true is taken from the wall time alone: one less the step
    alone over the step with this reader. The value is the larger difference of the two modes, each
    the size of the rounds' median.

    Args:
        rounds: measured rounds.

    Returns:
        List of one Figure.
    """
    limited = one_thread()
    differences, shares = {}, {}
    trainings = {mode: Training(mode, limited, logical_cpus(2)) for mode in input_queue.MODES}
    for training in trainings.values():
        training.alone()
    for _ in range(rounds):
        for mode, training in trainings.items():
            before = training.alone()[0]
            times, share = training.with_reader(_once(STEPS * before))
            true = 1 - (before + training.alone()[0]) / 2 / times[0]
            differences.setdefault(mode, []).append(share - true)
            shares.setdefault(mode, []).append(share)
    value = max(abs(np.median(values)) for values in differences.values())
    detail = {
        f"{name}_{mode}": round(np.median(values), 3)
        for name, found in (("share", shares), ("difference", differences))
        for mode, values in found.items()
    }
    return [Figure("input_waiting_share", value, "share of time", "<=", 0.05, detail)]


def _batch():
    return np.random.RandomState(0).uniform(size=[BATCH, SIDE, SIDE, CHANNELS]).astype(np.float32)


def _always(seconds):
    return lambda number: seconds


def _once(seconds):
    return lambda number: seconds if number == STALLED_BATCH else 0.0


def _sleeping_reader(unused_index, seconds):
    batch = _batch()
    for number in itertools.count():
        time.sleep(seconds(number))
        yield batch
