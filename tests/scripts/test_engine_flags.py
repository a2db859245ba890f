"""Both training scripts under the engine's flags: what must be equal to the default is."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from data import synthetic_shapes, synthetic_text

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT = 600
# Trains as often as there are lists of flags, in one process: importing TensorFlow takes seconds.
PROGRAM = textwrap.dedent(
    """
    import importlib, json, os, signal, sys
    from absl import flags
    from utils.towers import input_sources, loop

    signal_at = int(os.environ["SIGNAL_AT"])  # number of a fed batch, or 0
    batches = 0
    get = input_sources.FeedSource._get

    def get_and_signal(source):
        global batches
        batches += 1
        if batches == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return get(source)

    input_sources.FeedSource._get = get_and_signal
    script = importlib.import_module(sys.argv[1])
    script.define_flags()
    for arguments in json.loads(sys.argv[2]):
        for name in flags.FLAGS:
            flags.FLAGS[name].unparse()
        flags.FLAGS([sys.argv[1], *arguments])
        print("run", json.dumps(arguments), flush=True)
        with loop.StopSignals() as stop:
            script.train(stop)
    """
)


def train(script, runs, cwd, signal_at=0):
    """Text that each run printed; a SIGTERM comes when this batch is to be fed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "SIGNAL_AT": str(signal_at),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, script, json.dumps(runs)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split("run [")[1:]


def tensors(folder):
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(folder)))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def largest_difference(found, expected):
    assert set(found) == set(expected)
    return max(np.abs(found[name] - value).max() for name, value in expected.items())


class Runs:
    """Trainings of a script: name -> (flags, printed text, tensors of the last checkpoint)."""

    def __init__(self, script, folder, common, folder_flag, variants, signal_at=0):
        paths = {name: folder / name for name, _ in variants}
        runs = [[*common, f"--{folder_flag}={paths[name]}", *more] for name, more in variants]
        texts = train(script, runs, folder, signal_at)
        self.text = {name: text for (name, _), text in zip(variants, texts, strict=True)}
        self.tensors = {name: tensors(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def pointnet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pointnet")
    synthetic_shapes.main([f"--output_dir={folder / 'data'}", "--num_train=22", "--num_test=5"])
    common = ["--num_gpus=2", "--model=pointnet_cls_basic", "--num_point=32", "--batch_size=8"]
    common += ["--max_epoch=2", "--seed=3", f"--data_path={folder / 'data'}"]
    mixed = ["--accumulate_steps=2", "--clip_norm=1", "--lr_scaling=linear", "--warmup_steps=2"]
    mixed += ["--input=queue", "--compress_gradients=float16", "--compute_dtype=bfloat16"]
    return Runs(
        "train_multi_gpu",
        folder,
        common,
        "log_dir",
        [
            ("plain", []),
            ("queue", ["--input=queue", "--input_queue_size=3"]),
            ("replicated", ["--variable_update=replicated"]),
            ("mixed", mixed),
            ("mixed_in_two", [*mixed, "--max_epoch=1"]),
            ("mixed_in_two", [*mixed, "--restore"]),
            ("replicated_mixed", [*mixed, "--variable_update=replicated", "--sync_bn"]),
            ("float16", ["--compute_dtype=float16"]),
            ("float16_copies", ["--compute_dtype=float16", "--variable_update=replicated"]),
        ],
    )


def test_queued_batches_train_as_fed_ones(pointnet):
    assert largest_difference(pointnet.tensors["queue"], pointnet.tensors["plain"]) == 0
    assert "input queue: at most 3 batch(es)" in pointnet.text["queue"]


def test_copies_of_the_variables_train_as_one(pointnet):
    found, expected = pointnet.tensors["replicated"], pointnet.tensors["plain"]
    assert largest_difference(found, expected) < 1e-4


def test_an_accumulating_run_resumes_exactly(pointnet):
    assert largest_difference(pointnet.tensors["mixed_in_two"], pointnet.tensors["mixed"]) == 0
    # 22 clouds: batches of 8, 8, 6 are two updates an epoch
    assert pointnet.tensors["mixed"]["batch"] == 4
    assert pointnet.tensors["plain"]["batch"] == 6


def test_modes_save_the_same_variables(pointnet):
    names = set(pointnet.tensors["plain"])
    assert set(pointnet.tensors["replicated_mixed"]) == names
    for name in ("float16", "float16_copies"):
        extra = set(pointnet.tensors[name]) - names
        assert extra == {"loss_scale", "loss_scale_good_steps"}


def test_a_signal_within_an_update_waits_for_its_end(tmp_path):
    synthetic_shapes.main([f"--output_dir={tmp_path / 'data'}", "--num_train=22", "--num_test=5"])
    common = ["--num_gpus=2", "--model=pointnet_cls_basic", "--num_point=32", "--batch_size=8"]
    common += ["--seed=3", "--accumulate_steps=2", "--max_epoch=2"]
    common += [f"--data_path={tmp_path / 'data'}"]
    variants = [("stopped", []), ("stopped", ["--restore"]), ("whole", [])]
    runs = Runs("train_multi_gpu", tmp_path, common, "log_dir", variants, signal_at=2)
    assert (tmp_path / "stopped" / "model.ckpt-1.index").exists()
    assert largest_difference(runs.tensors["stopped"], runs.tensors["whole"]) == 0


@pytest.fixture(scope="module")
def east(tmp_path_factory):
    folder = tmp_path_factory.mktemp("east")
    synthetic_text.main([f"--output_dir={folder / 'data'}", "--num_train=8", "--num_test=1"])
    common = ["--gpu_list=0,1", "--input_size=64", "--batch_size_per_gpu=2", "--num_readers=2"]
    common += ["--seed=3", "--max_steps=2", f"--training_data_path={folder / 'data' / 'train'}"]
    return Runs(
        "multigpu_train",
        folder,
        common,
        "checkpoint_path",
        [
            ("plain", []),
            ("queue", ["--input=queue", "--recompute"]),
            ("replicated", ["--variable_update=replicated", "--input=queue"]),
        ],
    )


def test_detector_from_queued_pictures(east):
    assert largest_difference(east.tensors["queue"], east.tensors["plain"]) <= 1e-6


def test_detector_with_copies_of_its_variables(east):
    assert largest_difference(east.tensors["replicated"], east.tensors["plain"]) < 1e-4
