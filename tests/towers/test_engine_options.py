"""What the engine flags do to an update, and which of them do not go together."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from absl import flags

from nets import layers
from utils.towers import averages, devices, engine_flags, gradients, schedules
from utils.towers.engine import Engine
from utils.towers.engine_flags import EngineOptions

CPU = devices.Devices("CPU", (0, 1))
DECAY = 0.1


class Training:
    """A regression on towers, with regularized weights and a moving mean of the inputs.

    Args:
        num_towers: number of logical CPUs.
        **options: of EngineOptions.
    """

    def __init__(self, num_towers, rate=0.1, **options):
        options = EngineOptions(**options)
        place = options.place_variables(devices.Devices("CPU", tuple(range(num_towers))))
        with tf.Graph().as_default():
            self.x = tf.placeholder(tf.float32, [None, 3])
            step = tf.get_variable(
                "step", [], initializer=tf.zeros_initializer(), trainable=False, use_resource=True
            )
            self.engine = engine = Engine(
                place,
                options,
                lambda: tf.train.MomentumOptimizer(rate, 0.9),
                step,
                self.x,
            )
            towers, tower_grads = [], []
            for i, part in enumerate(tf.split(self.x, num_towers)):
                with engine.tower(i) as tower, tf.variable_scope("", reuse=i > 0):
                    y = layers.fully_connected(
                        part,
                        2,
                        scope="fc",
                        weights_initializer=tf.glorot_uniform_initializer(seed=1),
                        weights_regularizer=layers.l2_regularizer(0.1),
                    )
                    mean = tf.get_variable(
                        "mean",
                        [3],
                        initializer=tf.zeros_initializer(),
                        trainable=False,
                        use_resource=True,
                    )
                    averages.add_moving_average_update(mean, tf.reduce_mean(part, 0), 1 - DECAY)
                    loss = tf.reduce_mean(tf.square(tf.cast(y, tf.float32) - 1.0))
                    tower_grads.append(engine.compute_gradients(loss))
                towers.append(tower)
            copies = engine.combine_gradients(
                tower_grads, gradients.average_gradients, towers, add_regularization=True
            )
            engine.build_train_op(copies, towers, bn_updates="all")
            self.variables = tf.global_variables()
            self.summary = tf.summary.merge(engine.summaries) if engine.summaries else None
            self.session = tf.Session(config=place.session_config())
            self.session.run(tf.global_variables_initializer())
            self.session.run(engine.synchronize)
            self.start = self.values()

    def values(self):
        """{name: value} of all variables that a checkpoint has."""
        return self.session.run({v.op.name: v for v in self.variables})

    def update(self, *batches):
        """One update with some batches; returns the values after it."""
        for batch in batches[:-1]:
            self.session.run(self.engine.accumulate_op, {self.x: batch})
        self.session.run(self.engine.train_op, {self.x: batches[-1]})
        return self.values()


def batch(size, seed):
    return np.random.RandomState(seed).normal(size=[size, 3]).astype(np.float32)


@pytest.mark.parametrize("num_towers", [1, 2])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 4, 4), (6, 2, 4)])
def test_accumulated_batches_equal_one_large_batch(num_towers, sizes):
    accumulating = Training(num_towers, accumulate_steps=len(sizes))
    plain = Training(num_towers)
    for number in range(3):
        parts = [batch(size, 10 * number + i) for i, size in enumerate(sizes)]
        found, expected = accumulating.update(*parts), plain.update(np.concatenate(parts))
        assert set(found) == set(expected)
        for name in set(expected) - {"mean"}:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_every_accumulated_batch_counts_for_the_moving_statistics():
    training = Training(2, accumulate_steps=2)
    mean = training.start["mean"]
    for part in (batch(4, 1), batch(4, 2)):
        mean = mean + (part.mean(axis=0) - mean) * DECAY
    assert training.update(batch(4, 1), batch(4, 2))["mean"] == pytest.approx(mean, rel=1e-5)


def test_a_shorter_update_uses_the_batches_it_has():
    found = Training(1, accumulate_steps=3).update(batch(4, 1))
    for name, expected in Training(1).update(batch(4, 1)).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5)


def test_random_streams_differ_between_batches_and_towers():
    training = Training(2, accumulate_steps=3)
    with training.session.graph.as_default():
        streams = [training.engine.random_stream(i) for i in (0, 1)]
    seen = []
    for part in (batch(4, 1), batch(2, 2), batch(4, 3)):
        seen += training.session.run(streams)
        training.session.run(training.engine.accumulate_op, {training.x: part})
    assert len(set(seen)) == 6
    assert [Training(2).engine.random_stream(i) for i in (0, 1)] == [0, 1]


@pytest.mark.parametrize("num_towers", [1, 2])
def test_clipping_by_the_global_norm(num_towers):
    free, clipped = Training(num_towers, rate=1.0), Training(num_towers, rate=1.0, clip_norm=0.5)
    data = batch(4, 0)
    event = tf.Summary.FromString(clipped.session.run(clipped.summary, {clipped.x: data}))
    names = [v.op.name for v in free.variables if v.trainable]
    grads = {}
    after = free.update(data)
    for name in names:
        grads[name] = free.start[name] - after[name]  # the first step of momentum, rate 1
    norm = np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))
    assert norm > 0.5
    assert [(v.tag, v.simple_value) for v in event.value] == [
        ("gradient_norm", pytest.approx(norm, rel=1e-5))
    ]
    after = clipped.update(data)
    for name in names:
        step = clipped.start[name] - after[name]
        np.testing.assert_allclose(step, grads[name] * 0.5 / norm, rtol=1e-4, atol=1e-7)


def test_gradients_below_the_norm_are_not_clipped():
    found, expected = (
        Training(2, clip_norm=1e3).update(batch(4, 0)),
        Training(2).update(batch(4, 0)),
    )
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name])


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 1),
        ({"lr_scaling": "linear"}, 4),
        ({"lr_scaling": "linear", "accumulate_steps": 2}, 8),
        ({"lr_scaling": "linear", "base_batch": 16}, 2.0),
        ({"accumulate_steps": 8}, 1),
    ],
)
def test_factor_of_the_learning_rate(options, factor):
    assert EngineOptions(**options).learning_rate_factor(8, 4) == factor


def test_learning_rate_climbs_to_the_scaled_one():
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.placeholder(tf.float32, [])
        rate = schedules.scale_learning_rate(0.1, step, factor=4, warmup_steps=10)
        rates = [session.run(rate, {step: value}) for value in (0, 5, 10, 1000)]
    assert rates == pytest.approx([0.1, 0.25, 0.4, 0.4])
    assert schedules.scale_learning_rate(0.1, None, factor=1) == 0.1
    assert schedules.scale_learning_rate(0.1, None, factor=3) == pytest.approx(0.3)


@pytest.mark.parametrize("num_towers", [1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.5}, {"accumulate_steps": 2}])
def test_replicated_variables_equal_one_copy(num_towers, more):
    replicated = Training(num_towers, variable_update="replicated", **more)
    one_copy = Training(num_towers, **more)
    for number in range(10):
        parts = [batch(6, 2 * number + i) for i in range(more.get("accumulate_steps", 1))]
        found, expected = replicated.update(*parts), one_copy.update(*parts)
        assert set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("more", [{}, {"variable_update": "replicated"}, {"accumulate_steps": 2}])
def test_float16_skips_what_overflows_and_trains_on(more):
    training, exact = Training(2, compute_dtype="float16", **more), Training(2, **more)
    batches = more.get("accumulate_steps", 1)
    before = training.update(*[batch(4, i) for i in range(batches)])
    for name, value in exact.update(*[batch(4, i) for i in range(batches)]).items():
        np.testing.assert_allclose(before[name], value, rtol=0.02, atol=2e-3)
    feed = {training.x: 6e4 * np.sign(batch(4, 1))}
    for _ in range(batches - 1):
        training.session.run(training.engine.accumulate_op, feed)
    fetches = {"op": training.engine.train_op, **training.engine.watched}
    values = training.session.run(fetches, feed)
    after = training.values()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"step", "loss_scale", "loss_scale_good_steps"}
    assert after["step"] == before["step"] + 1
    assert after["loss_scale"] == before["loss_scale"] / 2
    message = training.engine.overflow_message(values, 7)
    assert message.startswith("Step 000007: ") and "loss scale 32768" in message
    fetched = training.session.run(fetches, {training.x: batch(4, 5)})
    assert training.engine.overflow_message(fetched, 8) is None
    assert not np.array_equal(training.values()["fc/weights"], after["fc/weights"])


@pytest.mark.parametrize("more", [{}, {"variable_update": "replicated"}])
def test_compressed_gradients_are_those_of_half_precision(more):
    found = Training(2, compress_gradients="float16", **more).update(batch(4, 0))
    expected = Training(2, **more).update(batch(4, 0))
    differences = [np.abs(found[name] - value).max() for name, value in expected.items()]
    assert 0 < max(differences) < 1e-3


def test_compiled_towers_compute_the_same():
    found, expected = Training(2, xla=True).update(batch(4, 0)), Training(2).update(batch(4, 0))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("more", [{}, {"variable_update": "replicated"}])
def test_towers_that_compute_activations_again_compute_the_same(more):
    found = Training(2, recompute=True, **more).update(batch(4, 0))
    for name, value in Training(2, **more).update(batch(4, 0)).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7)


# --- flags ---------------------------------------------------------------------------------------

NOT_DEFAULT = {
    "input": "queue",
    "input_queue_size": 5,
    "input_queue_megabytes": 100,
    "variable_update": "replicated",
    "local_parameter_device": "gpu",
    "sync_bn": True,
    "accumulate_steps": 2,
    "clip_norm": 1.0,
    "lr_scaling": "linear",
    "base_batch": 32,
    "warmup_steps": 100,
    "compute_dtype": "float16",
    "compress_gradients": "float16",
    "recompute": True,
    "xla": True,
    "ps_hosts": ("a:1",),
    "async_updates": True,
    "backup_workers": 1,
    "bn_updates": "first",
}
# What a field needs to make sense at all.
NEEDS = {
    "input_queue_size": "input",
    "input_queue_megabytes": "input",
    "base_batch": "lr_scaling",
    "warmup_steps": "lr_scaling",
    "async_updates": "ps_hosts",
    "backup_workers": "ps_hosts",
}
DO_NOT_MIX = {
    frozenset(pair)
    for pair in (
        ("variable_update", "local_parameter_device"),
        ("variable_update", "ps_hosts"),
        ("variable_update", "async_updates"),
        ("variable_update", "backup_workers"),
        ("local_parameter_device", "ps_hosts"),
        ("local_parameter_device", "async_updates"),
        ("local_parameter_device", "backup_workers"),
        ("sync_bn", "ps_hosts"),
        ("sync_bn", "async_updates"),
        ("sync_bn", "backup_workers"),
        ("sync_bn", "xla"),
        ("sync_bn", "bn_updates"),
        ("compute_dtype", "ps_hosts"),
        ("compute_dtype", "async_updates"),
        ("compute_dtype", "backup_workers"),
        ("recompute", "xla"),
        ("async_updates", "backup_workers"),
    )
}


class BnUpdates:
    """Stands for the script's absl flag."""

    def __init__(self, value="last"):
        self.value, self.default = value, "last"


def check(fields, place=None):
    values = {name: NOT_DEFAULT[name] for name in fields if name != "bn_updates"}
    bn_updates = BnUpdates("first" if "bn_updates" in fields else "last")
    place = place or devices.Devices("GPU", (0, 1))
    engine_flags.check(EngineOptions(**values), place, bn_updates)


@pytest.mark.parametrize(
    "pair",
    [frozenset(pair) for pair in itertools.combinations(NOT_DEFAULT, 2)],
    ids=lambda pair: "-".join(sorted(pair)),
)
def test_every_pair_of_flags(pair):
    fields = pair | {NEEDS[name] for name in pair if name in NEEDS}
    if pair in DO_NOT_MIX:
        with pytest.raises(ValueError, match="--") as refused:
            check(fields)
        assert str(refused.value).count(".") == 0
        named = [engine_flags.FLAG_OF.get(name, name) for name in fields]
        assert any(f"--{name}" in str(refused.value) for name in named)
    else:
        check(fields)


@pytest.mark.parametrize("name", NOT_DEFAULT)
def test_every_flag_alone(name):
    if name in NEEDS:
        with pytest.raises(ValueError, match=f"--{engine_flags.FLAG_OF.get(name, name)} .*drop"):
            check({name})
    else:
        check({name})


def test_variables_on_a_gpu_need_one():
    with pytest.raises(ValueError, match="--local_parameter_device=cpu"):
        check({"local_parameter_device"}, CPU)


def test_flags_give_the_options():
    values = flags.FlagValues()
    engine_flags.define(values)
    values(["script"])
    assert engine_flags.options_from_flags(values) == EngineOptions()
    values(
        [
            "script",
            "--async",
            "--ps_hosts=a:1,b:2",
            "--clip_norm=2.5",
            "--variable_update=replicated",
        ]
    )
    assert engine_flags.options_from_flags(values) == dataclasses.replace(
        EngineOptions(),
        async_updates=True,
        ps_hosts=("a:1", "b:2"),
        clip_norm=2.5,
        variable_update="replicated",
    )


def test_workers_without_parameter_servers_must_be_replicated():
    place = devices.Devices("CPU", (0, 1))
    alone = EngineOptions(worker_hosts=("a:1", "b:1"))
    with pytest.raises(ValueError, match="add --variable_update=replicated or --ps_hosts"):
        engine_flags.check(alone, place, BnUpdates())
    engine_flags.check(
        EngineOptions(worker_hosts=("a:1", "b:1"), variable_update="replicated"), place, BnUpdates()
    )


def test_backup_workers_must_leave_one_to_wait_for():
    place = devices.Devices("CPU", (0, 1))
    hosts = {"ps_hosts": ("p:1",), "worker_hosts": ("a:1", "b:1")}
    engine_flags.check(EngineOptions(backup_workers=1, **hosts), place, BnUpdates())
    with pytest.raises(ValueError, match="--backup_workers=2 leaves none of 2 workers"):
        engine_flags.check(EngineOptions(backup_workers=2, **hosts), place, BnUpdates())
