"""Tensors that travel together: the same values, in fewer messages, where they belong."""

import numpy as np
import tensorflow.compat.v1 as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reference_net import logical_cpus, tower_graph
from utils.towers import devices, engine_flags, packing
from utils.towers.cluster import Cluster

HERE, THERE = "/device:CPU:0", "/device:CPU:1"
LARGE = packing.SMALL_BYTES // 4 + 1
SHAPES = st.lists(
    st.one_of(st.just([LARGE]), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=8
)


def session():
    return tf.Session(config=tf.ConfigProto(device_count={"CPU": 2}))


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 2**16), data=st.data())
def test_moved_tensors_have_the_same_bits(shapes, seed, data):
    rng = np.random.RandomState(seed)
    types = [data.draw(st.sampled_from([np.float32, np.float16, np.int64])) for _ in shapes]
    targets = [data.draw(st.sampled_from([HERE, THERE])) for _ in shapes]
    values = [
        np.asarray(100 * rng.randn(*shape)).astype(kind) for shape, kind in zip(shapes, types)
    ]
    with tf.Graph().as_default(), session() as sess:
        with tf.device(HERE):
            tensors = [tf.constant(value) for value in values]
        moved = packing.move(tensors, [HERE] * len(values), targets)
        for tensor, value, found in zip(moved, values, sess.run(moved)):
            assert tensor.shape == value.shape
            np.testing.assert_array_equal(found, value)
            assert found.dtype == value.dtype


def crossings():
    """Tensors that some op takes from another device."""
    return {
        tensor.name
        for op in tf.get_default_graph().get_operations()
        for tensor in op.inputs
        if tensor.op.device != op.device and op.type != "Const"
    }


def test_small_tensors_are_one_on_the_way_and_large_ones_go_alone():
    with tf.Graph().as_default():
        with tf.device(HERE):
            small = [tf.zeros([3]), tf.zeros([2, 2]), tf.zeros([])]
            large, half = tf.zeros([LARGE]), tf.zeros([3], tf.float16)
        moved = packing.move([*small, large, half], [HERE] * 5, [THERE] * 5)
        assert moved[3] is large and moved[4] is half
        assert all(tensor.op.device.endswith("CPU:1") for tensor in moved[:3])
        assert len(crossings()) == 1


def test_packed_gradients_come_out_in_their_order():
    with tf.Graph().as_default(), session() as sess:
        variables = []
        for name, device, shape in (
            ("a", THERE, [2]),
            ("b", HERE, [3]),
            ("large", THERE, [LARGE]),
            ("c", THERE, [2, 2]),
            ("none", THERE, [2]),
            ("d", HERE, []),
        ):
            with tf.device(device):
                variables.append(tf.get_variable(name, shape, use_resource=True))
        grads = [tf.fill(v.shape, float(i)) for i, v in enumerate(variables)]
        slices = tf.IndexedSlices(tf.zeros([1]), tf.constant([0]), tf.constant([2]))
        pairs = [*zip(grads, variables), (slices, variables[0])]
        pairs[4] = None, variables[4]
        packed = packing.PackedGradients(pairs, HERE)
        assert len(packed.pairs) == 5  # a and c, b and d, large, none, slices
        doubled = [
            (2 * grad if isinstance(grad, tf.Tensor) else grad, target)
            for grad, target in packed.pairs
        ]
        found = packed.unpack(doubled)
        assert [variable for _, variable in found] == [variable for _, variable in pairs]
        assert found[4][0] is None and found[6][0] is slices
        for i in (0, 1, 2, 3, 5):
            np.testing.assert_array_equal(sess.run(found[i][0]), np.full(variables[i].shape, 2 * i))
        names = [target.name for grad, target in packed.pairs if grad is not None]
        assert len(set(names)) == len(names)


def messages(task, **options):
    """{(from, to): bytes} of tensors that cross between jobs in the graph of a worker."""
    cluster = Cluster(("p:1",), ("a:1", "b:2"), "worker", task)
    options = cluster.options(engine_flags.EngineOptions(**options))
    place = options.place_variables(cluster.devices(logical_cpus(2)))
    engine = tower_graph(place, options=options, cluster=cluster).engine
    found, pending, seen = {}, [engine.train_op], set()
    while pending:
        op = pending.pop()
        if op in seen:
            continue
        seen.add(op)
        pending += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
        to = tf.DeviceSpec.from_string(op.device).job
        for tensor in op.inputs:
            origin = tf.DeviceSpec.from_string(tensor.op.device).job
            if to and origin and origin != to and tensor.dtype != tf.resource:
                size = tensor.shape.num_elements() * tensor.dtype.size
                found.setdefault((origin, to), {})[tensor.name] = size
    return {route: sorted(sizes.values()) for route, sizes in found.items()}, engine


def test_a_step_exchanges_the_weights_in_one_message_each_way():
    """Two towers: the weights come once for both. The chief sends its statistics besides."""
    weights = 93440
    found, _ = messages(1)
    assert found["ps", "worker"] == [weights]
    assert [size for size in found["worker", "ps"] if size > 8] == [weights]
    found, _ = messages(0)
    statistics = 10 * 2 * 16 * 4
    assert [size for size in found["worker", "ps"] if size > 8] == [statistics, weights]
    found, _ = messages(1, async_updates=True)
    assert [size for size in found["worker", "ps"] if size > 8] == [statistics, weights]
    found, _ = messages(1, compress_gradients="float16")
    assert [size for size in found["worker", "ps"] if size > 8] == [weights // 2]


def test_one_process_packs_nothing():
    place = devices.Devices("CPU", (0, 1))
    graph = tower_graph(place, options=engine_flags.DEFAULTS).graph
    assert not [op.name for op in graph.get_operations() if "pack" in op.name]
