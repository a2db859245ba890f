"""Sums over towers: values, gradients, packing, and what is refused."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from utils.towers import collectives, devices

COLLECTIVE = "CollectiveReduce"


def cpus(num_towers):
    return devices.Devices("CPU", tuple(range(num_towers)))


def session(place, threads=2):
    config = place.session_config()
    config.inter_op_parallelism_threads = config.intra_op_parallelism_threads = threads
    return tf.Session(config=config)


def collective_ops():
    return [op for op in tf.get_default_graph().get_operations() if op.type == COLLECTIVE]


def bits(array):
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("num_towers", [1, 2, 3])
def test_sum_and_its_gradient_are_the_ones_on_paper(num_towers, threads):
    """loss_i = (i + 1) * sum(total ** 2), total = sum_j (j + 1) * x_j.

    d(sum of losses) / dx_j = (j + 1) * 2 * total * sum_i (i + 1).
    """
    place = cpus(num_towers)
    weights = np.arange(1, num_towers + 1)
    x = np.float32([[1, -2, 3], [4, 5, -6], [0.5, 7, 8]])[:num_towers]
    with tf.Graph().as_default():
        group = collectives.CollectiveGroup(num_towers)
        totals, grads = [], []
        for i in range(num_towers):
            with tf.device(place.tower_name(i)):
                own = tf.constant(x[i])
                total = group.sum_over_towers(i)(own * weights[i])
                totals.append(total)
            # Not on the tower's device, where the gradient's sum must be all the same.
            grads += tf.gradients(tf.reduce_sum(total**2) * weights[i], own)
        group.check()
        found = [op.device for op in collective_ops()]
        expected = [f"/device:CPU:{i}" for i in range(num_towers) for _ in range(2)]
        assert found == (expected if num_towers > 1 else [])
        with session(place, threads) as sess:
            totals, grads = sess.run([totals, grads])
    expected = (weights[:, None] * x).sum(0)
    for i in range(num_towers):
        np.testing.assert_allclose(totals[i], expected, rtol=1e-6)
        np.testing.assert_allclose(grads[i], weights[i] * 2 * expected * weights.sum(), rtol=1e-6)


def test_gradient_of_the_gradient():
    """y = (x_0 + x_1) ** 3 in both towers: all second derivatives of the sum are 4 * 6 * (x_0 +
    x_1), when each tower differentiates the gradient that it has for all towers.
    """
    place = cpus(2)
    with tf.Graph().as_default():
        group = collectives.CollectiveGroup(2)
        own, first, second = [], [], []
        for i in range(2):
            with tf.device(place.tower_name(i)):
                own.append(tf.constant([1.5 + i]))
                total = group.sum_over_towers(i)(own[i])
                first += tf.gradients(total**3, own[i])
        for i in range(2):
            with tf.device(place.tower_name(i)):
                second += tf.gradients(first[i], own[i])
        group.check()
        with session(place) as sess:
            first, second = sess.run([first, second])
    np.testing.assert_allclose(first, [[2 * 3 * 16.0]] * 2, rtol=1e-6)
    np.testing.assert_allclose(second, [[4 * 6 * 4.0]] * 2, rtol=1e-6)


def test_all_towers_and_all_runs_have_the_same_bits():
    place = cpus(3)
    values = np.random.RandomState(0).randn(3, 100_003).astype(np.float32)
    values *= 10.0 ** np.random.RandomState(1).randint(-4, 5, values.shape)
    with tf.Graph().as_default():
        group = collectives.CollectiveGroup(3)
        feeds = [tf.placeholder(tf.float32, [values.shape[1]]) for _ in range(3)]
        sums = []
        for i in range(3):
            with tf.device(place.tower_name(i)):
                sums.append(group.all_reduce_list(i, [feeds[i]])[0])
        with session(place, 4) as sess:
            found = [sess.run(sums, dict(zip(feeds, values))) for _ in range(10)]
    assert len({bits(array) for run in found for array in run}) == 1
    np.testing.assert_allclose(found[0][0], values.sum(0), rtol=1e-5, atol=1e-2)


def test_lists_are_packed_by_type_and_size(monkeypatch):
    """16 bytes a bucket: float32 [5], [2, 2], [], float16 [3], float32 [3].

    From the last: float32 [3] and [] (16 bytes); float16 [3]; float32 [2, 2]; the large one alone.
    """
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 16)
    place = cpus(2)
    shapes = [[5], [2, 2], [], [3], [3]]
    dtypes = [np.float32, np.float32, np.float32, np.float16, np.float32]
    values = [
        [(np.arange(np.prod(shape, dtype=int)).reshape(shape) + 10 * i).astype(dtype)]
        for i in range(2)
        for shape, dtype in zip(shapes, dtypes)
    ]
    values = [[value for (value,) in values[:5]], [value for (value,) in values[5:]]]
    with tf.Graph().as_default():
        group = collectives.CollectiveGroup(2)
        sums = []
        for i in range(2):
            with tf.device(place.tower_name(i)):
                sums.append(group.all_reduce_list(i, [tf.constant(v) for v in values[i]]))
        group.check()
        ops = collective_ops()
        packed = [(op.inputs[0].dtype, op.inputs[0].shape.as_list()) for op in ops]
        expected = [(tf.float32, [4]), (tf.float16, [3]), (tf.float32, [4]), (tf.float32, [5])]
        assert packed == expected * 2
        keys = [op.get_attr("instance_key") for op in ops]
        assert keys == [1, 2, 3, 4] * 2
        assert [op.device for op in ops] == ["/device:CPU:0"] * 4 + ["/device:CPU:1"] * 4
        for before, after in zip(ops[:3], ops[1:4]):
            assert after.control_inputs == [before]
        with session(place, 1) as sess:
            sums = sess.run(sums)
    for tower in sums:
        for found, one, other in zip(tower, *values):
            assert found.dtype == one.dtype
            np.testing.assert_array_equal(found, one + other)


def test_mean_gradients_handles_slices_and_none():
    place = cpus(2)
    with tf.Graph().as_default():
        variables = [tf.get_variable(name, [3, 2], use_resource=True) for name in "abcd"]
        slices = tf.IndexedSlices(
            values=tf.constant([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]]),
            indices=tf.constant([2, 0, 2]),
            dense_shape=tf.constant([3, 2]),
        )
        full = tf.constant([[2.0, 4.0], [6.0, 8.0], [10.0, 12.0]])
        per_tower = [[full, slices, None, None], [full * 3, slices, full, None]]
        tower_grads = [list(zip(grads, variables)) for grads in per_tower]
        group = collectives.CollectiveGroup(2)
        copies = collectives.mean_gradients(group, place, tower_grads)
        group.check()
        assert [[v for _, v in pairs] == variables for pairs in copies] == [True, True]
        assert [pairs[3][0] for pairs in copies] == [None, None]
        with session(place) as sess:
            found = sess.run([[grad for grad, _ in pairs[:3]] for pairs in copies])
    full = np.float32([[2, 4], [6, 8], [10, 12]])
    dense = np.float32([[3, 4], [0, 0], [11, 22]])
    for tower in found:
        np.testing.assert_array_equal(tower, [full * 2, dense, full / 2])


def test_zeros_have_the_type_of_the_other_towers_gradients():
    place = cpus(2)
    with tf.Graph().as_default():
        variable = tf.get_variable("a", [2], use_resource=True)
        halves = tf.constant([3.0, 5.0], tf.float16)
        group = collectives.CollectiveGroup(2)
        copies = collectives.mean_gradients(
            group, place, [[(None, variable)], [(halves, variable)]]
        )
        group.check()
        with session(place) as sess:
            found = sess.run([pairs[0][0] for pairs in copies])
    np.testing.assert_array_equal(found, np.array([[1.5, 2.5]] * 2, np.float16))


def test_one_member_communicates_nothing():
    with tf.Graph().as_default():
        variable = tf.get_variable("a", [2], use_resource=True)
        group = collectives.CollectiveGroup(1)
        total = group.sum_over_towers(0)(tf.constant([1.0, 2.0]))
        grads = [[(tf.constant([3.0, 4.0]), variable)]]
        copies = collectives.mean_gradients(group, cpus(1), grads)
        group.check()
        assert collective_ops() == []
        with tf.Session() as sess:
            np.testing.assert_array_equal(sess.run([total, copies[0][0][0]]), [[1, 2], [3, 4]])


def test_group_size_counts_the_towers_of_all_workers():
    with tf.Graph().as_default():
        group = collectives.CollectiveGroup(
            2, num_workers=3, group_key=7, timeout_seconds=5, communication_hint="ring"
        )
        group.sum_over_towers(1)(tf.zeros([2]))
        (op,) = collective_ops()
        assert op.get_attr("group_size") == 6
        assert op.get_attr("group_key") == 7
        assert op.get_attr("timeout_seconds") == 5
        assert op.get_attr("communication_hint") == b"ring"


def test_towers_that_differ_are_refused():
    with tf.Graph().as_default():
        group = collectives.CollectiveGroup(2)
        for i in range(2):
            group.sum_over_towers(i)(tf.zeros([2]))
        group.check()
        with tf.name_scope("extra"):
            group.sum_over_towers(1)(tf.zeros([2]))
        with pytest.raises(ValueError, match="tower 0 built 1 .* tower 1 2, .* first extra/"):
            group.check()
        group.sum_over_towers(0)(tf.zeros([3]))
        with pytest.raises(ValueError, match=r"collective 1 is the sum \(3,\) .* \(2,\)"):
            group.check()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_towers": 0}, "num_towers=0"),
        ({"num_towers": 2, "num_workers": 0}, "num_workers=0"),
        ({"num_towers": 2, "timeout_seconds": -1}, "timeout_seconds=-1 is negative"),
    ],
)
def test_impossible_groups_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        collectives.CollectiveGroup(**arguments)


def test_gradients_of_other_variables_are_refused():
    place = cpus(2)
    with tf.Graph().as_default():
        a = tf.get_variable("a", [2], use_resource=True)
        b = tf.get_variable("b", [3], use_resource=True)
        group = collectives.CollectiveGroup(2)
        with pytest.raises(ValueError, match="tower 1 has gradients of 1 variables .* of 2"):
            collectives.mean_gradients(group, place, [[(None, a), (None, b)], [(None, a)]])
        with pytest.raises(ValueError, match=r"b of tower 1 has shape \(3,\)"):
            collectives.mean_gradients(group, place, [[(None, a)], [(None, b)]])


def test_sizes_that_only_the_run_knows_are_refused():
    with tf.Graph().as_default():
        unknown = tf.placeholder(tf.float32, [None, 2])
        with pytest.raises(ValueError, match="needs known sizes"):
            collectives.CollectiveGroup(2).all_reduce_list(0, [unknown])
