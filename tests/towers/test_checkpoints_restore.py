"""Restoring: a training, a network to evaluate, a part; and what is refused, with which words."""

import json
import os
import shutil
import tarfile

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.golden_sets import golden_path
from tests.towers.checkpoints_toy import SIDE, Toy, build_network, equal
from utils.towers import checkpoints
from utils.towers.checkpoints import CheckpointError, DamagedCheckpointError

AVERAGE = "/ExponentialMovingAverage"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training of four steps with checkpoints at 2 and 4; its folder and the values saved."""
    folder = tmp_path_factory.mktemp("trained")
    toy = Toy(folder)
    values = {}
    for step in (2, 4):
        toy.train(2)
        toy.save(step)
        values[step] = toy.values()
    return folder, values


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that folder, for tests that damage it, under an awkward name."""
    return shutil.copytree(trained[0], tmp_path / "run (1) *?ü")


@pytest.fixture(scope="module")
def training():
    """Another session of the same training."""
    return Toy()


@pytest.fixture(scope="module")
def inference():
    return Toy(optimizer=None)


def save_plainly(path, **kwargs):
    """Checkpoint of a Toy as somebody else's program would write it."""
    values = Toy(**kwargs).values()
    write_values(path, values)
    return values


def write_values(path, values, v1=False):
    """Checkpoint of {name: array}, by TensorFlow's Saver."""
    with tf.Graph().as_default(), tf.Session() as session:
        variables = [
            tf.get_variable(name, initializer=value, use_resource=True)
            for name, value in values.items()
        ]
        version = tf.train.SaverDef.V1 if v1 else tf.train.SaverDef.V2
        saver = tf.train.Saver(variables, write_version=version)
        session.run(tf.global_variables_initializer())
        saver.save(session, str(path), write_meta_graph=False, write_state=False)


def refused(function, *args, **kwargs):
    """The sentence with which a call is refused."""
    with pytest.raises(CheckpointError) as caught:
        function(*args, **kwargs)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def flip_byte(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


# ---- going on with a training -----------------------------------------------------------------


def test_everything_is_restored_bit_for_bit(trained, training):
    folder, values = trained
    restored = checkpoints.restore_training(training.session, folder)
    assert equal(training.values(), values[4])
    assert restored.step == 4 and restored.loaded == len(values[4])
    assert restored.prefix == str(folder / "model.ckpt-4")
    with np.load(restored.side_file()) as side:
        assert side["step"] == 4
    assert restored.side_file(".other") is None


def test_restored_training_goes_on_as_if_it_had_not_stopped(trained, training, tmp_path):
    straight = Toy(tmp_path / "a")
    straight.train(2).save(2)
    straight.train(3)
    checkpoints.restore_training(training.session, tmp_path / "a")
    assert equal(training.train(3).values(), straight.values())


def test_moved_folder_with_a_foreign_state_file(run, training, trained):
    state = run / "checkpoint"
    state.write_text(state.read_text().replace('"model', '"/home/somebody/run/model'))
    restored = checkpoints.restore_training(training.session, f"{run}/")
    assert restored.step == 4 and equal(training.values(), trained[1][4])


def test_older_checkpoint_by_its_prefix(trained, training):
    restored = checkpoints.restore_training(training.session, trained[0] / "model.ckpt-2")
    assert restored.step == 2 and equal(training.values(), trained[1][2])


@pytest.mark.parametrize("file", ["data-00000-of-00001", "index"])
@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "remove", "other"])
def test_damaged_file_is_named_and_the_next_older_checkpoint_taken(
    run, training, trained, caplog, file, damage
):
    path = run / f"model.ckpt-4.{file}"
    size = path.stat().st_size
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        flip_byte(path, size // 2)
    elif damage == "other":
        path.write_bytes(os.urandom(size))
    else:
        os.truncate(path, size // 2 if damage == "truncate" else 0)
    restored = checkpoints.restore_training(training.session, run)
    assert restored.step == 2 and equal(training.values(), trained[1][2])
    assert path.name in caplog.text

    checkpoints.restore_for_evaluation(training.session, run)  # the same for evaluation
    training.train()
    before = training.values()
    sentence = refused(checkpoints.restore_training, training.session, run / "model.ckpt-4")
    assert path.name in sentence
    assert equal(training.values(), before), "a refused checkpoint changes nothing"


def test_every_byte_of_the_weights_is_protected(run, training):
    """Whichever byte is flipped, the checkpoint is not taken."""
    path = run / "model.ckpt-4.data-00000-of-00001"
    for position in range(0, path.stat().st_size, 37):
        flip_byte(path, position)
        assert checkpoints.restore_training(training.session, run).step == 2
        flip_byte(path, position)
    assert checkpoints.restore_training(training.session, run).step == 4


def test_all_checkpoints_damaged(run, training):
    for step in (2, 4):
        flip_byte(run / f"model.ckpt-{step}.data-00000-of-00001", 0)
    with pytest.raises(DamagedCheckpointError, match="no undamaged checkpoint") as caught:
        checkpoints.restore_training(training.session, run)
    assert "model.ckpt-2.data" in str(caught.value) and "model.ckpt-4.data" in str(caught.value)


def test_works_inside_another_default_graph_and_without_one(trained, training):
    checkpoints.restore_training(training.session, trained[0])
    with tf.Graph().as_default() as other:
        checkpoints.restore_training(training.session, trained[0])
        assert not other.get_operations()


def test_reference_variables_and_an_integer_step(trained):
    with tf.Graph().as_default() as graph:
        weights = tf.Variable(
            np.zeros([3, 4], np.float32), name="net/conv/weights", use_resource=False
        )
        step = tf.Variable(0, False, name="global_step", use_resource=False, dtype=tf.int64)
        graph.finalize()
        with tf.Session() as session:
            report = checkpoints.load_pretrained(session, trained[0])
            assert report.loaded == ["net/conv/weights"]
            checkpoints.restore_for_evaluation(session, trained[0])
            found = session.run([weights, step])
    assert np.array_equal(found[0], trained[1][4]["net/conv/weights" + AVERAGE])
    assert found[1] == 4


def test_variables_that_share_an_initial_value(trained):
    with tf.Graph().as_default():
        shared = tf.zeros([4])
        names = ["net/conv/BatchNorm/gamma", "net/conv/BatchNorm/moving_mean"]
        variables = [tf.get_variable(n, initializer=shared, use_resource=True) for n in names]
        with tf.Session() as session:
            checkpoints.load_pretrained(session, trained[0])
            found = session.run(variables)
    assert all(np.array_equal(f, trained[1][4][n]) for f, n in zip(found, names))


# ---- what is refused, and how -----------------------------------------------------------------


def test_another_optimizer(tmp_path, trained):
    sentence = refused(checkpoints.restore_training, Toy(optimizer="momentum").session, trained[0])
    assert "another optimizer, it has Adam and this training Momentum" in sentence
    assert " variables found" in sentence and "Momentum" in sentence

    sentence = refused(checkpoints.restore_training, Toy(optimizer="sgd").session, trained[0])
    assert "it has Adam and this training no slots" in sentence

    save_plainly(tmp_path / "model.ckpt-1", optimizer="sgd")
    sentence = refused(checkpoints.restore_training, Toy().session, tmp_path)
    assert "it has no slots and this training Adam" in sentence


def test_another_network(tmp_path, training, inference):
    save_plainly(tmp_path / "model.ckpt-1", scope="mobilenet")
    for sentence in (
        refused(checkpoints.restore_training, training.session, tmp_path),
        refused(checkpoints.restore_for_evaluation, inference.session, tmp_path),
    ):
        assert "is of another network" in sentence and "2 of 6 variables found" in sentence
        assert "mobilenet/conv" in sentence and "net/conv/weights" in sentence


def test_network_of_another_size(tmp_path, training, inference):
    save_plainly(tmp_path / "model.ckpt-1", head=7)
    for sentence in (
        refused(checkpoints.restore_training, training.session, tmp_path),
        refused(checkpoints.restore_for_evaluation, inference.session, tmp_path),
    ):
        assert "other shapes: 4 of 6 variables found, 2 of another shape" in sentence
        assert "head/weights is [4, 7] float32 there and [4, 2] float32 here" in sentence


@pytest.mark.parametrize("v1", [False, True])
def test_bare_backbone(tmp_path, training, inference, v1):
    values = save_backbone(tmp_path / "resnet.ckpt", v1)
    assert len(values) == 5
    for sentence in (
        refused(checkpoints.restore_training, training.session, tmp_path / "resnet.ckpt"),
        refused(checkpoints.restore_for_evaluation, inference.session, tmp_path / "resnet.ckpt"),
        refused(checkpoints.restore_for_evaluation, inference.session, tmp_path),
        refused(
            checkpoints.restore_for_evaluation,
            inference.session,
            tmp_path,
            use_moving_averages=False,
        ),
    ):
        assert "is a bare backbone, it has net and lacks head: 4 of 6 variables found" in sentence


def save_backbone(path, v1=False, extra=None):
    """What slim's classification checkpoints hold: raw weights, statistics, the step."""
    generator = np.random.RandomState(3)
    shapes = {
        "net/conv/weights": [3, 4],
        "net/conv/BatchNorm/gamma": [4],
        "net/conv/BatchNorm/moving_mean": [4],
        "net/conv/BatchNorm/moving_variance": [4],
    }
    values = {n: generator.randn(*s).astype(np.float32) for n, s in shapes.items()}
    values |= {"global_step": np.int64(100), **(extra or {})}
    write_values(path, values, v1)
    return values


def test_object_based_checkpoint(tmp_path, training):
    with tf.Graph().as_default(), tf.Session() as session:
        variable = tf.get_variable("net/conv/weights", [3, 4], use_resource=True)
        session.run(variable.initializer)
        tf.train.Checkpoint(weights=variable).write(str(tmp_path / "model"), session=session)
    sentence = refused(checkpoints.restore_training, training.session, tmp_path / "model")
    assert "object-based checkpoint" in sentence and "0 of 6 variables found" in sentence


def test_archive_and_empty_folder(run, training, tmp_path):
    with tarfile.open(tmp_path / "run.tar.gz", "w:gz") as archive:
        archive.add(run, "run")
    (tmp_path / "empty").mkdir()
    for function in (
        checkpoints.restore_training,
        checkpoints.restore_for_evaluation,
        checkpoints.load_pretrained,
    ):
        sentence = refused(function, training.session, tmp_path / "run.tar.gz")
        assert "gzip archive; unpack it" in sentence
        assert "files seen: none" in refused(function, training.session, tmp_path / "empty")


# ---- evaluation -------------------------------------------------------------------------------


def test_evaluation_takes_averages_and_raw_statistics(trained, inference):
    restored = checkpoints.restore_for_evaluation(inference.session, trained[0])
    saved, found = trained[1][4], inference.values()
    assert restored.step == 4 and restored.loaded == 7
    for name, value in found.items():
        source = name if "moving" in name or name == "global_step" else name + AVERAGE
        assert np.array_equal(value, saved[source]), name
        assert name == "global_step" or not np.array_equal(value, saved[name]) or source == name


def test_evaluation_of_raw_weights(trained, inference):
    checkpoints.restore_for_evaluation(inference.session, trained[0], use_moving_averages=False)
    saved = trained[1][4]
    assert equal(inference.values(), {name: saved[name] for name in inference.variables})


def test_evaluation_of_a_checkpoint_without_averages(tmp_path, inference):
    values = save_plainly(tmp_path / "model.ckpt-3", averages=False)
    sentence = refused(checkpoints.restore_for_evaluation, inference.session, tmp_path)
    assert "holds no moving averages of the weights" in sentence
    assert "3 of 7 variables found" in sentence and "use_moving_averages=False" in sentence
    checkpoints.restore_for_evaluation(inference.session, tmp_path, use_moving_averages=False)
    assert equal(inference.values(), {name: values[name] for name in inference.variables})


def test_names_are_those_of_tensorflow():
    with tf.Graph().as_default() as graph:
        build_network()
        expected = tf.train.ExponentialMovingAverage(0.997).variables_to_restore()
        raw = {v.op.name: v for v in tf.global_variables()}
        found = checkpoints.evaluation_names(raw, graph)
    assert {n: v.op.name for n, v in found.items()} == {n: v.op.name for n, v in expected.items()}


def test_golden_evaluation_names():
    golden = json.loads(golden_path("east", "variables.json").read_text())
    with tf.Graph().as_default() as graph:
        raw = {
            entry["name"]: tf.get_variable(
                entry["name"], [], trainable=entry["trainable"], use_resource=True
            )
            for entry in golden["inference_graph"]
        }
        found = checkpoints.evaluation_names(raw, graph)
    assert {name: v.op.name for name, v in found.items()} == golden["eval_restore_map"]


# ---- starting from weights --------------------------------------------------------------------


@pytest.mark.parametrize("v1", [False, True])
def test_backbone_into_a_training(tmp_path, v1):
    extra = {"net/logits/weights": np.ones([4, 9], np.float32)}
    values = save_backbone(tmp_path / "resnet.ckpt", v1, extra)
    toy = Toy()
    before = toy.values()
    report = checkpoints.load_pretrained(toy.session, tmp_path / "resnet.ckpt")
    after = toy.values()
    backbone = [name for name in values if name in after and name != "global_step"]
    assert sorted(report.loaded) == sorted(backbone)
    assert report.missing == ["head/weights", "head/biases"]
    assert report.unused == ["global_step", "net/logits/weights"]
    assert "4 of 6 variables loaded, 2 missing" in str(report)
    for name in after:
        if name in backbone:
            assert np.array_equal(after[name], values[name])
        elif name.endswith(AVERAGE) and name.removesuffix(AVERAGE) in backbone:
            assert np.array_equal(after[name], values[name.removesuffix(AVERAGE)])
        else:  # the head, the slots, and the step: a fine-tuning starts at 0
            assert np.array_equal(after[name], before[name]), name


def test_whole_detector_loads_all_its_variables(trained, caplog):
    caplog.set_level("INFO")
    toy = Toy()
    before = toy.values()
    report = checkpoints.load_pretrained(toy.session, trained[0])
    assert len(report.loaded) == 6 and not report.missing and not report.shape_differs
    assert "6 of 6 variables loaded, 0 missing" in caplog.text
    saved, after = trained[1][4], toy.values()
    for name in after:
        is_state = name == "global_step" or "Adam" in name or "_power" in name
        assert np.array_equal(after[name], before[name] if is_state else saved[name]), name


def test_other_shapes_are_reported_and_left_alone(trained, caplog):
    caplog.set_level("INFO")
    toy = Toy(head=5)
    before = toy.values()
    report = checkpoints.load_pretrained(toy.session, trained[0])
    assert len(report.loaded) == 4 and len(report.shape_differs) == 2
    assert "head/biases is [2] float32 there and [5] float32 here" in caplog.text
    after = toy.values()
    for name in ("head/biases", "head/weights", "head/biases" + AVERAGE):
        assert np.array_equal(after[name], before[name])


def test_nothing_to_load_is_an_error(tmp_path, training):
    save_plainly(tmp_path / "model.ckpt-1", scope="mobilenet", width=8, head=3)
    sentence = refused(checkpoints.load_pretrained, training.session, tmp_path)
    assert "is of another network" in sentence and "0 of 6 variables found" in sentence


def test_names_can_be_mapped_and_chosen(trained, training):
    variable = training.variables["net/conv/BatchNorm/moving_variance"]
    report = checkpoints.load_pretrained(
        training.session, trained[0], {"net/conv/BatchNorm/gamma": variable}
    )
    assert report.loaded == ["net/conv/BatchNorm/gamma"]
    found = training.values()["net/conv/BatchNorm/moving_variance"]
    assert np.array_equal(found, trained[1][4]["net/conv/BatchNorm/gamma"])


def test_side_file_name():
    assert SIDE == ".readers.npz"
