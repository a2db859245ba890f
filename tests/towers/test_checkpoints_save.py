"""Saving: which files, in which order, and what is left after kills, full disks and NaN."""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.golden_sets import ROOT, golden_path
from tests.towers.checkpoints_toy import SIDE, Toy, equal, steps_in
from utils.towers import checkpoints
from utils.towers.averages import add_moving_average_update
from utils.towers.checkpoints import CheckpointError

ENDINGS = (".data-00000-of-00001", ".index", ".meta", SIDE)


def names_of(*steps):
    return sorted(f"model.ckpt-{step}{ending}" for step in steps for ending in ENDINGS)


def listing(folder):
    return sorted(os.listdir(folder))


def snapshot(folder):
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


@pytest.fixture
def toy(tmp_path):
    """A training that has saved steps 1 and 2 into `run`."""
    toy = Toy(tmp_path / "run", keep=3)
    for step in (1, 2):
        toy.mark(step)
        toy.save(step)
    return toy


@pytest.fixture
def run(toy, tmp_path):
    return tmp_path / "run"


def test_files_and_state(run):
    assert listing(run) == ["checkpoint", *names_of(1, 2)]
    state = tf.train.get_checkpoint_state(str(run))
    assert state.model_checkpoint_path == str(run / "model.ckpt-2")
    assert list(state.all_model_checkpoint_paths) == [str(run / f"model.ckpt-{i}") for i in (1, 2)]
    assert str(run) not in (run / "checkpoint").read_text(), "relative, so that it can be moved"
    assert steps_in(run) == {2: {2}, 1: {1}}


def test_names_saved_are_the_variables_and_nothing_else(toy, run):
    stored = tf.train.NewCheckpointReader(str(run / "model.ckpt-2")).get_variable_to_dtype_map()
    assert sorted(stored) == sorted(toy.variables)
    assert stored["global_step"] == tf.float32


def test_moved_folder_restores_through_tensorflow_too(toy, run, tmp_path):
    run.rename(tmp_path / "moved")
    latest = tf.train.latest_checkpoint(str(tmp_path / "moved"))
    assert latest == str(tmp_path / "moved" / "model.ckpt-2")
    with tf.Graph().as_default(), tf.Session() as session:
        saver = tf.train.import_meta_graph(latest + ".meta")
        saver.restore(session, latest)
        biases = {v.op.name: v for v in tf.global_variables()}["head/biases"]
        assert session.run(biases).tolist() == [2, 2]


def test_meta_graph_with_pending_batch_norm_updates(tmp_path):
    """They are no graph elements and stay out of the file; the rest of it can be imported."""
    with tf.Graph().as_default() as graph, tf.Session() as session:
        mean = tf.get_variable("mean", [2], use_resource=True, trainable=False)
        update = add_moving_average_update(mean, tf.ones([2]), 0.9)
        saver = checkpoints.CheckpointSaver(tmp_path)
        session.run(mean.initializer)
        session.run(update.op)
        graph.finalize()
        prefix = saver.save(session, 1)
    with tf.Graph().as_default() as graph:
        tf.train.import_meta_graph(prefix + ".meta")
        assert [v.op.name for v in tf.global_variables()] == ["mean"]


def test_rotation_removes_a_checkpoint_with_its_side_file_and_nothing_else(toy, run):
    bystanders = ["notes.txt", "model.ckpt-1.txt", "model.ckpt-10.index", "events.out.tfevents.1"]
    for name in bystanders:
        (run / name).write_text("x")
    for step in (3, 4, 5):
        toy.mark(step)
        toy.save(step)
    assert listing(run) == sorted(["checkpoint", *names_of(3, 4, 5), *bystanders])
    state = tf.train.get_checkpoint_state(str(run))
    assert [os.path.basename(p) for p in state.all_model_checkpoint_paths] == [
        f"model.ckpt-{step}" for step in (3, 4, 5)
    ]


def test_keeping_all(tmp_path):
    toy = Toy(tmp_path, keep=0)
    for step in range(1, 9):
        toy.save(step)
    assert listing(tmp_path) == ["checkpoint", *names_of(*range(1, 9))]


def test_next_run_rotates_ours_and_spares_what_the_user_put_there(toy, run):
    for ending in ENDINGS[:3]:  # somebody's checkpoint, without our side file
        shutil.copy(run / f"model.ckpt-1{ending}", run / f"model.ckpt-49491{ending}")
    again = Toy(run, keep=3)
    for step in (3, 4):
        again.mark(step)
        again.save(step)
    left = [*names_of(2, 3, 4), *[f"model.ckpt-49491{ending}" for ending in ENDINGS[:3]]]
    assert listing(run) == sorted(["checkpoint", *left])


def test_leftovers_of_a_killed_save_go_at_the_next(toy, run):
    (run / ".saving").mkdir()
    (run / ".saving" / "model.ckpt-3.data-00000-of-00001.tempstate1").write_text("x")
    (run / f"model.ckpt-3{SIDE}").write_text("x")  # was moved into place, the index was not
    (run / "model.ckpt-3.meta").write_text("x")
    (run / "model.ckpt-77.data-00000-of-00001").write_text("x")  # not surely ours
    again = Toy(run, keep=3)
    again.mark(4)
    again.save(4)
    assert listing(run) == sorted(
        ["checkpoint", *names_of(1, 2, 4), "model.ckpt-77.data-00000-of-00001"]
    )


def test_saving_a_step_twice(toy, run):
    before = snapshot(run)
    data = run / "model.ckpt-2.data-00000-of-00001"
    inode = data.stat().st_ino
    toy.save(2)
    assert data.stat().st_ino == inode, "an equal checkpoint stays in place"
    assert snapshot(run).keys() == before.keys()
    toy.mark(20)
    toy.save(2)
    with pytest.raises(AssertionError):
        assert steps_in(run)[2] == {2}
    reader = tf.train.NewCheckpointReader(str(run / "model.ckpt-2"))
    assert reader.get_tensor("head/biases").tolist() == [20, 20]


def test_folder_deleted_between_saves_is_made_again(toy, run, caplog):
    shutil.rmtree(run)
    toy.mark(3)
    toy.save(3)
    assert f"{run} has gone; it is made again" in caplog.text
    assert listing(run) == ["checkpoint", *names_of(3)]
    assert steps_in(run) == {3: {3}}


def test_folder_deleted_before_the_first_save_is_made_again(tmp_path, caplog):
    folder = tmp_path / "run"
    for kind in ("new", "there"):
        toy = Toy(folder)
        shutil.rmtree(folder, ignore_errors=True)
        toy.mark(1)
        toy.save(1)
        assert steps_in(folder) == {1: {1}}
        assert (f"{folder} has gone" in caplog.text) == (kind == "there")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_not_saved(toy, run, bad):
    before = snapshot(run)
    toy.set("net/conv/weights", np.where(np.arange(4) == 2, bad, 0))
    toy.set("head/biases/Adam", bad)
    with pytest.raises(CheckpointError, match="head/biases/Adam, net/conv/weights hold NaN"):
        toy.save(3)
    assert snapshot(run) == before


@pytest.mark.parametrize(
    "call,reason", [("mkdir", errno.EROFS), ("replace", errno.ENOSPC), ("fsync", errno.EIO)]
)
def test_failure_leaves_the_folder_as_it_was(toy, run, monkeypatch, call, reason):
    """Read-only and full disks, at every call in turn."""
    before = snapshot(run)
    function, failures, count = getattr(os, call), 0, 1
    for fail_at in range(1, 100):
        if count < fail_at - 1:
            break  # the last save made fewer calls than that
        count = 0

        def fail(*args, **kwargs):
            nonlocal count
            count += 1
            if count == fail_at:  # noqa: B023 (used up within this turn of the loop)
                raise OSError(reason, os.strerror(reason))
            return function(*args, **kwargs)

        monkeypatch.setattr(os, call, fail)
        toy.mark(3)
        try:
            toy.save(3)
        except CheckpointError as error:
            failures += 1
            assert f"model.ckpt-3: {os.strerror(reason)}; older" in str(error)
        finally:
            monkeypatch.undo()
        after = snapshot(run)
        if "model.ckpt-3.index" not in after:
            assert after == before
        else:  # complete; the state file, which is only a hint, may be missing
            assert listing(run) == ["checkpoint", *names_of(1, 2, 3)]
            assert steps_in(run) == {3: {3}, 2: {2}, 1: {1}}
            for name in names_of(3):
                (run / name).unlink()
            (run / "checkpoint").write_bytes(before["checkpoint"])
    assert failures >= 1


def test_side_file_that_fails_leaves_the_folder_as_it_was(toy, run):
    before = snapshot(run)

    def write(path):
        pathlib.Path(path).write_text("half")
        raise KeyError("the writer's own error")

    with pytest.raises(KeyError):
        toy.saver.save(toy.session, 3, {SIDE: write})
    assert snapshot(run) == before


def test_interrupt_leaves_a_complete_checkpoint_or_none(toy, run, monkeypatch):
    before = snapshot(run)
    replace, count = os.replace, 0

    def interrupted(*args):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return replace(*args)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        toy.save(3)
    assert snapshot(run) == before


def test_saver_adds_no_op_after_its_construction(toy):
    assert toy.graph.finalized
    version = toy.graph.version
    toy.save(3)
    assert toy.graph.version == version


def test_equal_values_make_equal_files(tmp_path):
    """Whatever the folder is called; so a step that is saved twice is recognised."""
    one = Toy(tmp_path / "one").train(3)
    one.save(3)
    other = Toy(tmp_path / "other")
    checkpoints.restore_training(other.session, tmp_path / "one")
    other.save(3)
    assert equal(one.values(), other.values())
    a, b = snapshot(tmp_path / "one"), snapshot(tmp_path / "other")
    for name in names_of(3)[:2]:
        assert a[name] == b[name]


def test_golden_names_are_saved(tmp_path):
    golden = json.loads(golden_path("east", "variables.json").read_text())
    with tf.Graph().as_default() as graph, tf.Session() as session:
        for entry in golden["train_graph"]:
            tf.get_variable(
                entry["name"],
                [],
                tf.as_dtype(entry["dtype"]),
                initializer=tf.zeros_initializer(),
                trainable=entry["trainable"],
                use_resource=True,
            )
        saver = checkpoints.CheckpointSaver(tmp_path)
        init = tf.global_variables_initializer()
        graph.finalize()
        session.run(init)
        prefix = saver.save(session, 7)
    stored = tf.train.NewCheckpointReader(prefix).get_variable_to_shape_map()
    assert sorted(stored) == sorted(golden["saver_names"])


@pytest.mark.parametrize("how", ["every", "random", "full"])
def test_killed_or_out_of_room(tmp_path, how):
    """Child processes: killed at every change of the disk, at random moments; and a size limit."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.towers.checkpoints_crash", how, str(tmp_path / "run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    assert result.returncode == 0, result.stderr[-5000:]
