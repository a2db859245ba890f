"""bench.py --gpu on logical devices, and what it reads from TensorFlow's traces."""

import importlib
import math

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import bench
from benchmarks import east_devices, gpu_figures, groups, traces
from utils.towers import devices, replication

PLACE = devices.Devices("CPU", (0, 1))


def step_stats(**spans):
    """StepStats of device -> list of (start, stop) in microseconds."""
    stats = tf.RunMetadata().step_stats
    for device, pairs in spans.items():
        of_device = stats.dev_stats.add(device=DEVICES[device])
        for start, stop in pairs:
            of_device.node_stats.add(
                all_start_micros=start, op_start_rel_micros=1, op_end_rel_micros=stop - start
            )
    return stats


DEVICES = {
    "cpu": "/job:localhost/replica:0/task:0/device:CPU:0",
    "gpu": "/job:localhost/replica:0/task:0/device:GPU:0",
    "kernels": "/device:GPU:0/stream:all",
    "copies": "/device:GPU:0/stream:14",
    "other": "/device:GPU:1/stream:all",
}


def test_a_gpu_idles_where_neither_kernel_nor_copy_runs():
    stats = step_stats(
        cpu=[(999, 1100)],
        gpu=[(1000, 1100)],  # of the host, for the GPU
        kernels=[(1009, 1030), (1019, 1040), (1059, 1070)],
        copies=[(1064, 1080)],
        other=[(1000, 1100)],
    )
    # Busy from 1010 to 1040 and from 1060 to 1080, of a step from 1000 to 1100.
    assert traces.idle_share(stats, "/gpu:0") == pytest.approx(0.5)
    assert traces.idle_share(stats, "/cpu:0") == pytest.approx(0.0)
    assert traces.idle_share(stats, "/gpu:2") is None
    assert traces.idle_share(step_stats(gpu=[(1, 9)]), "/gpu:0") is None


def partition(*nodes):
    """A partition graph of nodes (name, op, device)."""
    graph = tf.GraphDef()
    for name, op, device in nodes:
        graph.node.add(name=name, op=op, device=f"/job:localhost/replica:0/task:0/device:{device}")
    return graph


def test_convolutions_and_batch_norm_belong_on_the_devices_of_towers():
    place = devices.Devices("GPU", (0, 1))
    graphs = [
        partition(("a", "Conv2D", "GPU:0"), ("b", "_FusedBatchNormEx", "GPU:1")),
        partition(("c", "Conv2DBackpropInput", "CPU:0"), ("d", "AddN", "CPU:0")),
    ]
    misplaced, numbers = traces.misplaced_ops(graphs, place)
    assert len(misplaced) == 1 and misplaced[0].startswith("c on ") and "CPU:0" in misplaced[0]
    assert numbers == {"GPU:0": 1, "GPU:1": 1}


@pytest.mark.parametrize(
    "where, at, missing",
    [
        ("host", "CPU:0", []),
        ("tower0", "GPU:0", []),
        ("host", "GPU:0", ["v"]),
        ("tower0", "CPU:0", ["v"]),
    ],
)
def test_variables_belong_where_they_were_asked_for(where, at, missing):
    place = devices.Devices("GPU", (0, 1), variables=where)
    with tf.Graph().as_default() as graph:
        tf.get_variable("v", [], use_resource=True)
        tf.get_variable("step", [], use_resource=True, trainable=False)
    found, number = traces.misplaced_variables(
        [partition(("v", "VarHandleOp", at), ("step", "VarHandleOp", "GPU:1"))], graph, place
    )
    assert number == 1 and [text.split()[0] for text in found] == missing


def test_copies_of_variables_belong_on_their_towers_devices():
    place = devices.Devices("GPU", (0, 1), variables="own")
    collections = [replication.REPLICA_VARIABLES]
    with tf.Graph().as_default() as graph:
        tf.get_variable("v", [], use_resource=True)
        for name in ("replica_1/v", "replica_1/slot"):
            tf.get_variable(name, [], use_resource=True, collections=collections, trainable=False)
    nodes = [(name, "VarHandleOp", "GPU:0") for name in ("v", "replica_1/v")]
    misplaced, number = traces.misplaced_variables([partition(*nodes)], graph, place)
    assert number == 3
    assert [text.split()[0] for text in misplaced] == ["replica_1/v", "replica_1/slot"]
    assert misplaced[1].endswith("no device")


def test_placement_is_found_on_logical_devices():
    ops, variables = gpu_figures.placement(PLACE)
    assert ops.record()["pass"] and variables.record()["pass"]
    for mode in gpu_figures.MODES:
        assert min(ops.detail[mode].values()) > 150
    assert variables.detail["replicated"] > 2 * variables.detail["cpu"] > 300


@pytest.mark.parametrize("source", east_devices.INPUTS)
def test_every_input_trains(source):
    with east_devices.running(PLACE, source) as training:
        losses = [training.step()[0] for _ in range(3)]
        ops = {op.type for op in training.graph.get_operations()}
    assert np.isfinite(losses).all()
    assert ("FIFOQueueV2" in ops) == (source in ("queue", "staged"))
    assert ("Stage" in ops) == (source == "staged")


def test_idle_share_and_scaling_of_logical_devices(monkeypatch):
    monkeypatch.setattr(gpu_figures, "TRACED_STEPS", 1)
    monkeypatch.setattr(gpu_figures, "TRACED_INPUTS", ("constant",))
    for figure in gpu_figures.idle(devices.Devices("CPU", (0,))):
        assert 0 <= figure.value < 1 and figure.detail["steps"] == 1
    rates = {1: 10.0, 2: 15.0}
    monkeypatch.setattr(
        gpu_figures, "examples_per_second", lambda place, options: rates[place.num_towers]
    )
    assert [figure.value for figure in gpu_figures.scaling(PLACE)] == [0.75] * 3


def test_one_device_has_no_scaling_and_says_so():
    for figure in gpu_figures.scaling(devices.Devices("GPU", (0,))):
        assert math.isnan(figure.value) and "two or more" in figure.detail["not_measured"]
        assert figure.record()["value"] is None and figure.record()["pass"] is None


def test_figures_of_devices_have_the_names_that_are_expected(monkeypatch):
    monkeypatch.setattr(gpu_figures, "examples_per_second", lambda *args, **keywords: 1.0)
    for name in ("gpu_throughput", "gpu_scaling"):
        group = groups.GPU_GROUPS[name]
        module, function = group.function.split(".")
        measure = getattr(importlib.import_module(f"benchmarks.{module}"), function)
        assert tuple(figure.name for figure in measure(PLACE)) == group.figures


def test_no_gpu_is_one_sentence_and_its_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(gpu_figures, "find_place", lambda logical_cpus: None)
    assert bench.measure_here("gpu_scaling") == bench.NO_GPU
    monkeypatch.setattr(bench, "measure_in_child", lambda *args: ({}, bench.NO_GPU))
    assert bench.main(["--gpu"]) == bench.NO_GPU
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert "TensorFlow finds none" in captured.err
