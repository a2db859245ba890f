"""Both training scripts as the processes of a cluster on this machine."""

import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from benchmarks.measure import free_addresses
from data import synthetic_shapes, synthetic_text

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT = 300
SERVERS, ALL_REDUCE = "servers", "all-reduce"


class Cluster:
    """The processes of one training: two workers, and in mode SERVERS a parameter server.

    Args:
        folder: where the processes' output goes.
        mode: SERVERS or ALL_REDUCE.
        arguments: of the command line, script first.
    """

    def __init__(self, folder, mode, arguments):
        ps, *workers = free_addresses(3)
        hosts = [f"--worker_hosts={','.join(workers)}"]
        hosts += [f"--ps_hosts={ps}"] if mode == SERVERS else ["--variable_update=replicated"]
        self._folder, self._command = folder, [sys.executable, *arguments, *hosts]
        self._running = {}
        folder.mkdir()
        for name in ["worker0", "worker1", "ps0"] if mode == SERVERS else ["worker0", "worker1"]:
            self.start(name)

    def start(self, name, *more):
        """Starts a process, 'worker0', 'worker1' or 'ps0', with some more arguments."""
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TF_ENABLE_ONEDNN_OPTS": "0",
        }
        with open(self._folder / f"{name}.txt", "a") as output:
            self._running[name] = subprocess.Popen(
                [*self._command, *more, f"--job_name={name[:-1]}", f"--task_index={name[-1]}"],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name):
        self._running[name].kill()
        self._running[name].wait()

    def output(self, name):
        return (self._folder / f"{name}.txt").read_text()

    def wait_for_output(self, name, text):
        deadline = time.monotonic() + TIMEOUT
        while text not in self.output(name):
            assert self._running[name].poll() is None, self.output(name)[-3000:]
            assert time.monotonic() < deadline, self.output(name)[-3000:]
            time.sleep(0.1)

    def finish(self):
        """Waits for the end, which must be a good one; returns what the chief printed."""
        codes = {name: process.wait(TIMEOUT) for name, process in self._running.items()}
        assert not any(codes.values()), [codes, *(self.output(name)[-3000:] for name in codes)]
        return self.output("worker0")

    def __enter__(self):
        return self

    def __exit__(self, *unused_exception):
        for process in self._running.values():
            process.kill()
            process.wait()


def train(folder, mode, arguments):
    """Trains to the end; returns what the chief printed."""
    with Cluster(folder, mode, arguments) as cluster:
        return cluster.finish()


def tensors(folder):
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(folder)))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def gradient_norms(folder):
    """The values of `gradient_norm` in a folder of event files."""
    return [
        value.simple_value
        for path in sorted(folder.iterdir())
        for event in tf.train.summary_iterator(str(path))
        for value in event.summary.value
        if value.tag == "gradient_norm"
    ]


@pytest.fixture(scope="module")
def pointnet(tmp_path_factory):
    """{mode: (chief's output, tensors of its checkpoint, gradient norms)} of PointNet++."""
    folder = tmp_path_factory.mktemp("pointnet")
    synthetic_shapes.main([f"--output_dir={folder / 'data'}", "--num_train=48", "--num_test=5"])
    arguments = ["train_multi_gpu.py", "--num_gpus=2", "--model=pointnet_cls_basic", "--seed=3"]
    arguments += ["--num_point=32", "--batch_size=12", "--max_epoch=2"]
    # Weights that hardly move: batch norm of few clouds would make rounding errors grow.
    arguments += ["--optimizer=momentum", "--learning_rate=1e-5", "--clip_norm=1"]
    arguments += [f"--data_path={folder / 'data'}"]
    found = {}
    for mode, more in ((SERVERS, []), (ALL_REDUCE, ["--input=queue"])):
        log_dir = folder / f"log of {mode}"
        text = train(folder / mode, mode, [*arguments, *more, f"--log_dir={log_dir}"])
        found[mode] = text, tensors(log_dir), gradient_norms(log_dir / "train")
    return found


def test_parameter_servers_and_an_all_reduce_train_classifiers_alike(pointnet):
    (_, expected, _), (_, found, _) = pointnet[SERVERS], pointnet[ALL_REDUCE]
    assert set(found) == set(expected)
    for name, value in expected.items():
        tolerance = 1e-5 * max(1, np.abs(value).max())
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)


def test_summaries_have_the_norm_of_what_all_workers_averaged(pointnet):
    """With parameter servers that of the update before."""
    (_, _, found), (_, _, expected) = pointnet[SERVERS], pointnet[ALL_REDUCE]
    assert len(expected) == 4 and min(expected) > 1
    np.testing.assert_allclose(found, [0, *expected[:-1]], rtol=1e-4)


@pytest.mark.parametrize("mode", [SERVERS, ALL_REDUCE])
def test_the_workers_divide_an_epoch(pointnet, mode):
    text, checkpoint, _ = pointnet[mode]
    assert text.count("trained on 24 clouds in 2 batches") == 2  # half of 48, in each epoch
    assert checkpoint["batch"] == 4
    assert text.count("EVALUATION") == 2


@pytest.fixture(scope="module")
def long_training(tmp_path_factory):
    """(arguments of a training of 30 epochs, tensors of its checkpoint)."""
    folder = tmp_path_factory.mktemp("long_training")
    synthetic_shapes.main([f"--output_dir={folder / 'data'}", "--num_train=48", "--num_test=5"])
    arguments = ["train_multi_gpu.py", "--num_gpus=1", "--model=pointnet_cls_basic", "--seed=3"]
    arguments += ["--num_point=32", "--batch_size=12", "--max_epoch=30", "--save_epochs=5"]
    arguments += [f"--data_path={folder / 'data'}"]
    # A server must know the convolutions; batches that wait must not get lost.
    arguments += ["--compute_dtype=bfloat16", "--input=queue"]
    train(folder / "output", SERVERS, [*arguments, f"--log_dir={folder / 'log'}"])
    return arguments, tensors(folder / "log")


@pytest.mark.parametrize("victim", ["worker1", "worker0", "ps0"])
def test_killed_processes_go_on_where_the_others_are(long_training, victim, tmp_path):
    arguments, expected = long_training
    folder = tmp_path / "log"
    with Cluster(tmp_path / "output", SERVERS, [*arguments, f"--log_dir={folder}"]) as cluster:
        cluster.wait_for_output("worker1", "EPOCH 012")
        cluster.kill(victim)
        before = cluster.output("worker1")
        cluster.start(victim, *["--restore"] * (victim == "worker0"))
        cluster.finish()
    found = tensors(folder)
    after = cluster.output("worker1").removeprefix(before)
    first = int(after.partition("**** EPOCH ")[2][:3])
    assert 6 <= first <= before.count("**** EPOCH")
    assert found["batch"] == expected["batch"] == 60
    if victim != "worker1":  # all went back to a checkpoint and on from there
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_parameter_servers_and_an_all_reduce_train_detectors_alike(tmp_path):
    """First moments after one step of Adam, which are the gradients."""
    synthetic_text.main([f"--output_dir={tmp_path / 'data'}", "--num_train=8", "--num_test=1"])
    arguments = ["multigpu_train.py", "--gpu_list=0", "--input_size=64", "--batch_size_per_gpu=2"]
    arguments += ["--num_readers=1", "--background_ratio=0", "--seed=1", "--max_steps=1"]
    arguments += [f"--training_data_path={tmp_path / 'data' / 'train'}"]
    moments = []
    for mode in (SERVERS, ALL_REDUCE):
        folder = tmp_path / f"checkpoints of {mode}"
        train(tmp_path / mode, mode, [*arguments, f"--checkpoint_path={folder}"])
        checkpoint = tensors(folder)
        assert checkpoint["global_step"] == 1
        moments.append({n: value for n, value in checkpoint.items() if n.endswith("/Adam")})
    assert len(moments[0]) == 186 and set(moments[0]) == set(moments[1])
    for name, expected in moments[0].items():
        difference = np.linalg.norm(moments[1][name] - expected)
        assert difference <= 1e-5 * np.linalg.norm(expected), name
