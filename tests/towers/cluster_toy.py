"""A small training for the cluster tests: two layers, batch norm, Adam, averaged weights.

Each test process is forked from a server that has imported TensorFlow already, and has no session
yet. Data depend on the step and the tower alone, so that any split over workers sees the same.
"""

import faulthandler
import functools
import os
import signal
import sys
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import numpy as np
import tensorflow.compat.v1 as tf
from absl import logging

from utils.towers import (
    averages,
    checkpoints,
    cluster_server,
    cluster_session,
    devices,
    engine,
    engine_flags,
    gradients,
    loop,
)
from utils.towers.cluster import ClusterError, cluster_from

ROWS = 3  # samples of a tower


def batch(step, towers):
    """(x, y) of some towers, numbered through all workers."""
    parts = [np.random.RandomState([step, tower]).rand(ROWS, 6) for tower in towers]
    x = np.concatenate(parts).astype(np.float32)
    return x, np.sin(x.sum(1, keepdims=True) * 3)


def tower_loss(x, y, reuse):
    with tf.variable_scope(tf.get_variable_scope(), reuse=reuse):
        w = tf.get_variable("w", [6, 8], initializer=tf.glorot_normal_initializer(seed=1))
        b = tf.get_variable("b", [8], initializer=tf.zeros_initializer())
        v = tf.get_variable("v", [8, 1], initializer=tf.glorot_normal_initializer(seed=2))
        moving = tf.get_variable(
            "moving_mean", [8], initializer=tf.zeros_initializer(), trainable=False
        )
    hidden = tf.matmul(x, w) + b
    averages.add_moving_average_update(moving, tf.reduce_mean(hidden, 0), 0.9)
    return tf.reduce_mean(tf.square(tf.matmul(tf.nn.tanh(hidden), v) - y))


class ToyGraph:
    """The training graph, built as in the scripts."""

    def __init__(self, place, options, cluster):
        with tf.device(place.host):
            self.x = tf.placeholder(tf.float32, [None, 6])
            self.y = tf.placeholder(tf.float32, [None, 1])
            xs, ys = (tf.split(tensor, place.num_towers) for tensor in (self.x, self.y))
        with tf.device(place.step_device):
            global_step = tf.get_variable(
                "global_step", [], initializer=tf.zeros_initializer(), trainable=False
            )
        with tf.device(place.host):
            make_optimizer = functools.partial(tf.train.AdamOptimizer, 0.05)
            self.engine = engine.Engine(
                place, options, make_optimizer, global_step, self.x, cluster=cluster
            )
        towers, tower_grads, losses = [], [], []
        for i in range(place.num_towers):
            with self.engine.tower(i) as tower:
                loss = tower_loss(xs[i], ys[i], reuse=True if i else None)
                tower_grads.append(self.engine.compute_gradients(loss))
            towers.append(tower)
            losses.append(loss)
        with tf.device(place.host):
            copies = self.engine.combine_gradients(tower_grads, gradients.average_gradients, towers)
            self.engine.build_train_op(
                copies, towers, tf.train.ExponentialMovingAverage(0.9), bn_updates="in_order"
            )
            self.loss = gradients.add_in_order(losses)
        self.train_op = self.engine.train_op


def main(
    ps_hosts=(),
    worker_hosts=(),
    job_name="",
    task_index=0,
    *,
    towers=2,
    steps=5,
    timeout=60,
    folder=None,
    save_every=1000,
    gate=None,
    **options,
):
    """Trains like a script; prints its steps. The chief saves to `folder`.

    It initialises the variables once there is a file `gate`.
    """
    try:
        cluster = cluster_from(None, ps_hosts, worker_hosts, job_name, task_index)
        if cluster and cluster.is_parameter_server:
            cluster_server.serve(cluster, timeout)
            print("served", flush=True)
            sys.exit(0)
        place = devices.Devices("CPU", tuple(range(towers)))
        options = engine_flags.EngineOptions(**options)
        if cluster:
            options, place = cluster.options(options), cluster.devices(place)
        place = options.place_variables(place)
        loop.run_script(
            functools.partial(
                train, cluster, place, options, steps, timeout, folder, save_every, gate
            ),
            (ClusterError, checkpoints.CheckpointError),
        )
    except ClusterError as error:
        sys.exit(f"error: {error}")


def train(cluster, place, options, steps, timeout, folder, save_every, gate, stop):
    task = cluster.task if cluster else 0
    numbers = range(task * place.num_towers, (task + 1) * place.num_towers)
    with tf.Graph().as_default() as graph:
        net = ToyGraph(place, options, cluster)
        init = tf.global_variables_initializer()
        with tf.device(place.host):
            saver = checkpoints.CheckpointSaver(folder)
        session = cluster_session.make_session(
            cluster, place, net.engine, init, stop, timeout, {"towers": place.num_towers}
        )
        graph.finalize()

        def initialise(sess):
            print("initialising", flush=True)
            while gate and not os.path.exists(gate):
                time.sleep(0.05)
            sess.run(init)
            if os.path.isdir(folder) and any(".index" in name for name in os.listdir(folder)):
                restored = checkpoints.restore_training(sess, folder)
                print(f"restored {restored.step}", flush=True)

        def save():
            return session.until_done(lambda: saver.save(session.session, session.current_step()))

        with session.started(initialise):
            session.defer_signals()
            print("started", session.step, flush=True)
            while session.step < steps and not session.should_stop():
                x, y = batch(int(session.step), numbers)
                try:
                    with session.interruptible():
                        pass
                    session.run_step([net.loss, net.train_op], {net.x: x, net.y: y})
                    print("step", int(session.step), flush=True)
                    if session.is_chief and session.step % save_every == 0:
                        save()
                except loop.StopRequested:
                    break
                except loop.Rewound:
                    print("rewound to", int(session.step), flush=True)
            if session.is_chief:
                print("saved", save(), flush=True)
    print("ended", int(session.step), flush=True)


def child(log, arguments):
    """Entry of a forked process."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)
    logging.set_verbosity(logging.INFO)  # as in a script
    faulthandler.register(signal.SIGUSR1)  # a test that waits in vain asks where the process is
    os.chdir(os.path.dirname(log))
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    main(**arguments)
