"""A toy training, whose variables show which step they belong to, for the checkpoint tests."""

import contextlib
import os
import signal

import numpy as np
import tensorflow.compat.v1 as tf

from utils.towers import checkpoints

SIDE = checkpoints.READER_STATE_SUFFIX


def build_network(width=4, head=2, scope="net"):
    """Six variables of a network: a backbone `net/`, and `head/`."""
    shapes = {
        f"{scope}/conv/weights": [3, width],
        f"{scope}/conv/BatchNorm/gamma": [width],
        f"{scope}/conv/BatchNorm/moving_mean": [width],
        f"{scope}/conv/BatchNorm/moving_variance": [width],
        "head/weights": [width, head],
        "head/biases": [head],
    }
    with tf.device("/cpu:0"):
        for name, shape in shapes.items():
            tf.get_variable(
                name,
                shape,
                initializer=tf.random_normal_initializer(),
                trainable="moving" not in name,
                use_resource=True,
            )


def make_step(dtype=tf.float32):
    return tf.get_variable(
        "global_step",
        [],
        dtype,
        initializer=tf.zeros_initializer(),
        trainable=False,
        use_resource=True,
    )


class Toy:
    """Graph, session and saver of one training; the graph is finalised.

    Args:
        directory: where its saver writes, or None for no saver.
        optimizer: 'adam', 'momentum', 'sgd', or None for an inference graph.
        averages: whether the training keeps moving averages of the weights.
        start: False leaves out the session, for a process that will fork; `start()` makes it.
        kwargs: for build_network.
    """

    def __init__(
        self,
        directory=None,
        optimizer="adam",
        averages=True,
        step=tf.float32,
        keep=5,
        start=True,
        **kwargs,
    ):
        self.graph = tf.Graph()
        with self.graph.as_default():
            build_network(**kwargs)
            self.step = make_step(step)
            self.train_op = self._train_op(optimizer, averages) if optimizer else None
            self.saver = None
            if directory is not None:
                self.saver = checkpoints.CheckpointSaver(directory, max_to_keep=keep)
            self.init = tf.global_variables_initializer()
            self.variables = {v.op.name: v for v in tf.global_variables()}
        self.graph.finalize()
        if start:
            self.start()

    def start(self):
        self.session = tf.Session(graph=self.graph)
        self.session.run(self.init)

    def _train_op(self, optimizer, averages):
        loss = tf.add_n([tf.reduce_sum(tf.square(v - 1)) for v in tf.trainable_variables()])
        makers = {
            "adam": tf.train.AdamOptimizer,
            "momentum": lambda rate: tf.train.MomentumOptimizer(rate, 0.9),
            "sgd": tf.train.GradientDescentOptimizer,
        }
        train_op = makers[optimizer](0.01).minimize(loss, global_step=self.step)
        if averages:
            with tf.control_dependencies([train_op]):
                ema = tf.train.ExponentialMovingAverage(0.9)
                train_op = ema.apply(tf.trainable_variables())
        return train_op

    def train(self, steps=1):
        for _ in range(steps):
            self.session.run(self.train_op)
        return self

    def values(self):
        return self.session.run(self.variables)

    def set(self, name, value):
        variable = self.variables[name]
        initial = variable.initializer.inputs[1].name
        value = np.broadcast_to(value, variable.shape.as_list())
        self.session.run(variable.initializer, {initial: value})

    def mark(self, step):
        """Every variable gets the step as its value."""
        feed = {
            v.initializer.inputs[1].name: np.full(v.shape.as_list(), step, np.float32)
            for v in self.variables.values()
        }
        self.session.run([v.initializer for v in self.variables.values()], feed)

    def save(self, step):
        """Saves with a side file that holds the step as well."""

        def write(path):
            np.savez(path, step=step)

        return self.saver.save(self.session, step, {SIDE: write})


def equal(one, other):
    """Whether two {name: array} agree bit for bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def steps_in(directory):
    """{step: set of values in its files} of every complete checkpoint in a folder."""
    found = {}
    for prefix in checkpoints.candidate_checkpoints(directory):
        reader = tf.train.NewCheckpointReader(prefix)
        seen = {
            value
            for n in reader.get_variable_to_shape_map()
            for value in np.ravel(reader.get_tensor(n))
        }
        with np.load(prefix + SIDE) as side:
            seen.add(int(side["step"]))
        found[checkpoints.checkpoint_step(prefix)] = seen
    return found


@contextlib.contextmanager
def kill_at_call(number):
    """Kills this process, as kill -9 does, just before its `number`-th change of the disk."""
    count = 0
    originals = {
        n: getattr(os, n) for n in ("mkdir", "replace", "remove", "unlink", "rmdir", "fsync")
    }

    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name, function in originals.items():
        setattr(os, name, counted(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(os, name, function)
