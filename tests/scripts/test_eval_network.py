"""eval.py as a command, with the real network and checkpoints with random weights."""

import json
import os
import pathlib
import subprocess
import sys

import cv2
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import eval as east_eval
from nets import east
from utils.towers import checkpoints

ROOT = pathlib.Path(__file__).resolve().parents[2]
DECAY = 0.997


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of a checkpoint, picture, its maps under the averaged and under the raw weights)."""
    folder = tmp_path_factory.mktemp("checkpoint")
    picture = np.random.RandomState(0).randint(0, 256, (64, 96, 3)).astype(np.uint8)
    with tf.Graph().as_default() as graph, tf.Session(graph=graph) as session:
        tf.set_random_seed(1)
        images = tf.placeholder(tf.float32, [None, None, None, 3])
        outputs = east.model(images, is_training=False)
        averages = tf.train.ExponentialMovingAverage(DECAY)
        averages.apply(tf.trainable_variables())
        variables = {v.op.name: v for v in tf.trainable_variables()}
        kernel, bias = (variables[f"feature_fusion/Conv_7/{n}"] for n in ("weights", "biases"))
        session.run(tf.global_variables_initializer())
        # The averaged weights make every pixel text, the raw ones none.
        averages.average(kernel).load(np.zeros(kernel.shape, np.float32), session)
        averages.average(bias).load(np.array([3.0], np.float32), session)
        kernel.load(np.zeros(kernel.shape, np.float32), session)
        bias.load(np.array([-3.0], np.float32), session)
        raw = session.run(outputs, {images: picture[None]})
        tf.train.Saver().save(session, str(folder / "model.ckpt"), global_step=7)
        bias.load(np.array([3.0], np.float32), session)
        averaged = session.run(outputs, {images: picture[None]})
    return folder, picture, averaged, raw


def _run(*arguments):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(ROOT / "eval.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def test_the_detector_gives_the_maps_of_the_chosen_weights(trained):
    folder, picture, *expected = trained
    for use_moving_averages, maps in zip((True, False), expected):
        for path in (folder, folder / "model.ckpt-7"):
            with east_eval.Detector(str(path), use_moving_averages=use_moving_averages) as detector:
                for result, wanted in zip(detector.maps(picture), maps):
                    np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-5)


def test_a_whole_evaluation(trained, tmp_path):
    pictures, truths, out = tmp_path / "pictures", tmp_path / "truths", tmp_path / "out"
    pictures.mkdir()
    truths.mkdir()
    cv2.imwrite(str(pictures / "img_1.png"), trained[1])
    (pictures / "broken.jpg").write_bytes(b"")
    (truths / "gt_img_1.txt").write_text("10,10,60,10,60,40,10,40,word\n")
    done = _run(
        f"--test_data_path={pictures}",
        f"--checkpoint_path={trained[0]}/",
        f"--output_dir={out}",
        f"--gt_path={truths}",
        "--max_candidates=100",
        "--gpu_list=0",
    )
    assert done.returncode == 0, done.stderr
    assert "Find 2 images" in done.stdout
    assert f"Restore from {trained[0]}/model.ckpt-7" in done.stdout
    assert "skipped: " in done.stdout and "broken.jpg" in done.stdout
    assert "100 text boxes before nms" in done.stdout
    assert "384 text pixels are more than max_candidates" in done.stderr
    assert "1 of 2 images could not be read" in done.stdout
    score = json.loads((out / "icdar_score.json").read_text())
    detections = (out / "img_1.txt").read_text().splitlines()
    assert 0 < len(detections) <= 100
    assert score["images"]["img_1"]["detCare"] == len(detections)
    assert f"precision {score['precision']:.4f}, recall {score['recall']:.4f}" in done.stdout
    assert sorted(os.listdir(out)) == ["icdar_score.json", "img_1.png", "img_1.txt"]


def test_a_folder_without_pictures_ends_in_one_sentence(tmp_path):
    done = _run(f"--test_data_path={tmp_path}", f"--output_dir={tmp_path / 'out'}")
    assert done.returncode == 1
    assert f"error: --test_data_path={tmp_path} has no pictures" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_checkpoint_is_found_before_the_graph_is_built(tmp_path, monkeypatch):
    def build(*args, **kwargs):
        raise AssertionError("the graph was built")

    monkeypatch.setattr(east, "model", build)
    (tmp_path / "notes.txt").write_text("")
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(checkpoints.CheckpointError, match=str(path)):
            east_eval.Detector(str(path))
