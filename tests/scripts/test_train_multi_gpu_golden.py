"""The two-tower training graph of PointNet++ against five steps of the original."""

import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import train_multi_gpu
from tests import one_by_one_batch_norm
from tests.golden_sets import golden_path
from tests.golden_weights import GoldenWeights
from utils import tf_util
from utils.towers import devices

# Relative tolerances of the set's README for the mean loss of each step; None: chaotic there.
LOSS_TOLERANCES = {
    "train_basic_adam": (1e-2, 1e-2, 1e-2, 1e-2, 1e-2),
    "train_basic_momentum": (1e-3, 1e-3, 8e-2, 8e-2, 8e-2),
    "train_ssg_adam": (1e-3, 0.2, 0.2, 0.2, 0.2),
    "train_ssg_momentum": (1e-3, 1e-2, None, None, None),
}
RELIABLE = "train_basic_adam"  # the trajectory that the README says to rely on
GRADIENT = 3e-2  # relative, of l2 norms above the next number
SMALL_GRADIENT = 1e-4
WEIGHTS = 2e-2  # relative, of the final weights' l2 norms

# Training logits of step 0, absolute.
PRED_TOLERANCES = {"pointnet_cls_basic": 1e-3, "pointnet2_cls_ssg": 3e-2}

# Batch norms: the library's, and sums of one float32 after the other as in the golden runs. With
# these, step 0 is within this share of the README's tolerances.
SUMS = {"library": tf.nn.fused_batch_norm, "one_by_one": one_by_one_batch_norm.fused_batch_norm}
SHARE = 0.2
SLOW = "pointnet2_cls_ssg"  # only two steps one by one; more are chaotic
# The library adds in another order. Batch norm over the two clouds of a tower amplifies that beyond
# the README's tolerances in two places: the loss of step 1, and the gradients, of which single ones
# may be off by this many times as much.
LIBRARY_LOSSES = {"train_ssg_momentum": (1e-3, 0.1, None, None, None)}
TIMES = 5
# The last losses of one trajectory are chaotic: of runs whose weights are off by this factor, or of
# those of the original, every second is outside the README's tolerance. So one of these has to be
# within it; for the steps before, all.
CHAOTIC = {"train_basic_momentum": (3, 4)}
PERTURBATION = 1e-7
DRAWS = 10
SLOT_NAMES = ("Adam", "Adam_1", "Momentum", "beta1_power", "beta2_power", "batch")


def statistics(value):
    value = np.float64(value).ravel()
    return {"l2": np.linalg.norm(value), "sum": value.sum(), "abs_sum": np.abs(value).sum()}


class Training:
    """The golden steps, through the script's own graph; dropout is the identity, as there.

    Attributes:
        steps: one of SUMS -> [loss, pred, learning_rate, bn_decay] a step.
        tower_gradients: one of SUMS -> for each tower: variable's name -> gradient of step 0.
        variables: of the graph.
        after: variable's name -> value after the steps with the library's sums.
        eval_loss, eval_pred: then.
        draws: losses of each step, of runs with the library's sums from perturbed weights.
    """

    def __init__(self, case):
        self.case = case
        self.expected = json.loads(golden_path("pointnet2", f"{case}.json").read_text())
        self.arrays = np.load(golden_path("pointnet2", f"{case}.npz"))
        self.steps, self.tower_gradients, self.draws = {}, {}, []
        for sums in SUMS:
            self._run(sums)

    def _run(self, sums):
        pool, labels = self.arrays["pool"], self.arrays["pool_labels"]
        weights = GoldenWeights("pointnet2")
        place = devices.Devices("CPU", tuple(range(self.expected["num_gpus"])))
        tower_grads = []

        def noted_average_gradients(grads):
            tower_grads.extend(grads)
            return train_multi_gpu.gradients.average_gradients(grads)

        with pytest.MonkeyPatch.context() as patch, tf.Graph().as_default():
            patch.setattr(tf_util, "dropout", lambda inputs, *_, **__: inputs)
            patch.setattr(tf.nn, "fused_batch_norm", SUMS[sums])
            patch.setattr(train_multi_gpu, "average_gradients", noted_average_gradients)
            net = train_multi_gpu.TrainGraph(
                place,
                model=self.expected["model"],
                num_point=self.expected["num_point"],
                batch_size=self.expected["batch_size"],
                optimizer=self.expected["optimizer"],
                **self.flags(),
            )
            variables = tf.global_variables()
            kept = [v for v in variables if v.op.name.split("/")[-1] in SLOT_NAMES]
            given = [v for v in variables if v not in set(kept)]
            fetches = [net.loss, net.pred, net.learning_rate, net.bn_decay, net.train_op]
            named = [{v.op.name: g for g, v in pairs} for pairs in tower_grads]
            slow = sums == "one_by_one" and self.expected["model"] == SLOW
            indices = [step["pool_index"] for step in self.expected["steps"]]
            feeds = [
                {net.pointclouds_pl: pool[index], net.labels_pl: labels[index]} for index in indices
            ]
            with tf.Session(config=place.session_config()) as session:
                session.run([v.initializer for v in kept])
                weights.load(session, given)
                self.tower_gradients[sums] = session.run(named, feeds[0])
                self.steps[sums] = [
                    session.run(fetches, feed)[:4] for feed in feeds[: 2 if slow else None]
                ]
                if sums == "library":
                    self.variables = variables
                    self.after = session.run({v.op.name: v for v in variables})
                    first = np.arange(self.expected["batch_size"])
                    feed = {net.pointclouds_pl: pool[first], net.labels_pl: labels[first]}
                    evaluation = session.run([net.eval_loss, net.eval_pred], feed)
                    self.eval_loss, self.eval_pred = evaluation
                    for draw in range(DRAWS if self.case in CHAOTIC else 0):
                        session.run([v.initializer for v in kept])
                        weights.load(session, given, PERTURBATION, seed=draw)
                        self.draws.append([session.run(fetches, feed)[0] for feed in feeds])

    def flags(self):
        """The flags of the original's run that are not entries of their own."""
        given = self.expected["args"]
        values = {name.removeprefix("--"): value for name, value in zip(given[::2], given[1::2])}
        types = {"learning_rate": float, "decay_step": int, "decay_rate": float, "momentum": float}
        return {name: kind(values[name]) for name, kind in types.items() if name in values}


@pytest.fixture(scope="module", params=LOSS_TOLERANCES)
def training(request):
    return Training(request.param)


def is_noise(name):
    """Whether a variable is a bias before batch norm, whose gradient is rounding noise."""
    return "/biases" in name and not name.startswith("fc3/")


def test_golden_variables_are_those_of_the_original_in_its_order(training):
    found = [
        {
            "name": v.op.name,
            "shape": v.shape.as_list(),
            "dtype": v.dtype.base_dtype.name,
            "trainable": v.trainable,
        }
        for v in training.variables
    ]
    expected = training.expected["variables"]
    assert sorted(v["name"] for v in found) == sorted(v["name"] for v in expected)
    assert [v for v in found if v["trainable"]] == [v for v in expected if v["trainable"]]
    by_name = {v["name"]: v for v in expected}
    assert all(v == by_name[v["name"]] for v in found)


@pytest.mark.parametrize("sums", SUMS)
def test_golden_losses_and_schedules(training, sums):
    tolerances = LOSS_TOLERANCES[training.case]
    if sums == "library":
        tolerances = LIBRARY_LOSSES.get(training.case, tolerances)
    elif training.case != RELIABLE:
        tolerances = (SHARE * tolerances[0], *tolerances[1:])
    chaotic = CHAOTIC.get(training.case, ())
    for number, found in enumerate(training.steps[sums]):
        step, tolerance = training.expected["steps"][number], tolerances[number]
        if tolerance is not None and number not in chaotic:
            assert found[0] == pytest.approx(step["loss"], rel=tolerance), number
        assert found[2] == pytest.approx(step["learning_rate"], rel=1e-6)
        assert found[3] == pytest.approx(step["bn_decay"], rel=1e-6)
    assert training.after["batch"] == len(training.expected["steps"])


def test_golden_losses_of_the_chaotic_trajectory(training):
    if training.case not in CHAOTIC:
        pytest.skip("only the steps of one trajectory are chaotic and yet have a tolerance")
    expected = [step["loss"] for step in training.expected["steps"]]
    errors = np.abs(np.array(training.draws) / expected - 1)
    for number, tolerance in enumerate(LOSS_TOLERANCES[training.case]):
        error = errors[:, number]
        assert (error.min() if number in CHAOTIC[training.case] else error.max()) <= tolerance


@pytest.mark.parametrize("sums", SUMS)
def test_golden_logits_of_the_first_step(training, sums):
    tolerance = PRED_TOLERANCES[training.expected["model"]]
    if sums == "one_by_one":
        tolerance *= SHARE
    expected = training.arrays["pred_step0"]
    np.testing.assert_allclose(training.steps[sums][0][1], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("sums", SUMS)
def test_golden_gradients_of_each_tower(training, sums):
    expected, found = training.expected["tower_gradients_step0"], training.tower_gradients[sums]
    assert [gradients.keys() for gradients in found] == [e.keys() for e in expected]
    errors = np.array(
        [
            abs(statistics(gradients[name])["l2"] / value["l2"] - 1)
            for gradients, values in zip(found, expected)
            for name, value in values.items()
            if value["l2"] > SMALL_GRADIENT and not is_noise(name)
        ]
    )
    assert len(errors) > 10
    exact = sums == "one_by_one" or training.expected["model"] != SLOW
    assert errors.max() <= (SHARE * GRADIENT if exact else TIMES * GRADIENT)
    assert np.median(errors) <= GRADIENT


def test_golden_final_weights(training):
    if training.expected["optimizer"] != "adam":
        pytest.skip("the golden set's README gives no tolerance for this optimizer")
    for name, value in training.expected["final_variables"].items():
        if name.endswith(("/weights", "/gamma", "fc3/biases")):
            l2 = statistics(training.after[name])["l2"]
            assert l2 == pytest.approx(value["l2"], rel=WEIGHTS), name


def test_golden_moving_statistics_are_those_of_tower_0_then_1(training):
    if training.case != RELIABLE:
        pytest.skip("only this trajectory is not chaotic in the original")
    cases = training.expected["final_moving"]
    (in_order,) = [case for name, case in cases.items() if name.replace("_", "") == "tower0then1"]
    others = [case for case in cases.values() if case is not in_order]
    for name, value in in_order.items():
        found = statistics(training.after[name])
        if name.endswith("moving_variance"):
            assert found["abs_sum"] == pytest.approx(value["abs_sum"], rel=1e-2), name
    # Nearer to this interleaving than to any other, in the variables where they differ.
    distance = [
        sum(
            np.abs(training.after[name].ravel()[:5] - value["first5"]).sum()
            for name, value in case.items()
            if name.endswith("moving_variance")
        )
        for case in (in_order, *others)
    ]
    assert distance[0] < 0.2 * min(distance[1:])


def test_golden_evaluation_after_training(training):
    if training.case != RELIABLE:
        pytest.skip("only this trajectory is not chaotic in the original")
    assert training.eval_loss == pytest.approx(training.expected["eval_loss_after"], rel=5e-2)
