"""EAST's training on given devices, with inputs of several kinds, for `benchmarks.gpu_figures`."""

import contextlib
import dataclasses
import functools
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import multigpu_train
from benchmarks.east_figures import made_up_batch
from utils.towers import devices, engine_flags, input_queue, input_sources

INPUTS = ("constant", "feed", "queue", "staged")  # where a step's batch comes from


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        side: of an image, pixels.
        batch: images a tower and step.
        settle: steps before a measurement.
        steps: of a measured block.
        blocks: number of them.
    """

    side: int
    batch: int
    settle: int
    steps: int
    blocks: int


FULL = Size(side=512, batch=14, settle=10, steps=20, blocks=5)
SMALL = Size(side=64, batch=1, settle=1, steps=2, blocks=1)  # to see that all of it runs


def size_for(place):
    """The Size of measurements on these Devices: small on CPUs, whose times are of no interest."""
    return FULL if place.kind == "GPU" else SMALL


@dataclasses.dataclass(frozen=True)
class Running:
    """A training that has begun.

    Attributes:
        place: the towers' Devices, variables where the options want them.
        graph: tf.Graph.
        session: tf.Session.
        fetches: what a step of the script runs.
        next_feed: function that returns the feed_dict of the next step.
    """

    place: devices.Devices
    graph: tf.Graph
    session: tf.Session
    fetches: list
    next_feed: Callable[[], dict]

    def step(self, options=None, metadata=None):
        """Makes a step; with tf.RunOptions, fills the tf.RunMetadata."""
        return self.session.run(self.fetches, self.next_feed(), options, metadata)


@contextlib.contextmanager
def running(place, source="constant", options=engine_flags.DEFAULTS):
    """Builds EAST's training graph as the script does and starts it.

    Args:
        place: utils.towers.devices.Devices.
        source: one of INPUTS. 'constant': the batch is on the towers' devices for good; 'feed': fed
            with each step; 'queue': from a queue in host memory; 'staged': from a queue, through
            staging areas on the towers' devices. Batches are at hand, nobody reads them.
        options: utils.towers.engine_flags.EngineOptions.

    Yields:
        Running.
    """
    place = options.place_variables(place)
    size = size_for(place)
    batch = made_up_batch(
        size.batch * place.num_towers,
        size.side,
        np.float32 if source in ("constant", "feed") else np.uint8,
    )
    with contextlib.ExitStack() as stack:
        graph = stack.enter_context(tf.Graph().as_default())
        tf.set_random_seed(0)
        make_inputs = functools.partial(_make_inputs, source, size)
        with unittest.mock.patch.object(input_queue, "training_inputs", make_inputs):
            net = multigpu_train.TrainGraph(place, options=options)
        initialize = [tf.global_variables_initializer(), tf.local_variables_initializer()]
        graph.finalize()
        session = stack.enter_context(tf.Session(config=place.session_config()))
        session.run(initialize)
        session.run(net.engine.synchronize)
        if source == "constant":
            next_feed = dict
        else:
            batches = input_sources.make_source(
                net.inputs,
                session,
                lambda: (batch, None),
                arrays=net.arrays,
                keep=lambda batch: None,
                stop_readers=lambda: None,
            )
            stack.enter_context(batches)
            next_feed = functools.partial(_first, batches.get)
        fetches = [net.model_loss, net.total_loss, net.nonfinite, net.train_op]
        yield Running(place, graph, session, fetches, next_feed)


def examples_per_second(place, source="constant", options=engine_flags.DEFAULTS):
    """Images a second of a training, by the median of some blocks of steps.

    Args:
        place, source, options: see `running`.
    """
    size = size_for(place)
    seconds = []
    with running(place, source, options) as training:
        for _ in range(size.blocks):
            for _ in range(size.settle):
                training.step()
            start = time.perf_counter()
            for _ in range(size.steps):
                training.step()
            seconds.append(time.perf_counter() - start)
    return size.batch * place.num_towers * size.steps / float(np.median(seconds))


class ConstantInputs(input_queue.FedInputs):
    """Each tower's share of one batch, in variables on its device: no step has to bring it there.

    Args:
        size: Size.
        place, specs: of `input_queue.training_inputs`.
    """

    def __init__(self, size, place, specs):
        self._size = size
        super().__init__(place, specs)

    def _make_tensors(self):
        maps = [self._size.batch, *[self._size.side // 4] * 2]
        images = [self._size.batch, *[self._size.side] * 2]
        self._shares = []
        for tower in range(self._place.num_towers):
            with tf.device(self._place.tower_name(tower)):
                self._shares.append(
                    [
                        _constant([*(maps if number else images), spec.shape[-1]], spec.dtype)
                        for number, spec in enumerate(self._specs)
                    ]
                )
        return [tf.concat(parts, 0) for parts in zip(*self._shares)]

    def split(self, split_batch):
        """As FedInputs.split: the shares, whatever the function."""
        del split_batch
        return self._shares, []


def _make_inputs(source, size, unused_mode, place, specs, capacity=2) -> Any:
    """Takes the place of `input_queue.training_inputs`."""
    specs = [input_queue.InputSpec(*spec) for spec in specs]
    if source == "constant":
        return ConstantInputs(size, place, specs)
    if source == "feed":
        return input_queue.FedInputs(place, specs)
    return input_queue.QueuedInputs(place, specs, capacity, staged=source == "staged")


def _constant(shape, dtype):
    variable = tf.Variable(
        tf.random_uniform(shape, dtype=dtype),
        trainable=False,
        collections=[tf.GraphKeys.LOCAL_VARIABLES],
        use_resource=True,
    )
    return variable.read_value()


def _first(get):
    return get()[0]
