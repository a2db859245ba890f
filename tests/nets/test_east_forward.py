"""EAST's network against the original's numbers, and its inference graph."""

import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from nets import east, resnet_v1
from tests.golden_sets import golden_path
from tests.golden_weights import GoldenWeights

# Tolerances of the golden set's README: score, distances in pixels, angle in radians, and end
# points relative to their largest absolute value.
TOLERANCES = {"test": (1e-5, 5e-3, 1e-5, 1e-5), "train": (1e-4, 5e-2, 2e-4, 1e-4)}


class Forward:
    """The network in one mode, run once on the golden images with the golden weights."""

    def __init__(self, mode):
        self.mode = mode
        self.facts = json.loads(golden_path("east", "forward.json").read_text())
        self.expected = np.load(golden_path("east", "forward.npz"))
        end_points = {}

        def recording_backbone(*args, **kwargs):
            net, found = resnet_v1.resnet_v1_50(*args, **kwargs)
            end_points.update(found)
            return net, found

        with tf.Graph().as_default(), tf.Session() as session:
            images = tf.placeholder(tf.float32, [None, None, None, 3])
            outputs = east.model(
                images,
                is_training=mode == "train",
                text_scale=self.facts["text_scale"],
                backbone=recording_backbone,
            )
            self.variables = [
                (v.op.name, v.shape.as_list(), v.dtype.base_dtype.name, v.trainable)
                for v in tf.global_variables()
            ]
            self.num_updates = len(tf.get_collection(tf.GraphKeys.UPDATE_OPS))
            GoldenWeights("east").load(session, tf.global_variables())
            (self.score, self.geometry), self.end_points = session.run(
                (outputs, end_points), {images: self.expected["images"]}
            )


@pytest.fixture(scope="module", params=["test", "train"])
def forward(request):
    return Forward(request.param)


def test_golden_weights_are_those_of_the_set():
    weights = GoldenWeights("east")
    expected = json.loads(golden_path("east", "train.json").read_text())[
        "variable_checksums_before"
    ]
    variables = json.loads(golden_path("east", "variables.json").read_text())["train_graph"]
    shapes = {entry["name"]: entry["shape"] for entry in variables}
    assert weights.first3
    for name, first in weights.first3.items():
        value = weights.value(name, shapes[name])
        np.testing.assert_array_equal(value.ravel()[:3], np.float32(first))
        np.testing.assert_allclose(np.abs(value, dtype=np.float64).sum(), expected[name][1], 1e-9)


def test_golden_outputs(forward):
    score, distance, angle, _ = TOLERANCES[forward.mode]
    expected = {k: forward.expected[f"{forward.mode}_{k}"] for k in ("F_score", "F_geometry")}
    np.testing.assert_allclose(forward.score, expected["F_score"], rtol=0, atol=score)
    distances, angles = np.split(expected["F_geometry"], [4], axis=3)
    np.testing.assert_allclose(forward.geometry[..., :4], distances, rtol=0, atol=distance)
    np.testing.assert_allclose(forward.geometry[..., 4:], angles, rtol=0, atol=angle)


def test_golden_end_points_in_the_originals_names(forward):
    prefix = forward.mode + "/"
    expected = {
        name.removeprefix(prefix): entry
        for name, entry in forward.facts["end_points"].items()
        if name.startswith(prefix)
    }
    assert set(forward.end_points) == set(expected)
    for name, entry in expected.items():
        value = np.float64(forward.end_points[name])
        atol = TOLERANCES[forward.mode][3] * entry["absmax"]
        assert list(value.shape) == entry["shape"], name
        found = [value.mean(), value.std(), np.abs(value).max(), *value.ravel()[:5]]
        wanted = [entry["mean"], entry["std"], entry["absmax"], *entry["first5"]]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("pool", ["pool2", "pool3", "pool4", "pool5"])
def test_golden_feature_maps(forward, pool):
    value = forward.end_points[pool]
    found = {
        "ch0_8": value[..., :8],
        "channel_mean": value.mean(axis=(0, 1, 2), dtype=np.float64),
        "channel_std": value.std(axis=(0, 1, 2), dtype=np.float64),
    }
    absmax = forward.facts["end_points"][f"{forward.mode}/{pool}"]["absmax"]
    for name, array in found.items():
        expected = forward.expected[f"{forward.mode}_{pool}_{name}"]
        atol = TOLERANCES[forward.mode][3] * absmax
        np.testing.assert_allclose(array, expected, rtol=0, atol=atol, err_msg=name)


def test_golden_inference_variables(forward):
    listed = json.loads(golden_path("east", "variables.json").read_text())["inference_graph"]
    expected = [(v["name"], v["shape"], v["dtype"], v["trainable"]) for v in listed]
    assert forward.variables == [v for v in expected if v[0] != "global_step"]


def test_only_training_updates_statistics(forward):
    statistics = [v for v in forward.variables if "/moving_" in v[0]]
    assert forward.num_updates == (len(statistics) if forward.mode == "train" else 0)
