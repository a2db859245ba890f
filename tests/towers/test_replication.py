"""Copies of the variables on every tower: equal to one copy, equal to each other, in their places.

The net has convolutions with batch norm and default scope names, a dense layer with biases, and L2
regularization.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from nets import layers
from utils.towers import (
    checkpoints,
    collectives,
    context,
    devices,
    gradients,
    layer_options,
    replication,
    train_op,
)

STEPS = 10
OPTIMIZERS = {
    "adam": lambda: tf.train.AdamOptimizer(0.01),
    "momentum": lambda: tf.train.MomentumOptimizer(0.05, 0.9),
}


def network(images):
    normalization = {
        "normalizer_fn": layers.batch_norm,
        "normalizer_params": {"decay": 0.9, "scale": True},
    }
    with layers.arg_scope(
        [layers.conv2d, layers.fully_connected],
        weights_regularizer=layers.l2_regularizer(0.01),
    ):
        net = layers.conv2d(images, 4, 3, **normalization)
        net = layers.conv2d(net, 5, 3, stride=2, **normalization)
        return layers.fully_connected(tf.reduce_mean(net, [1, 2]), 3, activation_fn=None)


def tower_loss(images, labels, reuse_variables):
    """(loss with regularization, loss without)."""
    with tf.variable_scope(tf.get_variable_scope(), reuse=reuse_variables):
        predictions = network(images)
    loss = tf.reduce_mean(tf.square(predictions - labels))
    regularization = tf.add_n(tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES))
    return loss + regularization, loss


class Training:
    """A training graph in one of the two modes, on the current graph."""

    def __init__(self, place, optimizer="adam", replicated=False, sync_bn=False):
        self.place = dataclasses.replace(place, variables="own" if replicated else "host")
        self.images = tf.placeholder(tf.float32, [None, 8, 8, 3], "images")
        self.labels = tf.placeholder(tf.float32, [None, 3], "labels")
        num_towers = place.num_towers
        with tf.device(place.host):
            self.step = tf.get_variable(
                "global_step",
                [],
                initializer=tf.zeros_initializer(),
                trainable=False,
                use_resource=True,
            )
            images, labels = tf.split(self.images, num_towers), tf.split(self.labels, num_towers)
        make_optimizer = OPTIMIZERS[optimizer]
        self.towers, self.tower_grads, self.losses = [], [], []
        if replicated:
            optimizers = [make_optimizer() for _ in range(num_towers)]
            self._replicate(optimizers, images, labels, sync_bn)
        else:
            self._share(make_optimizer(), images, labels)
        averages = tf.train.ExponentialMovingAverage(0.9, self.step)
        with tf.device(self.place.variable_device(0)):
            self.train_op = train_op.build_train_op(
                self.optimizer,
                self.grads,
                self.step,
                self.towers,
                averages,
                "first" if sync_bn else "in_order",
            )
        self.synchronize = self.optimizer.synchronize_op() if replicated else tf.no_op()
        self.initialize = tf.global_variables_initializer()
        self.saver = None

    def _share(self, opt, images, labels):
        for i in range(self.place.num_towers):
            with context.tower_context(self.place, i) as tower:
                total, loss = tower_loss(images[i], labels[i], i > 0 or None)
                self.tower_grads.append(opt.compute_gradients(loss))
            self.towers.append(tower)
            self.losses.append(total)
        with tf.device(self.place.host):
            self.grads = gradients.add_regularization(
                gradients.average_gradients(self.tower_grads),
                tf.add_n(self.towers[0].regularization_losses),
            )
        self.optimizer = opt

    def _replicate(self, optimizers, images, labels, sync_bn):
        self.optimizer = replicas = replication.Replicas(self.place, optimizers)
        group = collectives.CollectiveGroup(self.place.num_towers)
        for i in range(self.place.num_towers):
            options = layer_options.LayerOptions(
                sum_over_towers=group.sum_over_towers(i) if sync_bn else None
            )
            with (
                layer_options.scope(options),
                replicas.tower_variables(i),
                context.tower_context(self.place, i) as tower,
            ):
                total, loss = tower_loss(images[i], labels[i], i > 0 or None)
                self.tower_grads.append(replicas.compute_gradients(i, loss))
            self.towers.append(tower)
            self.losses.append(total)
        means = collectives.mean_gradients(group, self.place, self.tower_grads)
        group.check()
        self.grads = []
        for i, (tower, grads) in enumerate(zip(self.towers, means)):
            with tf.device(self.place.tower_name(i)):
                regularization = tf.add_n(tower.regularization_losses)
                self.grads.append(gradients.add_regularization(grads, regularization))

    def feed(self, step):
        random = np.random.RandomState(step)
        return {self.images: random.randn(12, 8, 8, 3), self.labels: random.randn(12, 3)}

    def session(self):
        return tf.Session(config=self.place.session_config())

    def run_steps(self, session, first=0, steps=STEPS):
        for step in range(first, first + steps):
            session.run(self.train_op, self.feed(step))


def values_of(session):
    return {v.op.name: value for v, value in with_values(session, tf.global_variables())}


def with_values(session, variables):
    return list(zip(variables, session.run(variables)))


def cpus(num_towers):
    return devices.Devices("CPU", tuple(range(num_towers)))


def trained(num_towers, optimizer, replicated, sync_bn=False):
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        training = Training(cpus(num_towers), optimizer, replicated, sync_bn)
        tf.get_default_graph().finalize()
        with training.session() as session:
            session.run(training.initialize)
            session.run(training.synchronize)
            training.run_steps(session)
            losses = session.run(training.losses, training.feed(STEPS))
            return values_of(session), losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_towers", [1, 2, 3])
def test_equals_one_copy_after_ten_steps(num_towers, optimizer):
    expected, expected_losses = trained(num_towers, optimizer, replicated=False)
    found, losses = trained(num_towers, optimizer, replicated=True)
    assert list(found) == list(expected)
    slots = {"adam": "Adam_1", "momentum": "Momentum"}[optimizer]
    assert f"Conv_1/weights/{slots}" in found
    assert np.ptp(expected["Conv/weights/ExponentialMovingAverage"]) > 0
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)


@pytest.mark.parametrize("num_towers", [2, 3])
def test_with_common_batch_statistics_equals_one_tower_of_the_whole_batch(num_towers):
    expected, (expected_loss,) = trained(1, "momentum", replicated=False)
    found, losses = trained(num_towers, "momentum", replicated=True, sync_bn=True)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(np.mean(losses), expected_loss, rtol=1e-5)


@pytest.mark.parametrize("optimizer, slots_each", [("adam", 2), ("momentum", 1)])
def test_copies_stay_equal_bit_by_bit(optimizer, slots_each):
    with tf.Graph().as_default():
        training = Training(cpus(3), optimizer, replicated=True)
        pairs = training.optimizer.pairs()
        trainable = tf.trainable_variables()
        powers = 2 if optimizer == "adam" else 0
        assert len(pairs) == 2 * (len(trainable) * (1 + slots_each) + powers)
        copies = [copy for _, copy in pairs]
        collection = tf.get_collection(replication.REPLICA_VARIABLES)
        assert sorted(v.name for v in collection) == sorted(v.name for v in copies)
        with training.session() as session:
            session.run(training.initialize)
            session.run(training.synchronize)
            training.run_steps(session)
            for original, copy in pairs:
                assert copy.op.name.startswith(("replica_1/", "replica_2/"))
                assert copy.op.name.split("/", 1)[1] == original.op.name
                assert copy.shape == original.shape
                one, other = session.run([original, copy])
                assert one.tobytes() == other.tobytes()


def test_copies_are_in_no_other_collection():
    with tf.Graph().as_default() as graph:
        Training(cpus(2), replicated=True)
        others = set(graph.collections) - {replication.REPLICA_VARIABLES, "variable_scope"}
        others = {key for key in others if isinstance(key, str)}
        assert {tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES} < others
        for key in others:
            for item in graph.get_collection(key):
                if isinstance(item, tf.Variable):
                    assert not item.op.name.startswith("replica_"), key


def test_saved_variables_are_those_of_one_copy():
    lists = []
    for num_towers, replicated in [(1, False), (2, False), (2, True), (3, True)]:
        with tf.Graph().as_default():
            Training(cpus(num_towers), replicated=replicated)
            lists.append([(v.op.name, v.shape, v.dtype) for v in tf.global_variables()])
    assert lists[0] == lists[1] == lists[2] == lists[3]


@pytest.mark.parametrize(
    "before, after",
    [((2, True), (3, False)), ((3, False), (2, True)), ((2, True), (3, True))],
)
def test_checkpoints_pass_between_modes_and_numbers_of_towers(tmp_path, before, after):
    half = STEPS // 2
    with tf.Graph().as_default():
        training = Training(cpus(before[0]), replicated=before[1])
        saver = checkpoints.CheckpointSaver(str(tmp_path))
        with training.session() as session:
            session.run(training.initialize)
            session.run(training.synchronize)
            training.run_steps(session, steps=half)
            saver.save(session, half)
            saved = values_of(session)
    with tf.Graph().as_default():
        training = Training(cpus(after[0]), replicated=after[1])
        with training.session() as session:
            session.run(training.initialize)
            checkpoints.restore_training(session, str(tmp_path))
            session.run(training.synchronize)
            restored = values_of(session)
            if after[1]:
                for original, copy in training.optimizer.pairs():
                    np.testing.assert_array_equal(*session.run([original, copy]))
            training.run_steps(session, half, 1)
            moved = values_of(session)
    assert list(restored) == list(saved)
    for name, value in saved.items():
        np.testing.assert_array_equal(restored[name], value)
    assert moved["global_step"] == half + 1
    assert not np.array_equal(moved["Conv/weights"], saved["Conv/weights"])


def test_going_on_from_a_checkpoint_of_one_copy_equals_going_on_with_one_copy(tmp_path):
    results = []
    for replicated in (False, True):
        with tf.Graph().as_default():
            tf.set_random_seed(3)
            training = Training(cpus(2), replicated=replicated)
            with training.session() as session:
                session.run(training.initialize)
                if not replicated:
                    saver = checkpoints.CheckpointSaver(str(tmp_path))
                    training.run_steps(session, steps=3)
                    saver.save(session, 3)
                else:
                    checkpoints.restore_training(session, str(tmp_path))
                session.run(training.synchronize)
                training.run_steps(session, first=3)
                results.append(values_of(session))
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["GPU", "CPU"])
def test_everything_of_a_tower_is_on_its_device(kind):
    place = devices.Devices(kind, (0, 1))
    with tf.Graph().as_default() as graph:
        training = Training(place, replicated=True)
        of_tower = [f"/device:{kind}:{i}" for i in range(2)]

        def tower_of(name):
            return int(name.startswith(("replica_1/", "model_1/", "all_reduce_1/")))

        variables = [*tf.global_variables(), *tf.get_collection(replication.REPLICA_VARIABLES)]
        handles = [op for op in graph.get_operations() if op.type == "VarHandleOp"]
        assert len(handles) == len(variables)
        for variable in variables:
            name = variable.op.name
            if name == "global_step":
                assert variable.device == "/device:CPU:0"
            else:
                assert variable.device == of_tower[tower_of(name)], name

        by_type = {}
        for op in graph.get_operations():
            by_type.setdefault(op.type, []).append(op)
        convolutions = ["Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput"]
        for kind_of_op, number in [
            *((name, None) for name in convolutions),
            ("FusedBatchNormV3", 4),
            ("FusedBatchNormGradV3", 4),
            ("MatMul", None),
            ("CollectiveReduce", 2),
        ]:
            assert len(by_type[kind_of_op]) == number or number is None
            for op in by_type[kind_of_op]:
                assert op.device == of_tower[tower_of(op.name)], op.name
        updates = by_type["ResourceApplyAdam"]
        assert len(updates) == 2 * len(tf.trainable_variables())
        for op in updates:
            assert device_of(op) == device_of(op.inputs[0].op)
            reduced = [i.op for i in op.inputs if i.op.type != "VarHandleOp"]
            assert {device_of(i) for i in reduced} <= {device_of(op), "/device:CPU:0"}
        for op in by_type["ReadVariableOp"] + by_type["AssignVariableOp"]:
            assert device_of(op) == device_of(op.inputs[0].op), op.name
        for pairs, name in zip(training.tower_grads, of_tower):
            for grad, variable in pairs:
                assert grad.device == name
                assert variable.device == name


def device_of(op):
    """Device of an op; one that reads a variable may leave it to the variable."""
    return op.device or device_of(op.inputs[0].op)


def test_no_weight_crosses_devices_in_a_training_step():
    """A tower's ops read no variable that is trained and not its own."""
    with tf.Graph().as_default() as graph:
        training = Training(devices.Devices("GPU", (0, 1)), replicated=True)
        trainable = {v.op.name for v in tf.trainable_variables()}
        tower_ops = [op for op in graph.get_operations() if op.name.startswith("model_1/")]
        handles = {i.op.name for op in tower_ops for i in op.inputs if i.dtype == tf.resource}
        own = {v.op.name for v in training.optimizer.variables(1)}
        assert own <= handles
        assert not handles & trainable


def test_regularization_losses_are_the_towers_own():
    with tf.Graph().as_default():
        training = Training(cpus(2), replicated=True)
        per_tower = [tower.regularization_losses for tower in training.towers]
        assert tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES) == per_tower[0]
        assert [len(losses) for losses in per_tower] == [3, 3]
        for tower, losses in enumerate(per_tower):
            variables = training.optimizer.variables(tower)
            weights = [v for v in variables if v.op.name.endswith("weights")]
            found = tf.gradients(tf.add_n(losses), variables)
            assert [g is not None for g in found] == [v in weights for v in variables]
        # A second look at the tower, as by an evaluation.
        with (
            training.optimizer.tower_variables(1),
            context.tower_context(training.place, 1) as tower,
        ):
            tower_loss(training.images, training.labels, True)
        assert tower.regularization_losses == per_tower[1]
        assert tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES) == per_tower[0]


def test_a_second_look_makes_no_second_copy():
    with tf.Graph().as_default() as graph:
        training = Training(cpus(2), replicated=True)
        copies = graph.get_collection(replication.REPLICA_VARIABLES)
        for i in range(2):
            with training.optimizer.tower_variables(i):
                with context.tower_context(training.place, i):
                    tower_loss(training.images, training.labels, True)
        assert graph.get_collection(replication.REPLICA_VARIABLES) == copies


def scalar(name, trainable=True):
    return tf.get_variable(name, [], trainable=trainable, use_resource=True)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_new_variable_in_a_later_tower_is_refused(trainable):
    place = dataclasses.replace(cpus(2), variables="own")
    replicas = replication.Replicas(place, [OPTIMIZERS["adam"]() for _ in range(2)])
    with tf.Graph().as_default():
        with replicas.tower_variables(0), context.tower_context(place, 0):
            scalar("a")
        with (
            pytest.raises(ValueError, match="tower 1 made 1 new variable.*, first b"),
            replicas.tower_variables(1),
            context.tower_context(place, 1),
        ):
            scalar("b", trainable)


def test_a_tower_that_forgets_a_variable_is_refused():
    place = dataclasses.replace(cpus(2), variables="own")
    replicas = replication.Replicas(place, [OPTIMIZERS["adam"]() for _ in range(2)])
    with tf.Graph().as_default():
        with replicas.tower_variables(0), context.tower_context(place, 0):
            scalar("a"), scalar("b")
        with replicas.tower_variables(1), context.tower_context(place, 1):
            with tf.variable_scope(tf.get_variable_scope(), reuse=True):
                loss = scalar("b") * 2.0
            with pytest.raises(ValueError, match="tower 1 did not use 1 variable.*, first a"):
                replicas.compute_gradients(1, loss)


def test_variables_that_are_not_trained_have_no_copies():
    place = dataclasses.replace(cpus(2), variables="own")
    replicas = replication.Replicas(place, [OPTIMIZERS["adam"]() for _ in range(2)])
    with tf.Graph().as_default():
        with replicas.tower_variables(0), context.tower_context(place, 0):
            statistic = scalar("statistic", trainable=False)
        with replicas.tower_variables(1), context.tower_context(place, 1):
            with tf.variable_scope(tf.get_variable_scope(), reuse=True):
                assert scalar("statistic", trainable=False) is statistic


def test_devices_that_keep_one_copy_are_refused():
    with pytest.raises(ValueError, match="variables=host leaves no place for copies"):
        replication.Replicas(cpus(2), [None, None])
    place = dataclasses.replace(cpus(2), variables="own")
    with pytest.raises(ValueError, match="1 optimizer.s. for 2 towers"):
        replication.Replicas(place, [None])
