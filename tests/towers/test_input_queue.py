"""Queued inputs: the same training as with fed ones, bounded memory, clean ends, true waiting."""

import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from data import data_util, modelnet
from tests.cloud_files import write_h5_set
from utils.towers import (
    context,
    devices,
    engine_flags,
    feeding,
    gradients,
    input_queue,
    input_sources,
    loop,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
POINTS, BATCH, TOWERS = 8, 4, 2
SPECS = [
    ("points", tf.float32, [None, POINTS, 3]),
    ("labels", tf.int32, [None]),
]
# (mode, whether it is staged)
MODES = [("feed", None), ("queue", False), ("queue", True)]
QUEUES = [False, True]
PLACE = devices.Devices("CPU", tuple(range(TOWERS)))


class Net:
    """Two towers of a linear classifier with Adam, built as in train_multi_gpu.py."""

    def __init__(self, mode, staged, capacity=2):
        with tf.device(PLACE.host):
            self.inputs = input_queue.training_inputs(mode, PLACE, SPECS, capacity, staged)
            slices, weights = self.inputs.split(feeding.split_evenly)
            opt = tf.train.AdamOptimizer(0.01)
        tower_grads, losses = [], []
        for i in range(TOWERS):
            with context.tower_context(PLACE, i):
                loss = self.loss(*slices[i], reuse=i > 0) * weights[i]
                tower_grads.append(opt.compute_gradients(loss))
            losses.append(loss)
        eval_losses = []
        for i in range(TOWERS):
            with context.tower_context(PLACE, i):
                loss = self.loss(*self.inputs.fed_slices[i], reuse=True)
                eval_losses.append(loss * self.inputs.fed_weights[i])
        with tf.device(PLACE.host):
            self.train_op = opt.apply_gradients(gradients.average_gradients(tower_grads))
            self.loss_sum = gradients.add_in_order(losses)
            self.eval_loss_sum = gradients.add_in_order(eval_losses)
            self.labels = self.inputs.whole(1)
        self.variables = tf.global_variables()

    @staticmethod
    def loss(points, labels, reuse):
        with tf.variable_scope(tf.get_variable_scope(), reuse=reuse):
            weights = tf.get_variable("weights", [3 * POINTS, 40], use_resource=True)
        logits = tf.matmul(tf.reshape(points, [-1, 3 * POINTS]), weights)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=labels)
        return tf.reduce_mean(loss)


def session_of(net):
    session = tf.Session(config=PLACE.session_config())
    session.run(tf.variables_initializer(net.variables))
    return session


def arrays_of(batch):
    return [batch["points"], batch["labels"]]


def without_points(batch):
    return {**batch, "points": None}


def source_of(net, session, next_batch, stop_readers=lambda: None, **functions):
    functions = {"arrays": arrays_of, "keep": without_points, **functions}
    return input_sources.make_source(
        net.inputs, session, next_batch, stop_readers=stop_readers, **functions
    )


def make_batch(number, count=BATCH):
    rng = np.random.RandomState(number)
    points = rng.standard_normal([count, POINTS, 3]).astype(np.float32)
    labels = np.full(count, number, np.int32)
    return {"points": points, "labels": labels, "names": [f"{number}"] * count, "last": False}


def counted(stop_after=None, error=None):
    """next_batch that gives batch 0, 1, ..., then raises; the state is the number of batches."""
    numbers = iter(range(10**6))

    def next_batch():
        number = next(numbers)
        if number == stop_after:
            raise error
        return make_batch(number), number + 1

    return next_batch


@pytest.fixture
def clouds(tmp_path):
    """Readers and SharedBatches over 12 clouds an epoch, in batches of 4, 3, and 4 + 1 joined."""
    list_path = write_h5_set(tmp_path, [7, 5], points=POINTS)
    make_dataset = functools.partial(
        modelnet.make_dataset,
        "train",
        data_path=str(list_path.parents[1]),
        num_point=POINTS,
        batch_size=BATCH,
    )

    def make(states=None):
        readers = modelnet.make_readers(
            make_dataset, seed=3, augment=True, num_readers=2, states=states
        )
        return readers, modelnet.SharedBatches(readers, smallest=TOWERS)

    return make


def train(net, session, clouds, num_steps, states=None, evaluate=False):
    """Trains; returns what every step saw, and the readers' state after the last step."""
    readers, batches = clouds(states)
    history = []
    with readers, source_of(net, session, batches.get, readers.stop) as source:
        for step in range(num_steps):
            feed, batch, state = source.get()
            loss, labels, _ = session.run([net.loss_sum, net.labels, net.train_op], feed)
            np.testing.assert_array_equal(labels, batch["labels"])
            history.append((loss, batch["names"], batch["last"], state["batches"]))
            if evaluate and batch["last"]:
                eval_batch = make_batch(step, count=3)
                session.run(net.eval_loss_sum, net.inputs.feed(arrays_of(eval_batch)))
    return history, state


def trained(mode, staged, clouds, parts, evaluate=False):
    """Trains in parts, each with new readers that go on from the state of the part before."""
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        net = Net(mode, staged)
        history, state = [], None
        with session_of(net) as session:
            for num_steps in parts:
                more, state = train(net, session, clouds, num_steps, state, evaluate)
                history += more
            return history, session.run(net.variables)


@pytest.mark.parametrize("mode, staged", MODES)
def test_training_is_the_same_bit_by_bit_also_stopped_and_restored(mode, staged, clouds):
    expected, expected_variables = trained("feed", None, clouds, [11])
    assert {len(names) for _, names, _, _ in expected} == {3, 4, 5}
    assert sum(last for _, _, last, _ in expected) > 2
    # The evaluation after each epoch changes nothing, whatever waits in the queue.
    for parts, evaluate in [([11], True), ([2, 1, 8], False)]:
        history, variables = trained(mode, staged, clouds, parts, evaluate)
        assert history == expected
        for value, other in zip(variables, expected_variables, strict=True):
            np.testing.assert_array_equal(value, other)


def test_fed_inputs_are_plain_placeholders():
    with tf.Graph().as_default() as plain, tf.device(PLACE.host):
        points = tf.placeholder(tf.float32, [None, POINTS, 3], "points")
        labels = tf.placeholder(tf.int32, [None])
        tf.split(points, 2)
        tf.split(labels, 2)
    with tf.Graph().as_default() as fed, tf.device(PLACE.host):
        specs = [SPECS[0], (None, tf.int32, [None], tf.uint8)]
        input_queue.training_inputs("feed", PLACE, specs).split(feeding.split_equally)
    assert fed.as_graph_def() == plain.as_graph_def()


def test_specs_of_placeholders_have_their_names():
    def placeholders():
        return tf.placeholder(tf.float32, [None, 2]), tf.placeholder(tf.int32, [None], "labels")

    specs = input_queue.specs_of(placeholders)
    with tf.Graph().as_default() as graph:
        input_queue.training_inputs("feed", PLACE, specs)
        made = graph.as_graph_def()
    with tf.Graph().as_default() as graph:
        placeholders()
    assert made == graph.as_graph_def()


@pytest.mark.parametrize("staged", QUEUES)
def test_what_is_fed_is_used_and_the_queue_left_alone(staged):
    fed = [make_batch(30 + number, count) for number, count in enumerate((4, 3, 5))]
    results = {}
    for mode in ("feed", "queue"):
        with tf.Graph().as_default():
            tf.set_random_seed(1)
            net = Net(mode, staged)
            with session_of(net) as session:
                if mode == "queue":
                    for number in range(2):
                        net.inputs.enqueue(session, arrays_of(make_batch(number)))
                    if staged:
                        net.inputs.stage(session)
                values = []
                for batch in fed:
                    feed = net.inputs.feed(arrays_of(batch))
                    values.append(session.run(net.eval_loss_sum, feed))
                    fetches = [net.loss_sum, net.labels, net.train_op]
                    values += session.run(fetches, feed)[:2]
                if mode == "queue":
                    assert net.inputs.queued(session) == 2 - staged
                    for number in range(2):  # both batches are still there, in their order
                        if staged and number:
                            net.inputs.stage(session)
                        assert session.run(net.labels)[0] == number
                results[mode] = values
    for value, other in zip(results["feed"], results["queue"], strict=True):
        np.testing.assert_array_equal(value, other)


def test_queue_is_on_the_host_staging_areas_and_casts_on_the_towers():
    specs = [("images", tf.float32, [None, 2, 2, 3], tf.uint8), SPECS[1]]
    with tf.Graph().as_default() as graph:
        with tf.device(PLACE.host):
            inputs = input_queue.training_inputs("queue", PLACE, specs, staged=True)
            inputs.split(feeding.split_evenly)
        types = {}
        for op in graph.get_operations():
            types.setdefault(op.type, set()).add(tf.DeviceSpec.from_string(op.device).device_index)
        images = {op.inputs[0].dtype for op in graph.get_operations() if op.type == "Stage"}
    for name in ("FIFOQueueV2", "QueueEnqueueV2", "QueueDequeueV2", "SplitV"):
        assert types[name] == {0}
    for name in ("Stage", "Unstage", "StageClear"):
        assert types[name] == {0, 1}
    casts = [
        op for op in graph.get_operations() if op.type == "Cast" and op.inputs[0].dtype == tf.uint8
    ]
    assert {tf.DeviceSpec.from_string(op.device).device_index for op in casts} == {0, 1}
    assert images == {tf.uint8}


def test_staging_is_for_gpus_unless_asked_for():
    for kind, staged in [("CPU", False), ("GPU", True)]:
        with tf.Graph().as_default():
            place = devices.Devices(kind, (0,))
            assert input_queue.training_inputs("queue", place, SPECS).staged == staged


@pytest.mark.parametrize("capacity", [1, 3])
@pytest.mark.parametrize("staged", QUEUES)
def test_no_more_batches_wait_than_allowed(staged, capacity):
    asked = threading.Semaphore(0)
    numbers = iter(range(100))

    def next_batch():
        asked.release()
        return make_batch(next(numbers)), None

    with tf.Graph().as_default():
        net = Net("queue", staged, capacity)
        with session_of(net) as session, source_of(net, session, next_batch) as source:
            for _ in range(capacity + staged):
                assert asked.acquire(timeout=60)
            for step in range(5):
                assert not asked.acquire(timeout=0.2)  # the queue is full, so no batch is asked for
                assert net.inputs.queued(session) <= capacity
                _, batch, _ = source.get()
                assert batch["labels"][0] == step
                assert asked.acquire(timeout=60)
                assert session.run([net.labels, net.train_op])[0][0] == step


@pytest.mark.parametrize("mode, staged", MODES)
def test_an_error_of_the_readers_comes_after_the_batches_before_it(mode, staged):
    error = data_util.ReaderError("reader 1 failed")
    with tf.Graph().as_default():
        net = Net(mode, staged)
        with (
            session_of(net) as session,
            source_of(net, session, counted(3, error)) as source,
        ):
            for number in range(3):
                feed, batch, state = source.get()
                assert (batch["labels"][0], state) == (number, number + 1)
                session.run(net.train_op, feed)
            with pytest.raises(data_util.ReaderError, match="reader 1 failed"):
                source.get()
            if mode == "queue":
                with pytest.raises(data_util.ReaderError, match="reader 1 failed"):
                    source.get()


@pytest.mark.parametrize("staged", QUEUES)
def test_an_error_of_the_session_is_raised(staged):
    def split_off(batch):
        return [batch["points"][:, :-1], batch["labels"]]

    with tf.Graph().as_default():
        net = Net("queue", staged)
        with (
            session_of(net) as session,
            source_of(net, session, counted(), arrays=split_off) as source,
            pytest.raises(ValueError, match="Cannot feed value of shape"),
        ):
            source.get()


def test_a_staged_batch_that_cannot_be_split_is_raised():
    def too_few(batch):
        return [batch["points"][:1], batch["labels"]]

    with tf.Graph().as_default():
        net = Net("queue", True)
        with (
            session_of(net) as session,
            source_of(net, session, counted(), arrays=too_few) as source,
            pytest.raises(tf.errors.InvalidArgumentError),
        ):
            source.get()


@pytest.mark.parametrize("staged", QUEUES)
@pytest.mark.parametrize("waiting_for", ["room", "readers"])
def test_stop_ends_the_threads_wherever_they_wait(staged, waiting_for):
    free = {"room": 2 + staged, "readers": 1}[waiting_for]
    asked, stopped = threading.Event(), threading.Event()
    numbers = iter(range(100))

    def next_batch():
        number = next(numbers)
        if number == free - (waiting_for == "room"):
            asked.set()
        if waiting_for == "readers" and number == free:
            stopped.wait()
            raise data_util.EndOfData("the readers were stopped")
        return make_batch(number), None

    before = set(threading.enumerate())
    with tf.Graph().as_default():
        net = Net("queue", staged)
        with session_of(net) as session:
            with source_of(net, session, next_batch, stopped.set) as source:
                assert len(set(threading.enumerate()) - before) == 1 + staged
                assert asked.wait(60)
            assert stopped.is_set()
            assert set(threading.enumerate()) <= before
            with pytest.raises(RuntimeError, match="not running"):
                source.get()
            with pytest.raises(RuntimeError, match="twice"):
                source.start()


@pytest.mark.parametrize("staged", QUEUES)
def test_a_new_source_drops_what_an_earlier_one_left(staged):
    with tf.Graph().as_default():
        net = Net("queue", staged)
        with session_of(net) as session:
            for number in range(3):
                net.inputs.enqueue(session, arrays_of(make_batch(30 + number)))
            if staged:
                net.inputs.stage(session)
            with source_of(net, session, counted()) as source:
                source.get()
                assert session.run([net.labels, net.train_op])[0][0] == 0


SCRIPT = """
    import sys, time
    import tensorflow.compat.v1 as tf
    from tests.towers import test_input_queue as t
    from utils.towers import loop

    def next_batch(next_number=iter(range(9))):
        number = next(next_number)
        if number == 3:
            print("waiting", flush=True)
            stopped.wait()
            raise RuntimeError("the readers were stopped")
        return t.make_batch(number), number + 1

    stopped = t.threading.Event()

    def train(stop):
        step = 0
        with tf.Graph().as_default():
            net = t.Net("queue", sys.argv[1] == "True")
            with t.session_of(net) as session:
                stop.defer()
                with t.source_of(net, session, next_batch, stopped.set) as source:
                    while not stop.requested:
                        try:
                            with stop.interruptible():
                                feed, _, state = source.get()
                        except loop.StopRequested:
                            break
                        session.run(net.train_op, feed)
                        step += 1
                print("stopped after", step, state, t.threading.active_count(), flush=True)

    loop.run_script(train, ())
"""


@pytest.mark.parametrize("staged", QUEUES)
def test_ctrl_c_ends_the_wait_for_a_batch(staged):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(staged)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.stdout.readline().strip() != "waiting":
        assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err
    # All threads but the main one and the one that reads signals have ended. The signal may come
    # before the batches that were ready have been trained on; the state is that of the last one.
    words = out.split()
    assert words[:2] == ["stopped", "after"] and words[2] == words[3] and words[4] == "2"


@pytest.mark.parametrize("mode, staged", MODES)
def test_the_share_of_waiting_is_that_of_the_injected_stalls(mode, staged, monkeypatch):
    """Readers stall for 3 s of each step of 12 s, by a clock that only stalls and steps move."""
    now, looks = [100.0], [0]
    asked = threading.Semaphore(0)

    class Clock:
        @staticmethod
        def monotonic():
            looks[0] += 1
            if looks[0] % 2:  # get() begins; its second look at the clock is its end
                asked.release()
            return now[0]

    monkeypatch.setattr(input_sources, "time", Clock)
    monkeypatch.setattr(loop.time, "time", lambda: now[0])
    make = counted()

    def next_batch():
        asked.acquire()
        now[0] += 3.0
        return make()

    with tf.Graph().as_default():
        net = Net(mode, staged)
        with session_of(net) as session:
            source = source_of(net, session, next_batch, functools.partial(asked.release, 9))
            source.start()
            progress = loop.Progress(examples_per_step=BATCH)
            for step in range(4):
                feed, _, _ = source.get()
                session.run(net.train_op, feed)
                now[0] += 9.0
                progress.step(source.wait_seconds() if step % 2 else 0.0)  # of two steps at once
            line = progress.line(0, 0, 0)
            monkeypatch.undo()
            source.stop()
    assert "12.00 seconds/step" in line and line.endswith(" 25% waiting for input")


def test_pictures_travel_as_bytes_only_where_that_changes_nothing():
    specs = [("images", tf.float32, [None, 1], tf.uint8)]
    place = devices.Devices("CPU", (0,))
    with tf.Graph().as_default():
        inputs = input_queue.training_inputs("queue", place, specs)
        (slices,), _ = inputs.split(feeding.split_equally)
        assert slices[0].dtype == tf.float32
        values = np.arange(256, dtype=np.float32)[:, None]
        with tf.Session() as session:
            for given in (values, list(values), values.astype(np.uint8), values.astype(np.int64)):
                inputs.enqueue(session, [given])
                np.testing.assert_array_equal(session.run(slices[0]), values)
                fed = session.run(slices[0], inputs.feed([given]))
                np.testing.assert_array_equal(fed, values)
            for wrong in (0.5, -1.0, 256.0, np.nan, np.inf):
                for use in (functools.partial(inputs.enqueue, session), inputs.feed):
                    with pytest.raises(
                        input_queue.InputError, match=f"images holds {wrong}.*not a number of uint8"
                    ):
                        use([np.array([[1.0], [wrong]], np.float32)])
            assert inputs.queued(session) == 0


def test_values_become_what_a_placeholder_makes_of_them():
    with tf.Graph().as_default(), tf.Session() as session:
        plain = input_queue.training_inputs("feed", PLACE, SPECS)
        queued = input_queue.training_inputs("queue", PLACE, SPECS)
        points = np.random.RandomState(0).standard_normal([2, POINTS, 3])  # float64
        arrays = [points, np.array([1, 2], np.uint8)]
        expected = session.run(plain.tensors, plain.feed(arrays))
        queued.enqueue(session, arrays)
        for value, other in zip(session.run(queued.tensors), expected, strict=True):
            assert value.dtype == other.dtype
            np.testing.assert_array_equal(value, other)


def test_the_queue_is_bounded_in_bytes_and_says_so():
    specs = [("images", tf.float32, [None, None, 3], tf.uint8), SPECS[1]]
    size = input_queue.batch_bytes(specs, [[10, 1000, 3], [10]])
    assert size == 10 * 1000 * 3 + 10 * 4
    options = engine_flags.EngineOptions(input="queue", input_queue_size=5)
    assert input_queue.queue_capacity(options, size) == 5
    bounded = dataclasses.replace(options, input_queue_megabytes=1)
    assert input_queue.queue_capacity(bounded, 300_000) == 3
    assert input_queue.queue_capacity(bounded, size) == 5
    with pytest.raises(
        ValueError, match="megabytes=1 is too little for one batch of 1.2 MB; pass 2"
    ):
        input_queue.queue_capacity(bounded, 1_200_000)
    with pytest.raises(ValueError, match="queue_size=5 may take 10.0 MB, and this machine has 9.0"):
        input_queue.queue_capacity(options, 2 * 10**6, memory=9 * 10**6)
    with tf.Graph().as_default():
        lines = [
            input_queue.training_inputs(mode, PLACE, specs, 3, staged).describe(2 * 10**6)
            for mode, staged in MODES
        ]
    bound = "input queue: at most 3 batch(es) of 2.0 MB, 6.0 MB in all, in host memory"
    assert lines == [
        "input: each batch of 2.0 MB is fed with its step",
        bound,
        bound + " and 1 more on the towers' devices",
    ]


def test_arguments_out_of_range_are_refused():
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match="'queues' is unknown; pass one of feed, queue"):
            input_queue.training_inputs("queues", PLACE, SPECS)
        with pytest.raises(ValueError, match="capacity is 0"):
            input_queue.training_inputs("queue", PLACE, SPECS, 0)
