"""Every PointNet++ network, evaluating and training, against the original's numbers."""

import importlib
import json
import zlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests import one_by_one_batch_norm
from tests.golden_sets import golden_path
from tests.golden_weights import GoldenWeights
from utils import pointnet_util, tf_util

# Golden set -> what it takes to build its network; the module has the name that its json states.
NETWORKS = {
    "pointnet_cls_basic": {},
    "pointnet2_cls_ssg": {},
    "pointnet2_cls_msg": {"as_shipped": True},
    "pointnet2_cls_msg_fixed": {},
    "pointnet2_part_seg": {},
    "pointnet2_part_seg_msg_one_hot": {},
    "pointnet2_sem_seg": {},
}

# Tolerances of the golden set's README. Absolute ones of logits and losses:
EVALUATION = 1e-4
TRAINING = {"pointnet_cls_basic": (1e-3, 1e-3)}
TRAINING_OF_OTHERS = (3e-2, 5e-3)
GRADIENT = 3e-2  # relative, of l2 norms above the next number
SMALL_GRADIENT = 1e-4
MOVING = 1e-3
# A pooling of all points, then a normalized layer, takes away what this adds, so its gradient is
# rounding alone; in one set it is just above the number before.
NO_GRADIENT = "layer3/conv2/bn/beta"

# Batch norms: the library's, and sums of one float32 after the other as in the golden runs. With
# these the networks are well within the README's tolerances; logits and losses within this share.
SUMS = {"library": tf.nn.fused_batch_norm, "one_by_one": one_by_one_batch_norm.fused_batch_norm}
SHARE = 0.2
# The library adds in another order. What that changes is amplified most by these two networks,
# beyond the tolerances: single values may be off by this many times as much.
TIMES = 5
ROUGH = ("pointnet2_cls_msg_fixed", "pointnet2_sem_seg")
MOST_LOGITS = 0.9
MOST_GRADIENTS = 0.5
# With the library's sums a ReLU of its last layers opens that is shut in the golden run, and the
# gradients of all layers before change by a quarter.
OTHER_RELU = "pointnet2_cls_msg_fixed"

# The README has none for activations. Sums relative, single ones by the largest.
ACTIVATION_SUMS = {"eval": 1e-4, "library": 1e-3, "one_by_one": 1e-4}
ACTIVATION = {"eval": 1e-4, "library": 1e-2, "one_by_one": 1e-3}


class Spy:
    """Notes what the blocks of a network return, by their variable scopes, while it is built."""

    def __init__(self, patch):
        self.activations, self.indices = {}, {}
        self._patch = patch

    def watch(self, network):
        for name in ("pointnet_sa_module", "pointnet_sa_module_msg", "pointnet_fp_module"):
            if hasattr(network, name):
                self._patch.setattr(network, name, self._noting(getattr(network, name)))
        sample, query = pointnet_util.farthest_point_sample, pointnet_util.query_ball_point

        def noted_sample(npoint, inp):
            idx = sample(npoint, inp)
            self.indices[f"{tf.get_variable_scope().name}/fps_idx"] = idx
            return idx

        def noted_query(radius, nsample, xyz1, xyz2):
            idx, count = query(radius, nsample, xyz1, xyz2)
            prefix = f"{tf.get_variable_scope().name}/ball_r{radius}"
            self.indices.update({f"{prefix}_idx": idx, f"{prefix}_cnt": count})
            return idx, count

        self._patch.setattr(pointnet_util, "farthest_point_sample", noted_sample)
        self._patch.setattr(pointnet_util, "query_ball_point", noted_query)

    def _noting(self, block):
        def noted(*args, scope, **kwargs):
            result = block(*args, scope=scope, **kwargs)
            if isinstance(result, tuple):
                if result[0] is not None:
                    self.activations[f"{scope}/new_xyz"] = result[0]
                self.activations[f"{scope}/new_points"] = result[1]
            else:
                self.activations[f"{scope}/new_points"] = result
            return result

        return noted


class Forward:
    """One network with the golden weights, run on the golden clouds.

    Attributes:
        activations: "eval" or one of SUMS -> name -> array; of training without dropout.
        indices: name -> array.
        outputs: "eval" or (one of SUMS, "train" or "train_masked") -> logits, loss, end_points.
        gradients: (one of SUMS, "train" or "train_masked") -> variable's name -> array.
        moving: one of SUMS -> variable's name -> array after one step.
        variables: (name, shape, dtype, trainable) in the order of creation.
        evaluation_updates: updates that the network in evaluation registers.
    """

    def __init__(self, name):
        self.name = name
        self.facts = json.loads(golden_path("pointnet2", f"forward_{name}.json").read_text())
        self.expected = np.load(golden_path("pointnet2", f"forward_{name}.npz"))
        network = importlib.import_module(f"nets.pointnet2.{self.facts['model']}")
        with tf.Graph().as_default(), tf.Session() as session:
            outputs, activations, gradients, updates = {}, {}, {}, {}
            self.inputs = self._placeholders(network)
            masks = {
                scope: tf.placeholder(tf.float32, self.expected[f"dropout_mask_{scope}"].shape)
                for scope in self.facts["dropout_order"]
            }
            with_dropout = tf.placeholder(tf.bool, [])
            for mode in ("eval", *SUMS):
                seen = len(tf.get_collection(tf.GraphKeys.UPDATE_OPS))
                with pytest.MonkeyPatch.context() as patch:
                    spy = Spy(patch)
                    spy.watch(network)
                    self._replace_dropout(patch, masks, with_dropout)
                    patch.setattr(tf.nn, "fused_batch_norm", SUMS.get(mode, SUMS["library"]))
                    with tf.variable_scope(tf.get_variable_scope(), reuse=mode != "eval"):
                        outputs[mode] = self._build(network, mode != "eval")
                activations[mode] = spy.activations
                updates[mode] = tf.get_collection(tf.GraphKeys.UPDATE_OPS)[seen:]
                if mode == "eval":
                    indices = spy.indices
                else:
                    found = tf.gradients(outputs[mode]["loss"], tf.trainable_variables())
                    names = [v.op.name for v in tf.trainable_variables()]
                    gradients[mode] = dict(zip(names, found))
            self.variables = [
                (v.op.name, v.shape.as_list(), v.dtype.base_dtype.name, v.trainable)
                for v in tf.global_variables()
            ]
            self.evaluation_updates = updates["eval"]
            moving = {v.op.name: v for v in tf.global_variables() if not v.trainable}

            weights = GoldenWeights("pointnet2")
            weights.load(session, tf.global_variables())
            feed = {placeholder: self.expected[key] for key, placeholder in self.inputs.items()}
            feed.update({masks[s]: self.expected[f"dropout_mask_{s}"] for s in masks})
            feed[with_dropout] = True  # without effect
            fetches = (outputs["eval"], activations["eval"], indices)
            evaluation, in_evaluation, self.indices = session.run(fetches, feed)
            self.outputs, self.activations = {"eval": evaluation}, {"eval": in_evaluation}
            self.gradients, self.moving = {}, {}
            for sums in SUMS:
                weights.load(session, moving.values())
                fetches = outputs[sums], gradients[sums]
                feed[with_dropout] = True
                found = session.run(fetches, feed)
                self.outputs[sums, "train_masked"], self.gradients[sums, "train_masked"] = found
                feed[with_dropout] = False
                fetches = (*fetches, activations[sums], updates[sums])
                *found, self.activations[sums], _ = session.run(fetches, feed)
                self.outputs[sums, "train"], self.gradients[sums, "train"] = found
                self.moving[sums] = session.run(moving)

    def _placeholders(self, network):
        """Golden array name -> placeholder, in the order in which the network gives them."""
        batch, num_point = self.expected["pointcloud"].shape[:2]
        keys = ["pointcloud", "label", "smpw" if "smpw" in self.expected else "cls_label"]
        placeholders = network.placeholder_inputs(batch, num_point)
        return dict(zip(keys, placeholders))

    def _build(self, network, is_training):
        arguments = [self.inputs["pointcloud"]]
        if "cls_label" in self.inputs:
            arguments.append(self.inputs["cls_label"])
        arguments.append(is_training)
        if "smpw" in self.inputs:
            arguments.append(self.expected["logits_eval"].shape[-1])
        logits, end_points = network.get_model(
            *arguments, bn_decay=self.facts["bn_decay"], **NETWORKS[self.name]
        )
        extra = [self.inputs["smpw"]] if "smpw" in self.inputs else []
        if logits.shape.rank == 2:
            extra = [end_points]
        loss = network.get_loss(logits, self.inputs["label"], *extra)
        return {"logits": logits, "loss": loss, "end_points": end_points}

    @staticmethod
    def _replace_dropout(patch, masks, with_dropout):
        """Dropout with the golden masks, switched off where the set was made without."""
        dropout = tf_util.dropout

        def switched_dropout(inputs, *args, **kwargs):
            return tf.where_v2(with_dropout, dropout(inputs, *args, **kwargs), inputs)

        def golden_mask(shape, keep_prob, scope, seed):
            del shape, keep_prob, seed
            return masks[scope]

        patch.setattr(tf_util, "dropout", switched_dropout)
        patch.setattr(tf_util, "dropout_mask", golden_mask)


@pytest.fixture(scope="module", params=NETWORKS)
def forward(request):
    return Forward(request.param)


def summary(value):
    """Of an array in float64: sum, sum of absolute values, l2 norm."""
    value = np.float64(value)
    return value.sum(), np.abs(value).sum(), np.sqrt((value**2).sum())


def has_batch_norm(name, names):
    return name.rpartition("/")[0] + "/bn/beta" in names


def test_golden_variables_in_their_order(forward):
    listed = json.loads(golden_path("pointnet2", f"variables_{forward.name}.json").read_text())
    entries = {entry["name"]: entry for entry in listed["variables"]}
    names = [n for n in listed["creation_order"] if "/" in n]  # without the step counters
    names = [n for n in names if n.rpartition("/")[0] not in entries]  # and the optimizer's slots
    fields = ("name", "shape", "dtype", "trainable")
    assert forward.variables == [tuple(entries[name][field] for field in fields) for name in names]


def test_golden_indices(forward):
    checked = 0
    for name, idx in forward.indices.items():
        assert idx.dtype == np.int32
        key = f"idx:{name}"
        if key in forward.expected:
            checked += 1
            np.testing.assert_array_equal(idx, forward.expected[key], err_msg=name)
        if name in forward.facts.get("idx_crc32", {}):
            checked += 1
            expected = forward.facts["idx_crc32"][name]
            assert idx.sum(dtype=np.int64) == expected["sum"], name
            assert zlib.crc32(idx.tobytes()) == expected["crc32_of_int32_bytes"], name
    assert checked == len(forward.indices)
    stored = {key for key in forward.expected if key.startswith("idx:")}
    assert stored <= {f"idx:{name}" for name in forward.indices}


def test_golden_evaluation(forward):
    found = forward.outputs["eval"]
    for key in ("logits", "loss"):
        expected = forward.expected[f"{key}_eval"]
        np.testing.assert_allclose(found[key], expected, rtol=0, atol=EVALUATION, err_msg=key)


@pytest.mark.parametrize("mode", ["train", "train_masked"])
@pytest.mark.parametrize("sums", SUMS)
def test_golden_training(forward, sums, mode):
    tolerances = TRAINING.get(forward.name, TRAINING_OF_OTHERS)
    times = {"one_by_one": SHARE, "library": TIMES if forward.name in ROUGH else 1}[sums]
    for key, tolerance in zip(("logits", "loss"), tolerances):
        errors = np.abs(forward.outputs[sums, mode][key] - forward.expected[f"{key}_{mode}"])
        assert errors.max() <= times * tolerance, key
        assert key == "loss" or np.quantile(errors, MOST_LOGITS) <= tolerance, key


@pytest.mark.parametrize("mode", ["eval", *SUMS])
def test_golden_activations_and_end_points(forward, mode):
    found = forward.activations[mode]
    kind = "eval" if mode == "eval" else "train"
    expected = forward.facts[f"acts_{kind}"]
    assert found.keys() <= expected.keys()
    # Classifiers leave out the origin, the centre of the group of all points.
    assert expected.keys() - found.keys() <= {"layer3/new_xyz"}
    end_points = forward.outputs["eval" if mode == "eval" else (mode, "train")]["end_points"]
    assert sorted(end_points) == forward.facts["end_points"]
    for name, value in {**found, **end_points}.items():
        entry = {**expected, **forward.facts[f"end_points_{kind}"]}[name]
        tolerance = ACTIVATION_SUMS[mode]
        assert list(value.shape) == entry["shape"], name
        total, abs_sum, l2 = summary(value)
        np.testing.assert_allclose(abs_sum, entry["abs_sum"], tolerance, err_msg=name)
        np.testing.assert_allclose(l2, entry["l2"], tolerance, err_msg=name)
        assert abs(total - entry["sum"]) <= tolerance * abs_sum, name
        scale = np.abs(value).max()
        np.testing.assert_allclose(
            value.ravel()[:5], entry["first5"], rtol=0, atol=ACTIVATION[mode] * scale, err_msg=name
        )


def gradient_errors(forward, sums, mode):
    """Relative errors of the gradients' l2 norms, those left out that are rounding alone."""
    expected, found = forward.facts[f"grads_{mode}"], forward.gradients[sums, mode]
    assert found.keys() == expected.keys()
    names = [
        name
        for name, entry in expected.items()
        if entry["l2"] > SMALL_GRADIENT
        and not (name == NO_GRADIENT and entry["l2"] < 2 * SMALL_GRADIENT)
        and not (name.endswith("/biases") and has_batch_norm(name, expected))
    ]
    assert len(names) > len(expected) / 2  # one in four is the bias of a normalized layer
    return np.array([abs(summary(found[name])[2] / expected[name]["l2"] - 1) for name in names])


@pytest.mark.parametrize("mode", ["train", "train_masked"])
@pytest.mark.parametrize("sums", SUMS)
def test_golden_gradients(forward, sums, mode):
    if sums == "library" and forward.name == OTHER_RELU:
        pytest.skip("with the library's sums another ReLU opens; see OTHER_RELU")
    errors = gradient_errors(forward, sums, mode)
    exact = sums == "one_by_one" or forward.name in TRAINING
    assert errors.max() <= (GRADIENT if exact else TIMES * GRADIENT)
    assert np.quantile(errors, MOST_GRADIENTS) <= GRADIENT


@pytest.mark.parametrize("sums", SUMS)
def test_golden_moving_statistics_after_one_step(forward, sums):
    expected = forward.facts["moving_after_one_training_forward"]
    assert forward.moving[sums].keys() == expected.keys()
    assert forward.evaluation_updates == []
    tolerance = MOVING * (SHARE if sums == "one_by_one" else 1)
    for name, entry in expected.items():
        total, abs_sum, _ = summary(forward.moving[sums][name])
        np.testing.assert_allclose(abs_sum, entry["abs_sum"], tolerance, err_msg=name)
        assert abs(total - entry["sum"]) <= tolerance * entry["abs_sum"], name
