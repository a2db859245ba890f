"""That the figures compare what they say, and count what they say."""

import socket

import numpy as np
import pytest

from benchmarks import cluster_figures, process_figures, reference_net, strategy_figures
from benchmarks.reference_net import logical_cpus, make_step, plain_graph, tower_graph
from benchmarks.tower_figures import REPLICATED, SYNC_BN


def losses_of(training, steps=4):
    step = make_step(training)
    index = 1 if training.engine or len(training.fetches) > 1 else 0
    return [step()[index] for _ in range(steps)]


def test_the_strategy_makes_the_steps_of_towers():
    expected = losses_of(tower_graph(logical_cpus(2)))
    np.testing.assert_allclose(
        losses_of(strategy_figures.strategy_graph(logical_cpus(2))), expected, rtol=1e-5
    )
    assert expected[0] > expected[-1]


@pytest.mark.parametrize("options", [REPLICATED, SYNC_BN])
def test_the_reference_net_follows_the_engines_options(options):
    expected = losses_of(tower_graph(logical_cpus(2)) if options is REPLICATED else plain_graph())
    found = losses_of(tower_graph(logical_cpus(2), options=options))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_difference_of_one_variable_is_found(monkeypatch):
    monkeypatch.setattr(strategy_figures, "STEPS", 2)
    equal, wrong = (
        strategy_figures._equality("name", {"normalized": normalized}, options, logical_cpus, (2,))
        for normalized, options in ((False, SYNC_BN), (True, reference_net.engine_flags.DEFAULTS))
    )
    assert equal[0].record()["pass"]
    # Each tower normalises over its own half of the batch.
    assert not wrong[0].record()["pass"] and wrong[0].value > 1e-5


def test_memory_is_that_after_the_steps(monkeypatch):
    # The thread pools of the test process are there already.
    monkeypatch.setattr(process_figures, "one_thread", reference_net.all_threads)
    found = process_figures._resident_after(2, (1, 3))
    assert len(found) == 2 and 100 < found[0] < 10000


def test_bytes_of_this_process_are_counted_in_both_directions():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with socket.create_connection(listening.getsockname()) as here:
            there, _ = listening.accept()
            with there:
                before = cluster_figures.bytes_of_connections()
                here.sendall(bytes(30000))
                received = 0
                while received < 30000:
                    received += len(there.recv(65536))
                there.sendall(bytes(500))
                assert len(here.recv(500)) == 500
                after = cluster_figures.bytes_of_connections()
    # Both ends are in this process.
    assert [b - a for a, b in zip(before, after)] == [30500, 30500]
