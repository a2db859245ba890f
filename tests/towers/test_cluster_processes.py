"""Clusters of real processes on this machine, each of which trains `cluster_toy`.

A test waits for what the processes print, so that only a hang makes it fail for the time it takes.
"""

import multiprocessing
import os
import pathlib
import signal
import socket
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from benchmarks.measure import free_addresses
from tests.towers import cluster_toy

HANG_SECONDS = 60
ROOT = pathlib.Path(__file__).resolve().parents[2]
FOREVER = 10**6  # steps


@pytest.fixture(scope="module")
def processes():
    """Context that starts processes which need not import TensorFlow again."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), path]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.towers.cluster_toy"])
    yield context
    if path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = path


class Run:
    """The processes of one training."""

    def __init__(self, context, folder, num_ps, num_workers, **settings):
        self._context = context
        self._folder = folder
        addresses = tuple(free_addresses(num_ps + num_workers))
        self.hosts = {"ps": addresses[:num_ps], "worker": addresses[num_ps:]}
        self._settings = {
            "ps_hosts": self.hosts["ps"],
            "worker_hosts": self.hosts["worker"],
            "folder": str(folder / "checkpoints"),
            **settings,
        }
        self._running = {}

    def start(self, *names, **different):
        """Starts processes: 'ps0', 'worker1', ..., if need be with other settings."""
        for name in names:
            task = {"job_name": name[:-1], "task_index": int(name[-1])}
            arguments = {**self._settings, **task, **different}
            self.start_alone(name, arguments)
        return self

    def start_alone(self, name, arguments):
        log = str(self._folder / f"{name}.log")
        process = self._context.Process(target=cluster_toy.child, args=(log, arguments))
        process.start()
        self._running[name] = process

    def output(self, name):
        path = self._folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def count(self, name):
        """Number of steps that a worker has printed, in all its lives."""
        return self.output(name).count("step ")

    def wait_for_steps(self, more, *names):
        """Waits until all of these have made so many more steps."""
        wanted = {name: self.count(name) + more for name in names}
        self.wait_until(
            lambda: all(self.count(name) >= steps for name, steps in wanted.items()), *names
        )

    def wait_until(self, condition, *names):
        """Waits for a condition as long as these processes live."""
        deadline = time.monotonic() + HANG_SECONDS
        while not condition():
            for name in names:
                alive = self._running[name].is_alive()
                assert alive, f"{name} ended: {self.output(name)[-2000:]}"
            assert time.monotonic() < deadline, self.hanging()
            time.sleep(0.05)

    def signal(self, name, number):
        os.kill(self._running[name].pid, number)

    def kill(self, name):
        self._running[name].kill()
        self._running[name].join()

    def exit_codes(self, *names):
        """Waits for the end of processes."""
        deadline = time.monotonic() + HANG_SECONDS
        for name in names:
            self._running[name].join(max(0.0, deadline - time.monotonic()))
            assert self._running[name].exitcode is not None, self.hanging()
        return [self._running[name].exitcode for name in names]

    def hanging(self):
        """What all processes have printed, and where they are."""
        for process in self._running.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        return "\n".join(f"== {name}\n{self.output(name)[-5000:]}" for name in self._running)

    def checkpoint(self):
        """{name: value} of the newest checkpoint."""
        return read_checkpoint(self._folder / "checkpoints")

    def end(self):
        for process in self._running.values():
            process.kill()
            process.join()


def read_checkpoint(folder):
    reader = tf.train.load_checkpoint(str(folder))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


@pytest.fixture
def new_run(processes, tmp_path):
    """Makes a Run; its processes end with the test."""
    runs = []

    def make(num_ps, num_workers, **settings):
        runs.append(Run(processes, tmp_path, num_ps, num_workers, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


@pytest.fixture(scope="module")
def four_towers(processes, tmp_path_factory):
    """Variables after five steps of four towers in one process."""
    folder = tmp_path_factory.mktemp("four_towers")
    log, checkpoints = str(folder / "log"), str(folder / "checkpoints")
    arguments = {"towers": 4, "steps": 5, "folder": checkpoints}
    process = processes.Process(target=cluster_toy.child, args=(log, arguments))
    process.start()
    process.join(HANG_SECONDS)
    assert process.exitcode == 0, pathlib.Path(log).read_text()
    return read_checkpoint(checkpoints)


def assert_equal_but_for_batch_norm(found, expected):
    """The statistics are those of the chief's towers alone."""
    assert set(found) == set(expected)
    for name in set(expected) - {"moving_mean"}:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-5, err_msg=name)
    assert found["global_step"] == 5
    assert np.abs(found["moving_mean"]).max() > 0


def test_two_synchronous_workers_equal_four_towers(new_run, four_towers):
    run = new_run(1, 2, steps=5).start("ps0", "worker0", "worker1")
    assert run.exit_codes("worker0", "worker1", "ps0") == [0, 0, 0]
    assert_equal_but_for_batch_norm(run.checkpoint(), four_towers)
    assert "saved" in run.output("worker0") and "saved" not in run.output("worker1")
    assert run.output("worker0").count("step ") == run.output("worker1").count("step ") == 5


def test_two_workers_with_an_all_reduce_equal_four_towers(new_run, four_towers):
    run = new_run(0, 2, steps=5, variable_update="replicated").start("worker0", "worker1")
    assert run.exit_codes("worker0", "worker1") == [0, 0]
    assert_equal_but_for_batch_norm(run.checkpoint(), four_towers)
    assert "\nsaved" not in run.output("worker1")


def test_variables_on_two_servers_equal_four_towers(new_run, four_towers):
    run = new_run(2, 2, steps=5).start("ps0", "ps1", "worker0", "worker1")
    assert run.exit_codes("worker0", "worker1", "ps0", "ps1") == [0] * 4
    assert_equal_but_for_batch_norm(run.checkpoint(), four_towers)


def test_asynchronous_workers_count_their_steps_together(new_run):
    run = new_run(1, 2, steps=300, async_updates=True).start("ps0", "worker0", "worker1")
    assert run.exit_codes("worker0", "worker1", "ps0") == [0, 0, 0]
    steps = run.count("worker0") + run.count("worker1")
    # The last steps of both may overlap, so that one goes past the end.
    assert 300 <= steps <= 301
    assert 300 <= run.checkpoint()["global_step"] <= 301


def test_a_worker_that_ends_before_all_are_there_ends_the_run(new_run):
    run = new_run(1, 2, steps=FOREVER).start("ps0", "worker1")
    run.wait_until(lambda: "waiting for worker 0" in run.output("worker1"), "worker1")
    run.signal("worker1", signal.SIGTERM)
    assert run.exit_codes("worker1") == [128 + signal.SIGTERM]
    run.start("worker0")
    assert run.exit_codes("worker0", "ps0") == [0, 0]
    assert f"worker 1 at {run.hosts['worker'][1]} ends the run" in run.output("worker0")


def test_an_asynchronous_chief_does_not_wait_for_the_others(new_run):
    run = new_run(1, 2, steps=FOREVER, async_updates=True).start("ps0", "worker0")
    run.wait_for_steps(20, "worker0")
    run.start("worker1")
    run.wait_for_steps(20, "worker0", "worker1")
    run.signal("worker0", signal.SIGTERM)
    assert run.exit_codes("worker0", "worker1", "ps0") == [128 + signal.SIGTERM, 0, 0]


def test_a_killed_worker_rejoins_and_a_signal_to_it_ends_the_run(new_run):
    run = new_run(1, 2, steps=FOREVER).start("ps0", "worker0", "worker1")
    run.wait_for_steps(20, "worker0", "worker1")
    run.kill("worker1")
    steps = run.count("worker0")
    time.sleep(1)
    assert run.count("worker0") <= steps + 1  # it hands nothing in for the other
    run.start("worker1")
    run.wait_for_steps(20, "worker0", "worker1")
    assert "lost" not in run.output("worker0")
    run.signal("worker1", signal.SIGTERM)
    codes = run.exit_codes("worker0", "worker1", "ps0")
    assert codes == [0, 128 + signal.SIGTERM, 0]
    last = int(run.output("worker0").rpartition("ended ")[2])
    assert run.checkpoint()["global_step"] == last


@pytest.mark.parametrize("victim", ["worker0", "ps0"])
def test_a_killed_chief_or_server_continues_from_the_checkpoint(new_run, victim):
    run = new_run(1, 2, steps=FOREVER, save_every=10).start("ps0", "worker0", "worker1")
    run.wait_for_steps(25, "worker0", "worker1")
    run.kill(victim)
    saved = int(run.checkpoint()["global_step"])
    run.start(victim)
    run.wait_for_steps(20, "worker0", "worker1")
    assert f"restored {saved}" in run.output("worker0")
    run.signal("worker0", signal.SIGINT)
    codes = run.exit_codes("worker0", "worker1", "ps0")
    assert codes == [128 + signal.SIGINT, 0, 0]


def test_a_server_lost_while_the_chief_fills_it_is_filled_again(new_run, tmp_path):
    run = new_run(1, 2, steps=5, gate=str(tmp_path / "gate")).start("ps0", "worker0", "worker1")
    run.wait_until(lambda: "initialising" in run.output("worker0"), "worker0", "worker1")
    run.kill("ps0")
    run.start("ps0")
    (tmp_path / "gate").touch()
    assert run.exit_codes("worker0", "worker1", "ps0") == [0, 0, 0]
    assert run.output("worker0").count("initialising") > 1
    assert run.checkpoint()["global_step"] == 5


def test_a_signal_ends_workers_with_an_all_reduce_at_the_same_step(new_run):
    run = new_run(0, 2, steps=FOREVER, variable_update="replicated").start("worker0", "worker1")
    run.wait_for_steps(20, "worker0", "worker1")
    run.signal("worker1", signal.SIGTERM)
    assert run.exit_codes("worker0", "worker1") == [0, 128 + signal.SIGTERM]
    ends = [int(run.output(name).rpartition("ended ")[2]) for name in ("worker0", "worker1")]
    assert ends[0] == ends[1] == run.checkpoint()["global_step"]


def test_a_signal_while_the_chief_begins_ends_workers_with_an_all_reduce(new_run, tmp_path):
    run = new_run(0, 2, steps=FOREVER, variable_update="replicated", gate=str(tmp_path / "gate"))
    run.start("worker0", "worker1")
    run.wait_until(lambda: "initialising" in run.output("worker0"), "worker0", "worker1")
    run.signal("worker1", signal.SIGTERM)
    run.wait_until(lambda: "SIGTERM" in run.output("worker1"), "worker1")
    (tmp_path / "gate").touch()
    assert run.exit_codes("worker0", "worker1") == [0, 128 + signal.SIGTERM]


def test_a_chief_lost_while_it_begins_ends_workers_with_an_all_reduce(new_run, tmp_path):
    gate = str(tmp_path / "gate")
    run = new_run(0, 2, steps=5, variable_update="replicated", gate=gate, timeout=2)
    run.start("worker0", "worker1")
    run.wait_until(lambda: "initialising" in run.output("worker0"), "worker0", "worker1")
    run.kill("worker0")
    assert run.exit_codes("worker1") == [1]
    assert f"worker 0 at {run.hosts['worker'][0]}" in run.output("worker1").rpartition("error: ")[2]


def test_workers_with_an_all_reduce_that_cannot_meet_are_told(new_run):
    run = new_run(0, 2, steps=5, variable_update="replicated", timeout=2).start("worker0")
    first, second = run.hosts["worker"]
    run.start("worker1", worker_hosts=(second, first), task_index=0)
    assert run.exit_codes("worker0", "worker1") == [1, 1]
    for name, other in (("worker0", second), ("worker1", first)):
        error = run.output(name).rpartition("error: ")[2]
        assert error.startswith(f"not all of worker 1 at {other} take part")


def test_a_lost_worker_of_an_all_reduce_ends_the_others_with_its_address(new_run):
    run = new_run(0, 2, steps=FOREVER, variable_update="replicated", timeout=2)
    run.start("worker0", "worker1")
    run.wait_for_steps(20, "worker0", "worker1")
    run.kill("worker1")
    assert run.exit_codes("worker0") == [1]
    error = run.output("worker0").rpartition("error: ")[2]
    assert error.startswith(f"worker 1 at {run.hosts['worker'][1]} ")
    assert error.rstrip().endswith("start all with --restore")
    assert "\nsaved" not in run.output("worker0")


def test_a_worker_that_stays_away_ends_the_run_after_a_save(new_run):
    run = new_run(1, 2, steps=FOREVER, timeout=2).start("ps0", "worker0", "worker1")
    run.wait_for_steps(20, "worker0", "worker1")
    run.kill("worker1")
    assert run.exit_codes("worker0", "ps0") == [1, 0]
    error = run.output("worker0").rpartition("error: ")[2]
    assert error.startswith(f"worker 1 at {run.hosts['worker'][1]} has not answered for 2 seconds")
    saved = int(run.output("worker0").rpartition("model.ckpt-")[2].split()[0])
    assert run.checkpoint()["global_step"] == saved >= 20


def test_hosts_that_cannot_be_reached_are_named(new_run):
    run = new_run(1, 2, steps=5, timeout=2).start("worker0")
    assert run.exit_codes("worker0") == [1]
    error = run.output("worker0").rpartition("error: ")[2]
    ps = run.hosts["ps"][0]
    assert error.startswith(f"ps 0 at {ps} has not answered for 2 seconds (Connection refused)")
    assert len(error.splitlines()) == 1


def test_a_worker_that_does_not_come_is_named(new_run):
    run = new_run(1, 2, steps=5, timeout=2).start("ps0", "worker0")
    assert run.exit_codes("worker0", "ps0") == [1, 0]
    error = run.output("worker0").rpartition("error: ")[2]
    assert error.startswith(f"worker 1 at {run.hosts['worker'][1]} has not answered for 2 seconds")


def test_something_else_on_a_servers_port_is_no_server(new_run):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        run = new_run(1, 1, steps=5, timeout=2, ps_hosts=(address,)).start("worker0")
        assert run.exit_codes("worker0") == [1]
    error = run.output("worker0").rpartition("error: ")[2]
    assert f"not all of ps 0 at {address} answer as parameter servers" in error


def test_a_server_with_another_cluster_is_named(new_run):
    run = new_run(1, 2, steps=5)
    ps, workers = run.hosts["ps"], run.hosts["worker"]
    other = {"ps_hosts": ps, "worker_hosts": (workers[0],), "job_name": "ps"}
    run.start_alone("ps0", other)
    run.start("worker0", "worker1")
    assert run.exit_codes("worker0") == [1]
    error = run.output("worker0").rpartition("error: ")[2]
    assert error.startswith(f"ps 0 at {ps[0]} belongs to ")
    assert "give all processes the same hosts" in error


def test_workers_with_different_settings_are_refused(new_run):
    run = new_run(1, 2, steps=5).start("ps0", "worker0").start("worker1", towers=3)
    assert run.exit_codes("worker0", "worker1", "ps0") == [0, 1, 0]  # ended by worker 1
    first, second = run.hosts["worker"]
    sentence = (
        f"error: worker 1 at {second} has towers 3, and worker 0 at {first} has 2; give all"
        " workers the same flags and data\n"
    )
    assert sentence in run.output("worker1")
    assert run.count("worker0") == 0


def test_workers_of_an_all_reduce_with_different_settings_are_refused(new_run):
    run = new_run(0, 2, steps=5, variable_update="replicated")
    run.start("worker0").start("worker1", towers=3)
    assert run.exit_codes("worker0", "worker1") == [1, 1]
    first, second = run.hosts["worker"]
    assert f"worker 1 at {second} has towers 3, and worker 0 at {first}" in run.output("worker1")


def test_a_port_in_use_is_a_sentence(new_run):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        run = new_run(1, 1, steps=5, worker_hosts=(address,)).start("worker0")
        assert run.exit_codes("worker0") == [1]
    assert f"error: worker 0 at {address} cannot listen on its port" in run.output("worker0")


def test_backup_workers_are_not_waited_for(new_run):
    run = new_run(1, 3, steps=FOREVER, towers=1, backup_workers=1)
    run.start("ps0", "worker0", "worker1", "worker2")
    run.wait_for_steps(10, "worker0", "worker1", "worker2")
    run.kill("worker2")
    run.wait_for_steps(20, "worker0", "worker1")
    run.signal("worker1", signal.SIGTERM)
    assert run.exit_codes("worker0", "worker1") == [0, 128 + signal.SIGTERM]
