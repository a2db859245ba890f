"""Descriptions of clusters, names of devices in them, and the watch over hosts; no session."""

import json
import socket

import pytest
import tensorflow.compat.v1 as tf

from utils.towers import checkpoints, cluster_hosts, cluster_ps, context, devices, engine_flags
from utils.towers.cluster import Cluster, ClusterError, cluster_from

WORKERS = ("a:1", "b:2")
FLAGS = {"ps_hosts": ("p:1",), "worker_hosts": WORKERS, "job_name": "worker", "task_index": 1}


def tf_config(cluster, job="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def test_nothing_given_is_no_cluster():
    assert cluster_from(None, (), (), "", 0) is None
    assert cluster_from("", [], [], "", 0) is None


def test_flags_and_tf_config_say_the_same():
    expected = Cluster(("p:1",), WORKERS, "worker", 1)
    text = tf_config({"ps": ["p:1"], "worker": list(WORKERS)}, "worker", 1)
    assert cluster_from(None, **FLAGS) == expected
    assert cluster_from(text) == expected
    assert cluster_from(text, **FLAGS) == expected
    assert expected.address == "b:2" and expected.num_workers == 2
    assert expected.describe("ps", 0) == "ps 0 at p:1"
    assert expected.definition() == {"ps": ["p:1"], "worker": ["a:1", "b:2"]}
    assert not expected.is_chief and not expected.is_parameter_server


@pytest.mark.parametrize(
    "cluster, job, index, task, is_chief",
    [
        ({"worker": ["a:1", "b:2"]}, "worker", 0, 0, True),
        ({"worker": ["a:1", "b:2"]}, "worker", "1", 1, False),
        ({"chief": ["a:1"], "worker": ["b:2"]}, "chief", 0, 0, True),
        ({"chief": ["a:1"], "worker": ["b:2"]}, "worker", 0, 1, False),
        ({"master": ["a:1"], "worker": ["b:2"], "ps": ["c:3"]}, "worker", 0, 1, False),
        ({"chief": ["a:1"], "worker": ["b:2"], "ps": ["c:3"]}, "ps", 0, 0, False),
    ],
)
def test_worker_0_or_the_job_chief_is_the_chief(cluster, job, index, task, is_chief):
    found = cluster_from(tf_config(cluster, job, index))
    assert found.worker_hosts == WORKERS
    assert (found.task, found.is_chief) == (task, is_chief)
    assert found.is_parameter_server == (job == "ps")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "TF_CONFIG is not JSON"),
        ("[]", "TF_CONFIG has no cluster"),
        ('{"cluster": {}}', "TF_CONFIG has no cluster"),
        ('{"cluster": {"worker": ["a:1"]}}', "does not say which task this is"),
        (tf_config({"worker": "a:1"}), 'must be a list of "host:port"'),
        (tf_config({"worker": ["a:1"], "evaluator": ["b:1"]}), "job evaluator, which has no part"),
        (tf_config({"worker": ["a:1"]}, "ps"), "task is of type ps, and the cluster has only wor"),
        (tf_config({"worker": ["a:1"]}, index=1), "task index 1 is none of the 1 tasks of job wo"),
        (tf_config({"worker": ["a:1"]}, index=-1), "task index -1 is none"),
        (tf_config({"worker": ["a:1"]}, index=True), "task index true is none"),
        (tf_config({"ps": ["a:1"]}, "ps"), "parameter servers and no worker"),
        (tf_config({"worker": ["a:1", "a:1"]}), "a:1, which TF_CONFIG's job worker has too"),
        (tf_config({"worker": ["a:1"]}, ["worker"]), "task is of type \\['worker'\\], and the cl"),
        (tf_config({"worker": ["http://a:1"]}), "'http://a:1', which is no host:port"),
        (tf_config({"worker": ["localhost:1", "127.0.0.1:1"]}), "127.0.0.1:1, which TF_CONFIG's"),
        (tf_config({"worker": ["a:1"], "ps": ["a:1"]}), "a:1, which TF_CONFIG's job ps has too"),
        (tf_config({"worker": ["a"]}), "'a', which is no host:port"),
        (tf_config({"worker": ["a:0"]}), "'a:0', which is no host:port"),
        (tf_config({"worker": ["a:x"]}), "'a:x', which is no host:port"),
        (tf_config({"worker": [":1"]}), "':1', which is no host:port"),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "has 2 chiefs"),
    ],
)
def test_mistakes_in_tf_config_are_one_sentence(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        cluster_from(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"worker_hosts": ()}, "--ps_hosts needs workers; pass --worker_hosts"),
        ({"worker_hosts": (), "ps_hosts": ()}, "--job_name needs workers"),
        ({"job_name": ""}, "nothing says what this process is in the cluster; pass --job_name"),
        ({"job_name": "chief"}, "--job_name=chief is no job"),
        ({"task_index": 2}, "--task_index=2 is none of the 2 tasks of job worker; pass 0 to 1"),
        ({"job_name": "ps"}, "--task_index=1 is none of the 1 tasks of job ps"),
        ({"job_name": "ps", "ps_hosts": ()}, "job ps, and --ps_hosts is empty"),
        ({"ps_hosts": ("b:2",)}, "--worker_hosts has b:2, which --ps_hosts has too"),
        ({"worker_hosts": ("a:1", "b")}, "--worker_hosts has 'b', which is no host:port"),
    ],
)
def test_mistakes_in_the_flags_are_one_sentence(changed, message):
    with pytest.raises(ValueError, match=message):
        cluster_from(None, **{**FLAGS, **changed})


def test_two_descriptions_that_differ_are_refused():
    text = tf_config({"ps": ["p:1"], "worker": list(WORKERS)}, "worker", 0)
    with pytest.raises(ValueError, match="TF_CONFIG and the flags .* describe different"):
        cluster_from(text, **FLAGS)


def test_options_know_the_hosts_of_tf_config():
    cluster = cluster_from(tf_config({"ps": ["p:1"], "worker": list(WORKERS)}, "worker", 1))
    options = cluster.options(engine_flags.EngineOptions(clip_norm=2.0))
    assert options == engine_flags.EngineOptions(clip_norm=2.0, **FLAGS)


# ---------------------------------------------------------------------------------------- devices


def build(place):
    """{name of an op: its device} of two towers with three variables."""
    with tf.Graph().as_default() as graph:
        with tf.device(place.step_device):
            tf.get_variable("step", [], tf.float32, trainable=False, use_resource=True)
        for i in range(2):
            with context.tower_context(place, i):
                with tf.variable_scope("net", reuse=True if i else None):
                    for name, size in (("large", 100), ("small", 10), ("other", 20)):
                        value = tf.get_variable(name, [size], use_resource=True)
                        tf.multiply(value.read_value(), 2.0, name="twice_" + name)
        return {op.name: op.device for op in graph.get_operations()}


def test_devices_of_a_worker_carry_its_task():
    place = Cluster((), WORKERS, "worker", 1).devices(devices.Devices("CPU", (0, 1)))
    found = build(place)
    assert place.host == "/job:worker/task:1/cpu:0"
    assert found["net/large"] == found["step"] == "/job:worker/task:1/device:CPU:0"
    assert found["model_0/net/twice_large"] == "/job:worker/task:1/device:CPU:0"
    assert found["model_1/net/twice_large"] == "/job:worker/task:1/device:CPU:1"
    config = place.session_config()
    assert list(config.device_filters) == ["/job:worker/task:1"]
    assert config.experimental.collective_group_leader == "/job:worker/replica:0/task:0"
    assert config.device_count["CPU"] == 2


@pytest.mark.parametrize("balance, tasks", [("bytes", (0, 1, 1)), ("round_robin", (0, 1, 0))])
def test_variables_are_spread_over_parameter_servers(balance, tasks):
    cluster = Cluster(("p:1", "q:1"), WORKERS, "worker", 1)
    place = cluster.devices(devices.Devices("CPU", (0, 1)), balance=balance)
    found = build(place)
    server = "/job:ps/task:{}/device:CPU:0"
    assert found["step"] == server.format(0)
    for name, task in zip(("large", "small", "other"), tasks):
        assert found[f"net/{name}"] == server.format(task)
    reads = [name for name in found if name.endswith("ReadVariableOp") and "model_1" in name]
    assert len(reads) == 3
    assert sorted(found[name] for name in reads) == sorted(server.format(task) for task in tasks)
    assert found["model_1/net/twice_large"] == "/job:worker/task:1/device:CPU:1"
    assert list(place.session_config().device_filters) == ["/job:worker/task:1", "/job:ps"]


def test_every_worker_places_variables_alike():
    places = [
        Cluster(("p:1", "q:1"), WORKERS, "worker", task).devices(devices.Devices("CPU", (0, 1)))
        for task in range(2)
    ]
    first, second = (
        {name: device for name, device in build(place).items() if "/job:ps" in device}
        for place in places
    )
    assert first == second and first


def test_an_unknown_balance_is_refused():
    with pytest.raises(ValueError, match="balance=random is unknown; use one of bytes, round"):
        devices.ParameterServers(2, "random")


# ------------------------------------------------------------------------------------------ hosts


@pytest.fixture
def listening():
    """A socket that accepts connections, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server, f"127.0.0.1:{server.getsockname()[1]}"


def test_what_listens_has_no_problem_and_what_does_not_is_named(listening):
    server, address = listening
    assert cluster_hosts.problem(address) is None
    server.close()
    assert cluster_hosts.problem(address) == "Connection refused"
    assert cluster_hosts.problem("no-such-host.invalid:1")


def test_a_lost_host_is_a_sentence_with_its_address(listening):
    server, address = listening
    cluster = Cluster((address,), ("127.0.0.1:1", "127.0.0.1:2"), "worker", 0)
    watch = cluster_hosts.HostWatch(cluster, [("ps", 0)], timeout_seconds=0.01)
    watch.wait_until_reachable()
    assert watch.has_servers() and watch.lost() is None
    server.close()
    with pytest.raises(ClusterError) as caught:
        watch.wait_until_reachable()
    assert str(caught.value).startswith(
        f"ps 0 at {address} has not answered for 0.01 seconds (Connection refused); start it"
    )
    assert not watch.has_servers()


def test_spare_workers_may_be_missing(listening):
    _, address = listening
    hosts = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    cluster = Cluster((address,), hosts, "worker", 0)
    needed = [("ps", 0), ("worker", 0), ("worker", 1), ("worker", 2)]
    assert cluster_hosts.HostWatch(cluster, needed, 0.01, spare=2).missing() == []
    one_spare = cluster_hosts.HostWatch(cluster, needed, 0.01, spare=1)
    assert one_spare.missing() == [("worker", 1), ("worker", 2)]
    with pytest.raises(ClusterError, match="worker 1 at 127.0.0.1:2, worker 2 at 127.0.0.1:3 have"):
        one_spare.wait_until_reachable()


def test_what_uses_the_session_is_done_again_after_a_loss():
    """A save that a lost server broke off; any other error, and one while the run ends, goes on."""
    session = object.__new__(cluster_ps.ParameterServerSession)
    session.should_stop = lambda: stopping
    recovered, failures = [], []
    session._recover = recovered.append

    def save():
        if failures:
            cause = failures.pop()
            raise checkpoints.CheckpointError("cannot save") from cause
        return "saved"

    stopping = False
    lost = tf.errors.UnknownError(None, None, "Error received from peer")
    failures = [lost, lost]
    assert session.until_done(save) == "saved"
    assert recovered == [lost, lost]
    failures = [OSError("No space left on device")]
    with pytest.raises(checkpoints.CheckpointError):
        session.until_done(save)
    stopping, failures = True, [lost]
    with pytest.raises(checkpoints.CheckpointError):
        session.until_done(save)
    assert len(recovered) == 2
