"""evaluate.py: votes against the original's, independence of the batches, files, messages."""

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import h5py
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import evaluate
from data import modelnet, modelnet_h5_dataset, synthetic_shapes
from nets.pointnet2 import pointnet_cls_basic
from tests.golden_sets import golden_dir, golden_path
from utils.towers import checkpoints, devices, progress

ROOT = pathlib.Path(__file__).resolve().parents[2]
NUM_POINT, STORED, TEST = 24, 64, 23
CPU = devices.Devices("CPU", (0,))


# --- votes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eval_vote12", "eval_vote1"])
def test_golden_votes(name):
    expected = json.loads(golden_path("pointnet2", f"{name}.json").read_text())
    arrays = np.load(golden_path("pointnet2", f"{name}.npz"))
    sample_data = golden_dir("pointnet2") / "sample_data"
    if not sample_data.is_dir():
        pytest.skip(f"{sample_data} is not part of this golden set")
    rng = np.random.RandomState(expected["numpy_seed_before_loop"])
    dataset = modelnet.make_dataset(
        "test",
        data_path=sample_data,
        num_point=expected["num_point"],
        batch_size=expected["batch_size"],
        rng=rng,
    )
    calls = {"number": 0}

    def classify(clouds, labels):
        """The original's stand-in network; rows after the real ones are stale there."""
        call = calls["number"]
        calls["number"] += 1
        batch = call // expected["num_votes"]
        fed, fed_labels = arrays["clouds_fed"][call], arrays["labels_fed"][call]
        np.testing.assert_allclose(clouds, fed[: len(clouds)], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(labels, fed_labels[: len(clouds)])
        by_call = len(arrays["logits"]) == len(arrays["clouds_fed"])
        logits = arrays["logits"][call if by_call else batch]
        return arrays["loss_per_call"][call], logits[: len(clouds)]

    counts = evaluate.ClassCounts(evaluate.NUM_CLASSES)
    batch = 0
    while dataset.has_next_batch():
        clouds, labels = dataset.next_batch()
        loss, scores = evaluate.vote(classify, clouds, labels, expected["num_votes"], rng)
        number = len(labels)
        np.testing.assert_allclose(scores, arrays["vote_sum"][batch, :number], rtol=1e-6)
        predictions = np.argmax(scores, axis=1)
        np.testing.assert_array_equal(predictions, arrays["prediction"][batch, :number])
        assert loss == arrays["loss_per_call"][calls["number"] - 1]  # the last vote's
        counts.add(labels, predictions)
        batch += 1
    assert batch == expected["num_batches"]
    assert calls["number"] == len(arrays["clouds_fed"])
    assert rng.uniform() == expected["rng_next_uniform_after"]
    values = expected["values_rounded_6_digits"]
    assert counts.accuracy() == pytest.approx(values["accuracy"], abs=1e-6)
    accuracies = dict(zip(modelnet.class_names(dataset), counts.class_accuracies()))
    assert accuracies.keys() == values["class_accuracy"].keys()
    for class_name, accuracy in values["class_accuracy"].items():
        if accuracy is None:
            assert np.isnan(accuracies[class_name])
        else:
            assert accuracies[class_name] == pytest.approx(accuracy, abs=1e-6)


def test_angles_and_orders_of_votes():
    clouds = np.random.RandomState(0).standard_normal([2, 5, 6])
    fed = []

    def classify(clouds, labels):
        fed.append(clouds)
        return float(len(fed)), np.full((2, 3), len(fed), np.float32)

    loss, scores = evaluate.vote(classify, clouds, np.zeros(2), 4, np.random.RandomState(1))
    assert loss == 4.0 and scores.tolist() == [[10.0] * 3] * 2
    orders = np.random.RandomState(1)
    for number, found in enumerate(fed):
        order = np.arange(5)
        orders.shuffle(order)
        angle = number * np.pi / 2
        cos, sin = np.cos(angle), np.sin(angle)
        turn = np.array([[cos, 0, sin], [0, 1, 0], [-sin, 0, cos]])
        for part in (slice(0, 3), slice(3, 6)):  # normals turn with the points
            np.testing.assert_allclose(found[:, :, part], clouds[:, order, part] @ turn, atol=1e-6)


# --- with a network ------------------------------------------------------------------------------


def write_checkpoint(folder, normal=False, num_point=NUM_POINT):
    """Random weights of pointnet_cls_basic as model.ckpt-3, trained with `num_point` points."""
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(0)
        clouds, _ = pointnet_cls_basic.placeholder_inputs(None, num_point, normal=normal)
        pointnet_cls_basic.get_model(clouds, is_training=False)
        session.run(tf.global_variables_initializer())
        where = progress.Progress(0, settings={"num_point": num_point})
        saver = checkpoints.CheckpointSaver(folder)
        return saver.save(session, 3, {progress.SUFFIX: where.write})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes") / "data"
    options = synthetic_shapes.ShapeOptions(points=STORED, clouds_per_file=15)
    synthetic_shapes.make_dataset(folder, 1, TEST, options)
    return folder


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder)
    return folder / "model.ckpt"


@pytest.fixture(scope="module")
def classifier(model_path):
    with evaluate.Classifier(
        model_path, place=CPU, model="pointnet_cls_basic", num_point=NUM_POINT
    ) as classifier:
        yield classifier


def dataset_of(data, batch_size, **keywords):
    return modelnet.make_dataset(
        "test", data_path=data, num_point=NUM_POINT, batch_size=batch_size, **keywords
    )


def test_batches_do_not_change_the_result(data, classifier):
    scores = []

    def classify(clouds, labels):
        loss, logits = classifier.classify(clouds, labels)
        scores.append(logits)
        return loss, logits

    results = []
    for batch_size in (1, 4, 8, 100):
        scores.clear()
        dataset = dataset_of(data, batch_size)
        counts, loss = evaluate.eval_one_epoch(classify, dataset, log_string=lambda line: None)
        assert counts.seen.sum() == TEST
        results.append((np.concatenate(scores), loss, counts.correct))
    for scores, loss, correct in results[1:]:
        np.testing.assert_allclose(scores, results[0][0], rtol=0, atol=1e-5)
        assert loss == pytest.approx(results[0][1], rel=1e-6)
        np.testing.assert_array_equal(correct, results[0][2])


@pytest.mark.parametrize("sampling", ["random", "farthest"])
def test_sampling_is_the_same_for_a_seed_and_every_batch_size(data, sampling):
    def points(batch_size, seed=0):
        rng = np.random.RandomState(seed)
        dataset = dataset_of(data, batch_size, sampling=sampling, rng=rng)
        clouds = []
        while dataset.has_next_batch():
            clouds.append(dataset.next_batch()[0])
        return np.concatenate(clouds)

    np.testing.assert_array_equal(points(4), points(7))
    assert not np.array_equal(points(4), points(4, seed=1)) or sampling == "farthest"


def test_checkpoint_of_another_network_is_named(tmp_path):
    write_checkpoint(tmp_path, normal=True)
    with pytest.raises(ValueError, match="is of pointnet_cls_basic with normals"):
        evaluate.Classifier(tmp_path, place=CPU, model="pointnet_cls_basic", num_point=NUM_POINT)
    with pytest.raises(ValueError, match="is of pointnet_cls_basic .*not of pointnet2_cls_ssg"):
        evaluate.Classifier(tmp_path, place=CPU, model="pointnet2_cls_ssg", num_point=NUM_POINT)


def environment():
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}


def test_script_writes_log_and_pictures(data, model_path, tmp_path):
    """As a user runs it, with fewer points than in training."""
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "evaluate.py"),
            "--model=pointnet_cls_basic",
            *("--num_point", "16"),
            "--num_votes=2",
            "--batch_size=8",
            "--sampling=farthest",
            "--max_pictures=3",
            f"--data_path={data}",
            f"--model_path={model_path}",
        ],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Model restored."
    assert "2 vote(s), seed 0, 16 points of each cloud (--sampling=farthest)" in lines[1]
    batches = [line for line in lines if line.startswith("Batch")]
    assert batches == [f"Batch: {i:03d}, batch size: {n}" for i, n in enumerate([8, 7, 8])]
    assert re.search(r"^eval accuracy: \d\.\d{6}$", done.stdout, re.MULTILINE)
    assert re.search(r"^  cylinder:\t\d\.\d{3}$", done.stdout, re.MULTILINE)
    assert "trained with 24 points of a cloud and is evaluated with 16" in done.stderr
    logged = (tmp_path / "dump/log_evaluate.txt").read_text().splitlines()
    assert logged[0].startswith("Namespace(gpu=0, model='pointnet_cls_basic'")
    assert logged[1:] == [line for line in lines[:-1] if not line.startswith("Batch")]
    pictures = sorted(path.name for path in (tmp_path / "dump").glob("*.png"))
    assert len(pictures) == 4 and pictures.pop() == evaluate.OVERVIEW
    assert all(re.fullmatch(r"\d{5}_label_[a-z]+_pred_\w+\.png", name) for name in pictures)


def test_absent_classes_have_no_accuracy_and_wrong_flags_end_in_one_sentence(model_path, tmp_path):
    root = tmp_path / "data" / modelnet_h5_dataset.DATA_SET
    root.mkdir(parents=True)
    with h5py.File(root / "a.h5", "w") as file:
        file["data"] = np.zeros((2, STORED, 3), np.float32)
        file["label"] = np.array([[1], [1]], np.uint8)
    (root / "test_files.txt").write_text("a.h5\n")
    (root / "shape_names.txt").write_text("door\nnight/stand\n")
    cases = {
        "--max_pictures=1": None,
        "--data_path=/no/such/dir": "/no/such/dir",
        "--model_path=/no/such/log/model.ckpt": "/no/such/log",
        "--normal": "modelnet40_normal_resampled",
        "--model=pointnet2_cls_ssg": "is of pointnet_cls_basic",
        f"--dump_dir={root / 'a.h5'}": "--dump_dir",
        "--dump_dir=": "--dump_dir is empty",
        "model.ckpt": "unexpected argument model.ckpt",
    }
    program = """
        import json, sys
        from absl import flags
        import evaluate

        evaluate.define_flags()
        said = {}
        for case in json.loads(sys.stdin.read()):
            flags.FLAGS.unparse_flags()
            flags.FLAGS([*sys.argv, case])
            try:
                evaluate.main([sys.argv[0]] if case.startswith("-") else [sys.argv[0], case])
                said[case] = None
            except SystemExit as error:
                said[case] = error.code
            flags.FLAGS["normal"].value = False
        print(json.dumps(said))
    """
    arguments = [
        "--model=pointnet_cls_basic",
        f"--num_point={NUM_POINT}",
        f"--data_path={tmp_path / 'data'}",
        f"--model_path={model_path}",
        f"--dump_dir={tmp_path / 'dump'}",
    ]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=ROOT,
        env=environment(),
        input=json.dumps(list(cases)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "      door:\tn/a" in lines
    assert any(re.fullmatch(r"night/stand:\t\d\.\d{3}", line) for line in lines)
    said = json.loads(lines[-1])
    for case, part in cases.items():
        if part is None:
            assert said[case] is None
        else:
            assert said[case].startswith("error: ") and part in said[case], (case, said[case])
            assert "\n" not in said[case]
