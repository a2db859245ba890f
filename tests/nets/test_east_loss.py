"""EAST's loss: the original's numbers, and cases that can be worked out by hand."""

import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from nets import east
from tests.golden_sets import golden_path

INPUTS = ("y_true_cls", "y_pred_cls", "y_true_geo", "y_pred_geo", "training_mask")


class Loss:
    """The graph of loss, terms and gradients, for maps of any size."""

    def __init__(self):
        with tf.Graph().as_default() as graph:
            self.inputs = [
                tf.placeholder(tf.float32, [None, None, None, 5 if "geo" in name else 1])
                for name in INPUTS
            ]
            loss = east.loss(*self.inputs)
            gradients = tf.gradients(loss, [self.inputs[1], self.inputs[3]])
            self.summaries = [t.op.name for t in tf.get_collection(tf.GraphKeys.SUMMARIES)]
            terms = east.loss_terms(*self.inputs)
            self.outputs = {"loss": loss, "gradients": gradients, "terms": terms}
        self.session = tf.Session(graph=graph)

    def __call__(self, *arrays):
        return self.session.run(self.outputs, dict(zip(self.inputs, arrays)))


@pytest.fixture(scope="module")
def loss():
    return Loss()


def golden_cases():
    facts = json.loads(golden_path("east", "loss.json").read_text())["cases"]
    arrays = np.load(golden_path("east", "loss.npz"))
    for case, expected in facts.items():
        yield case, expected, lambda name, case=case: arrays[f"{case}/{name}"]


def test_golden_loss_and_terms(loss):
    for case, expected, array in golden_cases():
        found = loss(*map(array, INPUTS))
        for name, value in {"loss": found["loss"], **found["terms"]}.items():
            if case == "perfect_ties":
                np.testing.assert_allclose(value, expected[name], 0, 1e-7, err_msg=f"{case} {name}")
            else:
                np.testing.assert_allclose(value, expected[name], 1e-6, err_msg=f"{case} {name}")


def test_golden_gradients(loss):
    for case, _, array in golden_cases():
        found = loss(*map(array, INPUTS))["gradients"]
        for name, value in zip(("grad_y_pred_cls", "grad_y_pred_geo"), found):
            expected = array(name)
            atol = 1e-5 * np.abs(expected).max()
            np.testing.assert_allclose(value, expected, 0, atol, err_msg=f"{case} {name}")


def test_summaries_carry_the_terms_names(loss):
    assert loss.summaries == ["classification_dice_loss", "geometry_AABB", "geometry_theta"]


def pixels(*rows):
    """Maps of one image with one pixel a row: score, prediction, 5 + 5 geometry values, mask."""
    table = np.float32(rows)[np.newaxis, np.newaxis]  # [1, 1, pixels, 13]
    return np.split(table, [1, 2, 7, 12], axis=3)


def test_loss_worked_out_by_hand(loss):
    found = loss(
        *pixels(
            [1, 0.5, 1, 1, 1, 1, 0.0, 1, 1, 1, 0, np.pi / 3, 1],  # area 4 and 2, overlap 2
            [0, 0.5, 9, 9, 9, 9, 0.7, 1, 1, 1, 1, 0.0, 1],  # no text: no geometry
            [1, 0.5, 9, 9, 9, 9, 0.7, 1, 1, 1, 1, 0.0, 0],  # does not count at all
        )
    )
    dice = 1 - 2 * 0.5 / (1 + 1)
    aabb, theta = np.log(5 / 3) / 3, 0.5 / 3
    expected = {"classification_dice_loss": dice, "geometry_AABB": aabb, "geometry_theta": theta}
    assert list(found["terms"]) == list(expected)
    np.testing.assert_allclose(list(found["terms"].values()), list(expected.values()), 1e-5)
    np.testing.assert_allclose(found["loss"], aabb + 20 * theta + 0.01 * dice, 1e-5)


def test_the_term_that_is_not_finite_can_be_told(loss):
    row = [1, 0.5, 1, 1, 1, 1, 0.0, 1, 1, 1, 1, 0.0, 1]
    angle_unknown = [*row[:6], np.nan, *row[7:]]
    terms = loss(*pixels(row, angle_unknown))["terms"]
    finite = {name: bool(np.isfinite(value)) for name, value in terms.items()}
    ops = [term.op.name for term in loss.outputs["terms"].values()]
    assert [name.split("/")[-1] for name in ops] == list(finite)
    assert finite == {
        "classification_dice_loss": True,
        "geometry_AABB": True,
        "geometry_theta": False,
    }
