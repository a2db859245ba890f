"""Figures of trainings on several hosts: bytes on the wire, with real processes on loopback."""

import contextlib
import functools
import json
import multiprocessing
import os
import queue
import socket
import struct
import sys

import tensorflow.compat.v1 as tf

import multigpu_train
from benchmarks.east_figures import made_up_batch
from benchmarks.measure import Figure, free_addresses
from benchmarks.reference_net import feed_of, logical_cpus, tower_graph
from utils.towers import cluster_server, cluster_session, engine_flags, loop
from utils.towers.cluster import Cluster, ClusterError

SETTLE = 3  # steps before the counted ones
CLUSTER_SECONDS = 120  # for a process that cannot be reached
BAR = 2.1
# struct tcp_info of Linux: tcpi_bytes_acked and tcpi_bytes_received, both 64 bits.
BYTES_OFFSET = 120


def bytes_of_east(steps=4):
    """Bytes between a worker and the parameter server in a step, over those of EAST's variables.

    One parameter server and two synchronous workers, as processes on loopback, with one tower each
    and with two. A worker receives the trainable variables and sends their gradients, so 2 is the
    least. Both ways are counted, by the kernel, on the worker's own connections, with all that the
    runtime says beside. The value is that of the worker with more.

    Args:
        steps: counted ones.

    Returns:
        List of two Figure.
    """
    return [_figure(f"grpc_bytes_east_k{k}", functools.partial(_east, k), steps) for k in (1, 2)]


def bytes_of_reference_net(steps=30):
    """As `bytes_of_east`, for the reference net.

    Its variables are small: what the runtime says beside them weighs more.

    Args:
        steps: counted ones.

    Returns:
        List of two Figure.
    """
    return [
        _figure(f"grpc_bytes_reference_k{k}", functools.partial(_reference, k), steps)
        for k in (1, 2)
    ]


def _figure(name, build, steps):
    """Trains with a cluster and counts.

    Args:
        name: of the figure.
        build: function of a Cluster that builds the graph of a worker; see `_reference`.
        steps: counted ones.

    Returns:
        Figure.
    """
    reports = _train(build, steps)
    totals = [report["sent"] + report["received"] for report in reports]
    largest = reports[totals.index(max(totals))]
    size = largest["variables"]
    detail = {
        "steps": steps,
        "bytes_of_variables": size,
        "sent": round(largest["sent"] / steps / size, 3),
        "received": round(largest["received"] / steps / size, 3),
        "workers": [round(total / steps / size, 3) for total in totals],
    }
    return Figure(name, max(totals) / steps / size, "x variables", "<=", BAR, detail)


def _train(build, steps):
    """Runs a parameter server and two workers; returns what the workers report."""
    ps, *workers = free_addresses(3)
    spawn = multiprocessing.get_context("spawn")
    reports = spawn.Queue()
    processes = []
    try:
        for job, task in (("ps", 0), ("worker", 0), ("worker", 1)):
            cluster = Cluster((ps,), tuple(workers), job, task)
            processes.append(
                spawn.Process(target=_process, args=(cluster, build, steps, reports), daemon=True)
            )
            processes[-1].start()
        found = [_report(reports, processes) for _ in workers]
        for process in processes:
            process.join(CLUSTER_SECONDS)
    finally:
        for process in processes:
            process.kill()
    return found


def _report(reports, processes):
    """The next report; raises RuntimeError where a process has failed."""
    while True:
        try:
            return json.loads(reports.get(timeout=1))
        except queue.Empty:
            codes = [process.exitcode for process in processes]
            if any(codes):
                raise RuntimeError(f"exit codes of the cluster's processes: {codes}") from None


def _process(cluster, build, steps, reports):
    """A process of the cluster."""
    os.dup2(2, 1)
    if cluster.is_parameter_server:
        cluster_server.serve(cluster, CLUSTER_SECONDS)
        sys.exit(0)
    loop.run_script(functools.partial(_work, cluster, build, steps, reports), (ClusterError,))


def _work(cluster, build, steps, reports, stop):
    """Trains as a worker and reports."""
    place, graph, engine, fetches, feed = build(cluster)
    with graph.as_default():
        initialize = tf.global_variables_initializer()
        session = cluster_session.make_session(
            cluster, place, engine, initialize, stop, CLUSTER_SECONDS
        )
        size = sum(
            variable.shape.num_elements() * variable.dtype.size
            for variable in tf.trainable_variables()
        )
    graph.finalize()
    with session.started(lambda sess: sess.run(initialize)):
        stop.defer()
        begun = None
        while session.step < SETTLE + steps and not session.should_stop():
            session.run_step(fetches, feed)
            if session.step == SETTLE:
                begun = bytes_of_connections()
        ended = bytes_of_connections()
        sent, received = (after - before for before, after in zip(begun, ended))
        reports.put(json.dumps({"sent": sent, "received": received, "variables": size}))
        reports.close()
        reports.join_thread()


def _reference(num_towers, cluster):
    """(place, graph, engine, fetches, feed) of the reference net."""
    options = cluster.options(engine_flags.EngineOptions())
    place = options.place_variables(cluster.devices(logical_cpus(num_towers)))
    training = tower_graph(place, options=options, cluster=cluster)
    return place, training.graph, training.engine, training.fetches, feed_of(training)


def _east(num_towers, cluster):
    """As `_reference`, for EAST with an image of 64 x 64 a tower."""
    options = cluster.options(engine_flags.EngineOptions())
    place = options.place_variables(cluster.devices(logical_cpus(num_towers)))
    with tf.Graph().as_default() as graph:
        net = multigpu_train.TrainGraph(place, options=options, cluster=cluster)
        fetches = [net.model_loss, net.total_loss, net.nonfinite, net.train_op]
        return place, graph, net.engine, fetches, net.feed(made_up_batch(num_towers, 64))


def bytes_of_connections():
    """Bytes that this process has sent and received over its TCP connections that are open.

    Returns:
        (sent and acknowledged, received).
    """
    sent = received = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of listdir, or no socket
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                acked, got = struct.unpack_from("QQ", info, BYTES_OFFSET)
                sent, received = sent + acked, received + got
    return sent, received
