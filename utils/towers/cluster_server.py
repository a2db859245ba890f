"""The server that each process of a cluster runs, and the work of a parameter server."""

import time

import tensorflow.compat.v1 as tf
from absl import logging

from utils.towers import cluster_hosts, devices
from utils.towers.cluster import WORKER, ClusterError
from utils.towers.cluster_mail import Mailbox

_PAUSE_SECONDS = 0.2
_LOOK_SECONDS = 2.0  # between two looks for workers that are gone


def start_server(cluster, config):
    """Starts this process's part of TensorFlow's distributed runtime.

    Args:
        cluster: utils.towers.cluster.Cluster.
        config: ConfigProto of the process's devices.

    Returns:
        tf.train.Server.

    Raises:
        ClusterError: the port cannot be used.
    """
    try:
        return tf.train.Server(
            cluster.definition_for_server(),
            job_name=cluster.job,
            task_index=cluster.task,
            config=config,
        )
    except tf.errors.OpError as error:
        raise ClusterError(
            f"{cluster.describe(cluster.job, cluster.task)} cannot listen on its port"
            f" ({error.message.partition(chr(10))[0]}); end the process that has it or pass"
            " another one"
        ) from error


def serve(cluster, timeout_seconds=60):
    """Keeps variables until the training is over.

    That is when a worker has said that it is done, and each other one has too or cannot be reached
    for `timeout_seconds`.

    Args:
        cluster: Cluster, in which this process is a parameter server.
        timeout_seconds: see above.

    Raises:
        ClusterError: the port cannot be used.
    """
    config = tf.ConfigProto(device_count={"GPU": 0})
    config.device_filters.append(devices.parameter_server_task(cluster.task))
    server = start_server(cluster, config)
    watch = cluster_hosts.HostWatch(
        cluster, [(WORKER, task) for task in range(cluster.num_workers)], timeout_seconds
    )
    with tf.Graph().as_default() as graph:
        mailbox = Mailbox(cluster.task)
        signature = tf.placeholder(tf.string, [])
        publish = tf.group(mailbox.signature.assign(signature), mailbox.who_stopped.initializer)
        waiting = mailbox.done.size()
        take = mailbox.done.dequeue()
        graph.finalize()
        with tf.Session(server.target, config=config) as session:
            session.run(publish, {signature: cluster.signature()})
            logging.info("%s serves", cluster.describe(cluster.job, cluster.task))
            done, looked = set(), time.monotonic()
            while len(done) < cluster.num_workers:
                time.sleep(_PAUSE_SECONDS)
                done.update(int(session.run(take)) for _ in range(session.run(waiting)))
                if done and time.monotonic() - looked > min(_LOOK_SECONDS, timeout_seconds / 4):
                    watch.missing()
                    done.update(watch.gone())
                    looked = time.monotonic()
    logging.info("%s: the workers are done", cluster.describe(cluster.job, cluster.task))
