"""train_multi_gpu.py as a user runs it, and its graph with other numbers of towers."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import evaluate
import train_multi_gpu
from data import data_util, synthetic_shapes
from utils.towers import devices, progress

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT = 600
NUM_POINT, TRAIN, TEST = 32, 43, 10


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes") / "data"
    options = synthetic_shapes.ShapeOptions(points=NUM_POINT, clouds_per_file=25)
    synthetic_shapes.make_dataset(folder, TRAIN, TEST, options)
    return folder


def flags(data, log_dir, *more):
    return [
        f"--num_point={NUM_POINT}",
        *("--num_gpus", "2"),
        "--batch_size=8",
        "--model=pointnet_cls_basic",
        f"--data_path={data}",
        f"--log_dir={log_dir}",
        *more,
    ]


def environment():
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}


def start(*arguments, cwd):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train_multi_gpu.py"), *arguments],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_program(program, arguments, cwd=ROOT, text=None):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=cwd,
        env=environment(),
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def tensors(prefix):
    reader = tf.train.load_checkpoint(str(prefix))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


# --- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """(folder, output) of a run of two epochs."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(*flags(data, "log", "--max_epoch=2", "--seed=3"), cwd=folder)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    return folder, out


def test_log_lines_and_files_of_the_original(whole):
    folder, out = whole
    lines = out.splitlines()
    assert lines[0].startswith("pid: ")
    assert "2 tower(s) on /cpu:0, /cpu:1" in lines[1] and "batch 4 per tower, 8 in all" in lines[1]
    assert lines[2].startswith("seed 3; without normals; augmentation: ")
    assert [line for line in lines if "EPOCH" in line] == [
        "**** EPOCH 000 ****",
        "---- EPOCH 000 EVALUATION ----",
        "**** EPOCH 001 ****",
        "---- EPOCH 001 EVALUATION ----",
    ]
    for name in ("eval mean loss", "eval accuracy", "eval avg class acc"):
        assert len(re.findall(rf"^{name}: \d\.\d{{6}}$", out, re.MULTILINE)) == 2
    # Files of 25 and 18 clouds: 8, 8, 8 and the 1 that joins them, 8, 8 and 2 that join.
    assert out.count(f"trained on {TRAIN} clouds in 5 batches") == 2
    logged = (folder / "log/log_train.txt").read_text().splitlines()
    assert logged[0].startswith("Namespace(num_gpus=2, model='pointnet_cls_basic', log_dir='log',")
    assert logged[1:] == lines
    assert "Model saved in file: " + str(folder / "log/model.ckpt-10") in lines
    assert (folder / "log/pointnet_cls_basic.py").is_file()
    for split, tags in (
        ("train", {"learning_rate", "bn_decay", "accuracy"}),
        ("test", {"eval_accuracy"}),
    ):
        (events,) = (folder / "log" / split).iterdir()
        found = {
            value.tag
            for event in tf.train.summary_iterator(str(events))
            for value in event.summary.value
        }
        assert tags <= found


def test_checkpoint_has_the_variables_of_the_original_and_no_tower(whole):
    saved = tensors(whole[0] / "log/model.ckpt-10")
    assert saved["batch"] == 10
    assert {"conv1/weights", "fc1/bn/moving_variance", "fc3/biases", "beta1_power"} <= saved.keys()
    assert {name.split("/")[0] for name in saved if "/" in name} == {
        *(f"conv{i}" for i in range(1, 6)),
        *("fc1", "fc2", "fc3"),
    }


def test_a_signal_and_a_restore_change_nothing(data, whole, tmp_path):
    """Stopped somewhere in the second epoch, the folder moved, and continued: bit for bit equal."""
    process = start(*flags(data, tmp_path / "log", "--max_epoch=2", "--seed=3"), cwd=tmp_path)
    for line in process.stdout:
        if line.startswith("**** EPOCH 001"):
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "Traceback" not in err
    last = out.splitlines()[-2:]  # the second line is left out if the stop came between two epochs
    assert any(line.startswith("stopped in epoch 00") for line in last)

    shutil.move(tmp_path / "log", tmp_path / "moved")
    process = start(*flags(data, "moved/", "--max_epoch=2", "--restore"), cwd=tmp_path)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    assert "starts anew" not in err
    assert "seed 3;" in out  # that of the checkpoint

    one, other = whole[0] / "log/model.ckpt-10", tmp_path / "moved/model.ckpt-10"
    expected, found = tensors(one), tensors(other)
    assert expected.keys() == found.keys()
    assert not [name for name in expected if not np.array_equal(expected[name], found[name])]
    np.testing.assert_equal(
        *[data_util.load_reader_state(f"{prefix}.readers.npz") for prefix in (one, other)]
    )
    assert progress.read_progress(str(one)) == progress.read_progress(str(other))
    log = (tmp_path / "moved/log_train.txt").read_text()
    assert log.count("**** EPOCH 000 ****") == 1 and log.count("Namespace(") == 2


def test_nan_stops_before_it_is_saved_and_names_the_clouds(data, tmp_path):
    """One NaN among the second tower's clouds of the third batch."""
    program = """
        from absl import app
        import train_multi_gpu
        from data import modelnet

        class Poisoned(modelnet.SharedBatches):
            def get(self):
                batch, state = super().get()
                if batch["batch"] == 2 and self._smallest == 4:
                    batch["points"][-1, 0, 0] = float("nan")
                return batch, state

        modelnet.SharedBatches = Poisoned
        train_multi_gpu.define_flags()
        app.run(train_multi_gpu.main)
    """
    done = run_program(program, flags(data, tmp_path / "log", "--seed=3"))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(r"step [12]: total_loss of tower 1 is not finite", last)
    names = re.findall(r"ply_data_train\d\.h5\[\d+\]", last)
    assert len(names) in (4, 5)
    assert not list((tmp_path / "log").glob("model.ckpt*"))


def test_wrong_flags_end_in_one_sentence_before_a_graph_is_built(data, tmp_path):
    """All in one process, because importing TensorFlow takes longest."""
    (tmp_path / "a_file").write_text("")
    (tmp_path / "empty").mkdir()
    cases = {
        "--data_path=/no/such/dir": "/no/such/dir/modelnet40_ply_hdf5_2048",
        f"--data_path={tmp_path / 'empty'}": "https://",
        "--normal": "modelnet40_normal_resampled",
        "--batch_size=7": "batch_size 7 cannot be split over 2 towers; use 6 or 8",
        "--batch_size=1": "use 2",
        "--batch_size=0": "use 2",
        "--learning_rate=0": "--learning_rate=0",
        "--learning_rate=inf": "--learning_rate=inf is not a finite number",
        "--as_shipped": "pointnet_cls_basic",
        f"--log_dir={tmp_path / 'a_file'}": "a_file",
        f"--log_dir={data}": f"--log_dir {data}",
        f"--log_dir={data / 'modelnet40_ply_hdf5_2048'}": "must not be moved aside",
        "--restore": "there is no folder",
    }
    program = """
        import json, sys
        from absl import flags
        import train_multi_gpu
        from utils.towers import loop

        train_multi_gpu.define_flags()
        train_multi_gpu.TrainGraph = None  # nobody gets that far
        said = {}
        with loop.StopSignals() as stop:
            for case in json.loads(sys.stdin.read()):
                flags.FLAGS.unparse_flags()
                flags.FLAGS([*sys.argv, case])
                try:
                    train_multi_gpu.train(stop)
                    said[case] = "nothing"
                except SystemExit as error:
                    said[case] = error.code
                for name, default in [("restore", False), ("normal", False),
                                      ("as_shipped", False), ("learning_rate", 1e-3)]:
                    flags.FLAGS[name].value = default
        json.dump(said, sys.stdout)
    """
    done = run_program(program, flags(data, tmp_path / "log"), text=json.dumps(list(cases)))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for case, part in cases.items():
        assert said[case].startswith("error: "), (case, said[case])
        assert part in said[case], (case, said[case])
        assert "\n" not in said[case]


def test_all_epochs_done_or_another_network_is_said_before_a_graph_is_built(whole, data, tmp_path):
    shutil.copytree(whole[0] / "log", tmp_path / "log")
    program = """
        import sys
        from absl import flags
        import train_multi_gpu
        from utils.towers import loop

        train_multi_gpu.define_flags()
        train_multi_gpu.TrainGraph = None  # the last case alone gets that far
        with loop.StopSignals() as stop:
            for case in ("--max_epoch=2", "--model=pointnet2_cls_ssg", "--seed=4"):
                flags.FLAGS.unparse_flags()
                flags.FLAGS([*sys.argv, "--model=pointnet_cls_basic", "--max_epoch=3", case])
                try:
                    train_multi_gpu.train(stop)
                except SystemExit as error:
                    print(error.code)
    """
    done = run_program(program, flags(data, tmp_path / "log", "--restore"))
    finished, other, *_ = done.stdout.splitlines()
    assert finished == "nothing to do: 2 epochs are done, as --max_epoch=2 asks for"
    assert other.startswith("error: ")
    assert "is of pointnet_cls_basic and not of pointnet2_cls_ssg" in other
    assert "--seed=4, but the training was begun with seed 3" in done.stderr


def test_broken_data_in_mid_training_loses_no_step(monkeypatch):
    """What was trained until then is saved, and the error goes on; nothing new is not saved."""
    for steps in (0, 3):
        saved = []
        run = types.SimpleNamespace(
            progress=progress.Progress(seed=1),
            log=types.SimpleNamespace(log_string=lambda text: None),
            save=lambda saved=saved: saved.append("checkpoint"),
            session=types.SimpleNamespace(step=7),
            first_step=7,
        )

        def broken_epoch(run, steps=steps):
            run.session.step += steps
            raise data_util.ReaderError("reader 0 failed")

        monkeypatch.setattr(train_multi_gpu, "FLAGS", types.SimpleNamespace(max_epoch=2))
        monkeypatch.setattr(train_multi_gpu, "train_one_epoch", broken_epoch)
        with pytest.raises(data_util.ReaderError):
            train_multi_gpu.run_epochs(run)
        assert len(saved) == bool(steps)


# --- the graph -----------------------------------------------------------------------------------


def build(num_towers, **keywords):
    place = devices.Devices("CPU", tuple(range(num_towers)))
    settings = {"model": "pointnet_cls_basic", "num_point": NUM_POINT, **keywords}
    return place, train_multi_gpu.TrainGraph(place, **settings)


def evaluation(num_towers, weights, clouds, labels):
    """(loss, logits) of clouds by a graph with given weights."""
    with tf.Graph().as_default():
        place, net = build(num_towers)
        with tf.Session(config=place.session_config()) as session:
            for variable in tf.global_variables():
                if variable.op.name in weights:
                    variable.load(weights[variable.op.name], session)
            feed = net.feed({"points": clouds, "labels": labels})
            return session.run([net.eval_loss, net.eval_pred], feed)


def test_evaluation_does_not_depend_on_towers_and_batches(whole):
    weights = tensors(whole[0] / "log/model.ckpt-10")
    rng = np.random.RandomState(0)
    clouds, labels = rng.uniform(-1, 1, [7, NUM_POINT, 3]), rng.randint(0, 40, 7)
    loss, logits = evaluation(1, weights, clouds, labels)
    for num_towers in (2, 3):  # 4 + 3 and 3 + 2 + 2 clouds
        other_loss, other_logits = evaluation(num_towers, weights, clouds, labels)
        np.testing.assert_allclose(other_logits, logits, rtol=0, atol=1e-5)
        assert other_loss == pytest.approx(loss, rel=1e-6)
    with evaluate.Classifier(
        whole[0] / "log/model.ckpt",
        place=devices.Devices("CPU", (0,)),
        model="pointnet_cls_basic",
        num_point=NUM_POINT,
    ) as classifier:
        other_loss, other_logits = classifier.classify(clouds, labels)
    np.testing.assert_allclose(other_logits, logits, rtol=0, atol=1e-5)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    _, alone = evaluation(1, weights, clouds[:1], labels[:1])
    np.testing.assert_allclose(alone, logits[:1], rtol=0, atol=1e-5)


def test_variables_are_the_same_for_every_number_of_towers():
    tables, ops = [], []
    for num_towers in (1, 2, 3):
        with tf.Graph().as_default() as graph:
            build(num_towers)
            tables.append([(v.op.name, v.shape.as_list()) for v in tf.global_variables()])
            ops.append(len(graph.get_operations()))
    assert tables[0] == tables[1] == tables[2]
    assert ops[2] - ops[1] <= ops[0]


def test_each_cloud_of_an_uneven_batch_counts_once():
    """With the biases of the last layer alone in play the loss is a plain mean over the clouds."""
    rng = np.random.RandomState(0)
    clouds, labels = rng.uniform(-1, 1, [5, NUM_POINT, 3]), np.array([3, 3, 3, 7, 8])
    with tf.Graph().as_default():
        place, net = build(2)
        biases = rng.standard_normal(40).astype(np.float32)
        with tf.Session(config=place.session_config()) as session:
            session.run(tf.global_variables_initializer())
            named = {v.op.name: v for v in tf.global_variables()}
            named["fc3/weights"].load(np.zeros([256, 40], np.float32), session)
            named["fc3/biases"].load(biases, session)
            loss, _ = session.run(
                [net.loss, net.train_op], net.feed({"points": clouds, "labels": labels})
            )
            moment = session.run(named["fc3/biases/Adam"])
    log_softmax = biases - np.log(np.exp(biases).sum())
    assert loss == pytest.approx(-log_softmax[labels].mean(), rel=1e-5)
    gradient = np.exp(log_softmax) - np.bincount(labels, minlength=40) / 5
    np.testing.assert_allclose(moment / 0.1, gradient, atol=1e-6)


def test_dropout_of_a_step_is_the_same_again_and_another_in_each_tower_and_step():
    clouds = np.tile(np.random.RandomState(0).uniform(-1, 1, [4, NUM_POINT, 3]), [2, 1, 1])
    feed_batch = {"points": clouds, "labels": np.zeros(8, np.int64)}
    with tf.Graph().as_default():
        place, net = build(2, seed=5)
        with tf.Session(config=place.session_config()) as session:
            session.run(tf.global_variables_initializer())
            first, again = [session.run(net.pred, net.feed(feed_batch)) for _ in range(2)]
            net.batch.load(1.0, session)
            later = session.run(net.pred, net.feed(feed_batch))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, later)
    assert not np.array_equal(first[:4], first[4:])
