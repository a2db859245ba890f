"""Half precision: what layers compute in, the loss scale, and gradients on their way."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from nets import east, layers
from nets.pointnet2 import pointnet2_cls_ssg
from utils import tf_util
from utils.towers import checkpoints, devices, gradients, layer_options, precision

HALF = [tf.bfloat16, tf.float16]
EPSILON = {tf.float32: 2.0**-24, tf.bfloat16: 2.0**-9, tf.float16: 2.0**-12}  # of a rounding
MATRIX_OPS = {"Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "MatMul", "BatchMatMulV2"}


def computing_in(dtype):
    return layer_options.scope(layer_options.LayerOptions(compute_dtype=dtype))


def east_loss():
    rng = np.random.RandomState(0)
    images = tf.constant(rng.uniform(0, 255, [2, 64, 64, 3]), tf.float32)
    score, geometry = east.model(images)
    assert score.dtype == geometry.dtype == tf.float32
    return tf.reduce_mean(tf.square(score - 1)) + 1e-4 * tf.reduce_mean(geometry)


def pointnet_loss():
    rng = np.random.RandomState(0)
    clouds = tf.constant(rng.uniform(-1, 1, [4, 64, 6]), tf.float32)
    pred, end_points = pointnet2_cls_ssg.get_model(clouds, True, dropout_seed=tf.constant([1, 2]))
    assert pred.dtype == tf.float32
    return pointnet2_cls_ssg.get_loss(pred, tf.constant([0, 1, 2, 3]), end_points)


def gradients_of(loss):
    return tf.gradients(loss, tf.trainable_variables(), aggregation_method=gradients.PAIRWISE)


# --- what layers compute in ----------------------------------------------------------------------


def kinds_of_ops(graph):
    """How many ops there are of each type but constants, and of casts from float to float."""
    kinds = collections.Counter(op.type for op in graph.get_operations() if op.type != "Const")
    casts = [op for op in graph.get_operations() if op.type == "Cast"]
    casts = [
        op for op in casts if op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_floating
    ]
    kinds.subtract({"Cast": len(casts)})
    return kinds, len(casts)


@pytest.mark.parametrize("build", [east_loss, pointnet_loss])
def test_float32_adds_no_op_and_half_precision_casts_alone(build):
    found = {}
    for dtype in (tf.float32, tf.float16):
        with tf.Graph().as_default() as graph, computing_in(dtype):
            gradients_of(build())
            found[dtype] = kinds_of_ops(graph)
    assert found[tf.float32][1] == 0
    assert found[tf.float16][1] > 0
    assert found[tf.float16][0] == found[tf.float32][0]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("build", [east_loss, pointnet_loss])
def test_networks_compute_in_the_type_asked_for(build, dtype):
    with tf.Graph().as_default() as graph:
        with computing_in(dtype):
            loss = build()
        grads = gradients_of(loss)
        types = {
            tensor.dtype
            for op in graph.get_operations()
            if op.type in MATRIX_OPS
            for tensor in [*op.inputs, *op.outputs]
            if tensor.dtype.is_floating
        }
    assert types == {dtype}
    assert loss.dtype == tf.float32
    assert {variable.dtype.base_dtype for variable in tf.global_variables()} <= {tf.float32}
    assert {grad.dtype for grad in grads} == {tf.float32}


@pytest.mark.parametrize("dtype", HALF)
def test_coordinates_decide_in_float32(dtype):
    """Samples and groups are of float32 coordinates: all searches get and give the same."""
    searches = {}
    for compute_dtype in (tf.float32, dtype):
        with tf.Graph().as_default() as graph, computing_in(compute_dtype):
            pointnet_loss()
            calls = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
            searches[compute_dtype] = [
                [tensor.dtype for tensor in [*op.inputs, *op.outputs]] for op in calls
            ]
    assert len(searches[dtype]) == 4
    assert searches[dtype] == searches[tf.float32]
    assert dtype not in sum(searches[dtype], [])


def small_net(inputs):
    """Layers of both ports, smooth, with batch norm, dropout and biases."""
    net = layers.conv2d(inputs, 8, 3, activation_fn=tf.tanh, normalizer_fn=layers.batch_norm)
    net = tf_util.conv2d(net, 8, [3, 3], "conv", activation_fn=tf.tanh, bn=True, is_training=True)
    net = tf_util.dropout(net, True, "dropout", seed=tf.constant([1, 2]))
    net = tf_util.fully_connected(
        tf.reduce_mean(net, [1, 2]), 8, "fc", activation_fn=tf.tanh, bn=True, is_training=True
    )
    return layers.fully_connected(net, 4, activation_fn=layers.in_float32(tf.tanh))


@pytest.mark.parametrize("dtype", HALF)
def test_losses_and_gradients_are_those_of_float32_up_to_rounding(dtype):
    found = {}
    for compute_dtype in (tf.float32, dtype):
        with tf.Graph().as_default(), tf.Session() as session:
            tf.set_random_seed(1)
            inputs = tf.constant(np.random.RandomState(0).randn(8, 8, 8, 3), tf.float32)
            with computing_in(compute_dtype):
                outputs = small_net(inputs)
            grads = gradients_of(tf.reduce_mean(tf.square(outputs - 1)))
            updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
            session.run(tf.global_variables_initializer())
            statistics = [update.value for update in updates]
            assert {value.dtype for value in statistics} == {tf.float32}
            grads = tf.concat([tf.reshape(grad, [-1]) for grad in grads], 0)
            found[compute_dtype] = session.run([outputs, grads, tf.concat(statistics, 0)])
    for value, reference in zip(found[dtype], found[tf.float32]):
        difference = np.linalg.norm(value - reference) / np.linalg.norm(reference)
        assert EPSILON[dtype] / 100 < difference < 20 * EPSILON[dtype]


# --- the loss scale ------------------------------------------------------------------------------


class ScaledTraining:
    """One weight w = 1 with gradient `slope`, Adam, an average, and a loss scale."""

    def __init__(self, **settings):
        self.slope = tf.placeholder(tf.float32, [])
        self.weight = tf.get_variable("w", [], initializer=tf.ones_initializer(), use_resource=True)
        self.statistic = tf.get_variable(
            "moving", [], initializer=tf.zeros_initializer(), trainable=False, use_resource=True
        )
        self.scale = precision.LossScale(**settings)
        optimizer = tf.train.AdamOptimizer(0.5)
        average = tf.train.ExponentialMovingAverage(0.5)
        scaled = self.scale.scale(self.slope * self.weight)
        grads = self.scale.unscale(optimizer.compute_gradients(scaled))
        self.gradient = grads[0][0]
        self.finite = precision.all_finite(grads)

        def update():
            with tf.control_dependencies([optimizer.apply_gradients(grads)]):
                moved = self.statistic.assign_add(1.0, read_value=False)
            with tf.control_dependencies([moved]):
                return average.apply([self.weight])

        self.step = self.scale.guarded(self.finite, update)
        self.initialize = tf.global_variables_initializer()


def state_of(session):
    variables = tf.global_variables()
    return dict(zip([v.op.name for v in variables], session.run(variables)))


def test_loss_scale_doubles_halves_and_skips():
    with tf.Graph().as_default(), tf.Session() as session:
        training = ScaledTraining(initial=4.0, growth_steps=2)
        session.run(training.initialize)
        scales = []
        for slope in (1.0, 1.0, np.inf, 1.0, np.nan, 1.0, 1.0, -np.inf, -np.inf, -np.inf, -np.inf):
            before = state_of(session)
            finite, _ = session.run([training.finite, training.step], {training.slope: slope})
            after = state_of(session)
            changed = {name for name in before if before[name] != after[name]}
            scales.append(after["loss_scale"])
            assert finite == np.isfinite(slope)
            if finite:
                assert {"w", "w/Adam", "w/ExponentialMovingAverage", "moving"} <= changed
            else:
                assert changed <= {"loss_scale", "loss_scale_good_steps"}
    assert scales == [4, 8, 4, 4, 2, 2, 4, 2, 1, 1, 1]


def test_loss_scale_changes_no_bit_of_a_gradient():
    with tf.Graph().as_default(), tf.Session() as session:
        training = ScaledTraining()
        session.run(training.initialize)
        assert session.run(training.scale.value) == 2.0**15
        slope = np.float32(0.1234567)
        assert session.run(training.gradient, {training.slope: slope}) == slope


def test_variables_made_by_a_guarded_update_are_ordinary_ones():
    with tf.Graph().as_default() as graph:
        ScaledTraining()
        names = [variable.op.name for variable in tf.global_variables()]
        assert names[:4] == ["w", "moving", "loss_scale", "loss_scale_good_steps"]
        assert set(names[4:]) == {
            *("beta1_power", "beta2_power", "w/Adam", "w/Adam_1", "w/ExponentialMovingAverage")
        }
        assert all(variable.graph is graph for variable in tf.global_variables())
        optional = [v.op.name for v in tf.get_collection("optional_variables")]
    assert optional == ["loss_scale", "loss_scale_good_steps"]


def test_gradients_too_small_for_float16_survive_with_a_loss_scale():
    """1e-8 is 0 in float16; times 2 ** 15 it is not."""
    found = []
    for scaled in (False, True):
        with tf.Graph().as_default(), tf.Session() as session, computing_in(tf.float16):
            scale = precision.LossScale() if scaled else None
            outputs = layers.fully_connected(tf.ones([1, 1]), 1, activation_fn=None)
            loss = tf.reduce_sum(tf.cast(outputs, tf.float32)) * 1e-8
            grads = gradients_of(scale.scale(loss) if scaled else loss)
            pairs = list(zip(grads, tf.trainable_variables()))
            pairs = scale.unscale(pairs) if scaled else pairs
            session.run(tf.global_variables_initializer())
            found.append(session.run(pairs[0][0]).item())
    assert found[0] == 0
    assert found[1] == pytest.approx(1e-8, rel=1e-3)


def test_all_finite_looks_at_every_kind_of_gradient():
    variable = object()
    slices = tf.IndexedSlices
    with tf.Graph().as_default(), tf.Session() as session:
        value = tf.placeholder(tf.float32, [])
        row = tf.stack([[value, 1.0]])
        for gradient in (row, slices(row, tf.constant([3]), tf.constant([9, 2]))):
            finite = precision.all_finite([(None, variable), (gradient, variable)])
            for number in (1.0, np.inf, np.nan):
                assert session.run(finite, {value: number}) == np.isfinite(number)
        assert session.run(precision.all_finite([(None, variable)]))


# --- checkpoints with and without a loss scale ---------------------------------------------------


def save_training(path, scaled):
    """A checkpoint of two variables; with a loss scale that is no longer its first."""
    with tf.Graph().as_default(), tf.Session() as session:
        step, weight = plain_training(scaled)
        session.run(tf.global_variables_initializer())
        step.load(7, session)
        weight.load(0.5, session)
        for variable in tf.get_collection("optional_variables"):
            variable.load(1024, session)
        return tf.train.Saver().save(session, str(path), global_step=7, write_meta_graph=False)


def plain_training(scaled):
    step = tf.get_variable(
        "global_step", [], initializer=tf.zeros_initializer(), trainable=False, use_resource=True
    )
    weight = tf.get_variable("w", [], initializer=tf.ones_initializer(), use_resource=True)
    if scaled:
        precision.LossScale()
    return step, weight


@pytest.mark.parametrize(
    ("saved", "restored", "scale"),
    [(False, True, 2.0**15), (True, False, None), (True, True, 1024.0)],
)
def test_checkpoints_pass_between_trainings_with_and_without_loss_scale(
    tmp_path, saved, restored, scale
):
    path = save_training(tmp_path / "model.ckpt", saved)
    with tf.Graph().as_default(), tf.Session() as session:
        plain_training(restored)
        session.run(tf.global_variables_initializer())
        result = checkpoints.restore_training(session, path)
        values = state_of(session)
    assert result.step == 7
    assert values["w"] == 0.5
    assert values.get("loss_scale") == scale


def test_a_pretrained_model_does_not_bring_its_loss_scale(tmp_path):
    path = save_training(tmp_path / "model.ckpt", scaled=True)
    with tf.Graph().as_default(), tf.Session() as session:
        plain_training(scaled=True)
        session.run(tf.global_variables_initializer())
        report = checkpoints.load_pretrained(session, path)
        values = state_of(session)
    assert report.loaded == ["w"] and report.missing == []
    assert values["loss_scale"] == 2.0**15 and values["w"] == 0.5


# --- gradients on their way ----------------------------------------------------------------------


def tower_gradients(place, compressed):
    """Gradients of three variables from every tower: dense, IndexedSlices, None."""
    rng = np.random.RandomState(0)
    variables = [
        tf.get_variable(name, [20, 3], initializer=tf.zeros_initializer(), use_resource=True)
        for name in "abc"
    ]
    tower_grads = []
    for index in range(place.num_towers):
        with tf.device(place.tower_device(index)):
            dense, values = (  # no constants, which would be cast before the run
                tf.placeholder_with_default(np.float32(rng.randn(rows, 3)), [rows, 3])
                for rows in (20, 4)
            )
            slices = tf.IndexedSlices(values, tf.constant([0, 5, 5, 2]), tf.constant([20, 3]))
            pairs = list(zip([dense, slices, None], variables))
            tower_grads.append(precision.compress(pairs) if compressed else pairs)
    with tf.device(place.host):
        if compressed:
            tower_grads = [precision.decompress(pairs) for pairs in tower_grads]
        average = gradients.average_gradients(tower_grads)
    assert average[2][0] is None
    return [tf.convert_to_tensor(gradient) for gradient, _ in average[:2]]


def test_compressed_gradients_are_the_same_up_to_half_precision():
    place = devices.Devices("CPU", (0, 1))
    with tf.Graph().as_default(), tf.Session(config=place.session_config()) as session:
        with tf.variable_scope(tf.get_variable_scope()):
            full = tower_gradients(place, compressed=False)
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
            half = tower_gradients(place, compressed=True)
        assert {tensor.dtype for tensor in half} == {tf.float32}
        full, half = session.run([full, half])
    for reference, value in zip(full, half):
        difference = np.abs(value - reference).max()
        assert 0 < difference < 5 * 2.0**-11


def test_only_float16_crosses_between_devices():
    place = devices.Devices("CPU", (0, 1))
    metadata = tf.RunMetadata()
    options = tf.RunOptions(output_partition_graphs=True)
    with tf.Graph().as_default(), tf.Session(config=place.session_config()) as session:
        average = tower_gradients(place, compressed=True)
        session.run(average, options=options, run_metadata=metadata)
    sent = [
        node
        for partition in metadata.partition_graphs
        for node in partition.node
        if node.op in ("_Send", "_HostSend") and "CPU:1" in node.attr["send_device"].s.decode()
    ]
    types = [tf.as_dtype(node.attr["T"].type) for node in sent]
    assert types.count(tf.float16) == 2
    assert tf.float32 not in types


def test_range_of_compressed_gradients():
    with tf.Graph().as_default(), tf.Session() as session:
        gradient = tf.constant([65504.0, 65536.0, -1e5, 6e-8, 2e-8, np.nan])
        passed = precision.decompress(precision.compress([(gradient, None)]))[0][0]
        values = session.run(passed)
    np.testing.assert_array_equal(values, [65504, np.inf, -np.inf, 2.0**-24, 0, np.nan])
