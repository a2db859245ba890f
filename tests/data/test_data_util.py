"""Readers: order, bounds, continuation, failures, signals, and what is left behind."""

import functools
import gc
import os
import pathlib
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest
from absl import logging

from data import data_util
from data.data_util import EndOfData, GeneratorEnqueuer, ReaderError
from tests.data import reader_generators as generators

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 60  # seconds after which something that must happen is taken not to
both_kinds = pytest.mark.parametrize("reader", ["thread", "process"])


def enqueuer(make_generator, **keywords):
    return GeneratorEnqueuer(make_generator, **{"num_readers": 1, "max_queue_size": 4, **keywords})


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def stays(value, seconds=0.5):
    """The value of a function after it has had time to change."""
    time.sleep(seconds)
    return value()


def assert_equal_batches(left, right):
    np.testing.assert_array_equal(left[0][0], right[0][0])
    np.testing.assert_array_equal(left[0][1], right[0][1])
    assert left[1] == right[1]
    np.testing.assert_array_equal(left[2]["map"], right[2]["map"])
    assert left[2]["none"].shape == right[2]["none"].shape == (0, 4, 2)
    assert left[3] == right[3]


# Order and bounds.


@both_kinds
@pytest.mark.parametrize("num_readers, max_queue_size", [(1, 1), (2, 1), (3, 2), (3, 7)])
def test_batches_come_in_turn(reader, num_readers, max_queue_size):
    with enqueuer(
        generators.numbered, reader=reader, num_readers=num_readers, max_queue_size=max_queue_size
    ) as readers:
        got = [readers.get() for _ in range(20)]
    assert got == [(j % num_readers, j // num_readers) for j in range(20)]


@both_kinds
def test_readers_of_unequal_length_end_in_order(reader):
    make_generator = functools.partial(generators.numbered, lengths=[3, 0, 1, 2])
    with enqueuer(make_generator, reader=reader, num_readers=4) as readers:
        assert list(readers) == [(0, 0), (2, 0), (3, 0), (0, 1), (3, 1), (0, 2)]
        with pytest.raises(EndOfData, match="all 4 generators"):
            readers.get()


@both_kinds
@pytest.mark.parametrize("num_readers, max_queue_size, bound", [(2, 5, 5), (3, 1, 3), (2, 2, 2)])
def test_no_more_batches_than_the_bound_are_made_ahead(
    reader, num_readers, max_queue_size, bound, tmp_path
):
    make_generator = functools.partial(generators.counting_files, folder=str(tmp_path))

    def made():
        return len(os.listdir(tmp_path))

    with enqueuer(
        make_generator, reader=reader, num_readers=num_readers, max_queue_size=max_queue_size
    ) as readers:
        wait_until(lambda: made() >= bound)
        assert stays(made) == bound
        for _ in range(num_readers):
            readers.get()
        wait_until(lambda: made() >= bound + num_readers)
        assert stays(made) == bound + num_readers


def test_a_thread_keeps_no_batch_that_was_handed_out():
    alive = weakref.WeakSet()
    allowed = threading.Semaphore(3)

    class Batch:
        pass

    def make_generator(unused_index):
        while allowed.acquire():
            batch = Batch()
            alive.add(batch)
            yield batch
            del batch

    with enqueuer(make_generator, max_queue_size=1) as readers:
        for _ in range(3):
            readers.get()
        gc.collect()
        wait_until(lambda: len(alive) == 0)
        allowed.release(2)


def test_arrays_of_a_process_are_whole_writable_and_not_overwritten():
    make_generator = functools.partial(generators.RandomBatches, size=20, grow=150)
    reference = generators.RandomBatches(0, size=20, grow=150)
    with enqueuer(make_generator, reader="process", max_queue_size=2) as readers:
        got = [readers.get() for _ in range(9)]  # sizes go up and down: slots grow and are reused
    for batch in got:
        assert_equal_batches(batch, next(reference))
        batch[0][0] += 1
    assert got[0][0][0].dtype == np.float32


def test_a_process_needs_no_array_in_its_batches():
    with enqueuer(generators.numbered, reader="process") as readers:
        assert readers.get() == (0, 0)


# Continuation.


@both_kinds
@pytest.mark.parametrize("num_readers, taken", [(1, 0), (1, 4), (2, 1), (2, 5), (3, 0), (3, 7)])
def test_states_continue_exactly(reader, num_readers, taken, tmp_path):
    make_generator = functools.partial(generators.RandomBatches, seed=5)
    options = dict(num_readers=num_readers, max_queue_size=5, reader=reader)
    with enqueuer(make_generator, **options) as readers:
        whole = [readers.get() for _ in range(taken + 7)]
    with enqueuer(make_generator, **options) as readers:
        for batch in whole[:taken]:
            assert_equal_batches(readers.get(), batch)
        path = tmp_path / "reader_state.npz"
        data_util.save_reader_state(path, readers.get_state())
    with enqueuer(make_generator, **options, states=data_util.load_reader_state(path)) as continued:
        for batch in whole[taken:]:
            assert_equal_batches(continued.get(), batch)
        assert sum(continued.get_state()["batches"]) == taken + 7


def test_a_state_passes_from_threads_to_processes():
    make_generator = functools.partial(generators.RandomBatches, seed=9)
    with enqueuer(make_generator, num_readers=2) as threads:
        for _ in range(3):
            threads.get()
        with enqueuer(
            make_generator, num_readers=2, reader="process", states=threads.get_state()
        ) as processes:
            for _ in range(4):
                assert_equal_batches(processes.get(), threads.get())


def test_an_older_state_stays_what_it_was():
    with enqueuer(functools.partial(generators.RandomBatches, seed=9), num_readers=2) as readers:
        readers.get()
        state = readers.get_state()
        following = [readers.get() for _ in range(3)]
    with enqueuer(
        functools.partial(generators.RandomBatches, seed=9), num_readers=2, states=state
    ) as readers:
        for batch in following:
            assert_equal_batches(readers.get(), batch)


@both_kinds
def test_ended_readers_stay_ended(reader):
    make_generator = functools.partial(generators.numbered, lengths=[0, 0])
    with enqueuer(make_generator, num_readers=2, reader=reader) as readers:
        assert list(readers) == []
    with enqueuer(make_generator, num_readers=2, states=readers.get_state()) as again:
        assert list(again) == []


def test_readers_have_seeds_of_their_own_and_repeat():
    runs = []
    for _ in range(2):
        with enqueuer(generators.RandomBatches, num_readers=3, reader="process") as readers:
            runs.append([readers.get()[0][0] for _ in range(3)])
    np.testing.assert_array_equal(runs[0], runs[1])
    assert len({image.tobytes() for image in runs[0]}) == 3


def test_states_that_do_not_fit_are_refused():
    with enqueuer(generators.numbered, num_readers=2) as readers:
        readers.get()
    with pytest.raises(ValueError, match="num_readers is 3 but the reader state is of 2"):
        enqueuer(generators.numbered, num_readers=3, states=readers.get_state())
    with pytest.raises(
        ValueError, match="reader 0 is empty because its generator has no get_state"
    ):
        enqueuer(generators.numbered, num_readers=2, states=readers.get_state())


# State files.


def a_state():
    with enqueuer(functools.partial(generators.RandomBatches, seed=5), num_readers=3) as readers:
        readers.get()
        readers.get()
    return readers.get_state()


def assert_equal_states(left, right):
    assert left["next_reader"] == right["next_reader"]
    assert list(left["batches"]) == list(right["batches"])
    assert list(left["ended"]) == list(right["ended"])
    for mine, other in zip(left["readers"], right["readers"]):
        assert (mine is None) == (other is None)
        for name in mine or ():
            np.testing.assert_array_equal(mine[name], other[name])


def test_state_file_keeps_values_and_types(tmp_path):
    state = a_state()
    state["readers"][0].update(
        name="größe/img (1).jpg", files=np.array(["a.jpg", "b.jpg"]), on=True, x=0.1, big=2**62
    )
    path = tmp_path / "reader_state"
    data_util.save_reader_state(str(path), state)
    loaded = data_util.load_reader_state(str(path))
    assert_equal_states(loaded, state)
    for name in ("name", "on", "x", "big", "count"):
        assert type(loaded["readers"][0][name]) is type(state["readers"][0][name])
    assert loaded["readers"][2] is None
    assert os.listdir(tmp_path) == ["reader_state"]


def test_state_file_refuses_what_it_would_have_to_pickle(tmp_path):
    state = a_state()
    state["readers"][1]["order"] = [None, {}]
    with pytest.raises(ValueError, match="reader1/order of the reader state is a list"):
        data_util.save_reader_state(tmp_path / "state.npz", state)
    assert os.listdir(tmp_path) == []


def test_state_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "state.npz"
    data_util.save_reader_state(path, a_state())
    before = path.read_bytes()

    def full_disk(unused_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        data_util.save_reader_state(path, a_state())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["state.npz"]


def test_damaged_state_file_is_named(tmp_path):
    path = tmp_path / "state.npz"
    state = a_state()
    state["readers"][:] = [{"order": np.arange(9), "name": "a.jpg"}, None, None]
    data_util.save_reader_state(path, state)
    good = path.read_bytes()
    rng = np.random.RandomState(0)
    damaged = [b"", b"not a state", good[:1], good[: len(good) // 2], good[:-1], good[1:]]
    directory = good.index(b"PK\x01\x02")  # of the archive: where bytes have no checksum
    positions = [*rng.randint(0, directory, 200), *range(directory, len(good))]
    for position in positions:
        changed = bytearray(good)
        changed[position] ^= 1 << rng.randint(8)
        damaged.append(bytes(changed))
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            loaded = data_util.load_reader_state(path)
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
        else:  # a byte that carries nothing, such as a date
            assert_equal_states(loaded, state)
    assert refused > len(damaged) // 2
    data_util.save_reader_state(path, state)
    with np.load(path) as file:
        parts = {name: file[name] for name in file.files if name != "reader0/order"}
    np.savez(path, **parts)
    with pytest.raises(ValueError, match="its list: reader0/order"):
        data_util.load_reader_state(path)
    for write in (np.savez, np.save):  # other files of numpy
        with open(path, "wb") as file:
            write(file, np.zeros(3))
        with pytest.raises(ValueError, match="state.npz is not a complete reader state"):
            data_util.load_reader_state(path)
    with pytest.raises(FileNotFoundError, match="missing.npz"):
        data_util.load_reader_state(tmp_path / "missing.npz")


def test_a_state_of_other_settings_is_refused(tmp_path):
    path, state = tmp_path / "state.npz", a_state()
    data_util.save_reader_state(path, state, settings={"input_size": 512, "scale": [0.5, 1.0]})
    same = data_util.load_matching_state(path, 3, {"input_size": 512, "scale": [0.5, 1.0]})
    assert_equal_states(same, state)
    with pytest.raises(ValueError, match="changed: input_size 512 -> 96"):
        data_util.load_matching_state(path, 3, {"input_size": 96, "scale": [0.5, 1.0]})
    with pytest.raises(ValueError, match="num_readers is 2 but the reader state is of 3"):
        data_util.load_matching_state(path, 2, {"input_size": 512, "scale": [0.5, 1.0]})


# Failures.


@both_kinds
def test_a_failing_reader_raises_when_its_turn_comes(reader):
    make_generator = functools.partial(generators.failing, bad_reader=1, good_batches=2)
    with enqueuer(make_generator, num_readers=2, reader=reader) as readers:
        got = [readers.get() for _ in range(5)]
        assert got == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
        for _ in range(2):
            with pytest.raises(
                ReaderError, match=r"reader 1 .*failed: OSError: cannot read img_7.jpg"
            ) as caught:
                readers.get()
    if reader == "thread":
        assert isinstance(caught.value.__cause__, OSError)
    else:
        assert "in failing\n" in caught.value.__notes__[0]
    assert readers.get_state()["batches"] == [3, 2]


@both_kinds
def test_a_generator_that_cannot_be_made_raises(reader):
    with enqueuer(generators.failing_at_start, num_readers=2, reader=reader) as readers:
        with pytest.raises(ReaderError, match="FileNotFoundError: no folder /data/none"):
            readers.get()


@both_kinds
def test_a_reader_that_calls_exit_raises(reader):
    with enqueuer(generators.calling_exit, reader=reader) as readers:
        assert readers.get() == 0
        with pytest.raises(ReaderError, match="SystemExit: 3"):
            readers.get()


def test_a_reader_process_that_ends_hard_gives_its_exit_code():
    with enqueuer(
        functools.partial(generators.ending_hard, code=7), reader="process", max_queue_size=1
    ) as readers:
        assert readers.get() == 0
        with pytest.raises(ReaderError, match="ended with exit code 7"):
            readers.get()


def test_a_killed_reader_process_raises_after_the_batches_it_had_made():
    with enqueuer(generators.process_facts, reader="process", max_queue_size=3) as readers:
        pid = readers.get()["pid"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ReaderError, match=rf"process {pid}\) of 1 was killed by SIGKILL .*-9"):
            for _ in range(5):
                readers.get()


def test_what_cannot_go_to_a_process_is_refused_at_the_start():
    with pytest.raises(ValueError, match="lambda.*cannot be sent.*pass reader='thread'"):
        enqueuer(lambda index: iter([]), reader="process").start()
    local = functools.partial(functools.partial(type("Local", (), {"__module__": "__main__"})))
    with pytest.raises(ValueError, match="defined in the main script"):
        enqueuer(local, reader="process").start()


def test_readers_that_cannot_be_started_leave_nothing():
    """Each batch of a reader process needs an open file, and those are limited."""
    before, limits = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 40, limits[1]))
    try:
        readers = enqueuer(generators.numbered, num_readers=2, max_queue_size=400, reader="process")
        with pytest.raises(ReaderError, match="reader 0 of 2 cannot be started.*open files"):
            readers.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(
    "name, value",
    [("num_readers", 0), ("max_queue_size", 0), ("watchdog_seconds", 0), ("reader", "fork")],
)
def test_arguments_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        enqueuer(generators.numbered, **{name: value})


def test_readers_start_once():
    readers = enqueuer(generators.numbered)
    with pytest.raises(RuntimeError, match="before start"):
        readers.get()
    assert not readers.is_running()
    with readers:
        assert readers.is_running()
        with pytest.raises(RuntimeError, match="start.. was called twice"):
            readers.start()
    assert not readers.is_running()
    with pytest.raises(EndOfData, match="stopped"):
        readers.get()


# Waiting.


@both_kinds
def test_watchdog_warns_again_and_again(reader, tmp_path, monkeypatch):
    messages = []
    path = tmp_path / "go"

    def warning(text, *values):
        messages.append(text % values)
        if len(messages) == 2:
            path.touch()

    monkeypatch.setattr(logging, "warning", warning)
    make_generator = functools.partial(generators.waiting_for_file, path=str(path))
    with enqueuer(make_generator, reader=reader, watchdog_seconds=0.2) as readers:
        assert readers.get() == 0
    assert len(messages) >= 2
    assert all("no batch for" in text and "reader 0" in text for text in messages)


@both_kinds
def test_wait_seconds_counts_since_it_was_last_asked(reader, tmp_path, monkeypatch):
    path = tmp_path / "go"
    make_generator = functools.partial(generators.waiting_for_file, path=str(path))
    monkeypatch.setattr(logging, "warning", lambda *unused_message: path.touch())
    with enqueuer(make_generator, reader=reader, watchdog_seconds=0.3) as readers:
        begin = time.monotonic()
        readers.get()
        elapsed = time.monotonic() - begin
        assert 0.3 <= readers.wait_seconds() <= elapsed
        assert readers.wait_seconds() == 0


@both_kinds
def test_stop_ends_a_get_that_waits_in_another_thread(reader, tmp_path):
    make_generator = functools.partial(generators.waiting_for_file, path=str(tmp_path / "never"))
    outcome = []

    def consume():
        try:
            readers.get()
        except EndOfData as error:
            outcome.append(str(error))

    readers = enqueuer(make_generator, reader=reader)
    readers.start()
    consumer = threading.Thread(target=consume)
    consumer.start()
    time.sleep(0.3)
    readers.stop(timeout=0.2)
    (tmp_path / "never").touch()  # lets the reader thread go
    consumer.join(PATIENCE)
    assert outcome == ["the readers were stopped"]


@both_kinds
def test_a_signal_handler_may_stop_the_readers_while_get_waits(reader, tmp_path):
    path = tmp_path / "never"
    make_generator = functools.partial(generators.waiting_for_file, path=str(path))
    readers = enqueuer(make_generator, reader=reader)
    previous = signal.signal(signal.SIGALRM, lambda *unused: readers.stop(timeout=0.2))
    try:
        readers.start()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(EndOfData, match="stopped"):
            readers.get()
    finally:
        signal.signal(signal.SIGALRM, previous)
        path.touch()


def test_stop_leaves_no_thread():
    before = set(threading.enumerate())
    readers = enqueuer(generators.numbered, num_readers=3)
    readers.start()
    readers.get()
    readers.stop(timeout=PATIENCE)
    assert not set(threading.enumerate()) - before
    readers.stop()


def test_stop_leaves_no_process_and_no_descriptor():
    with enqueuer(generators.process_facts, num_readers=2, reader="process") as readers:
        pids = [readers.get()["pid"] for _ in range(2)]
    for _ in range(2):  # the first run may have opened what Python keeps for good
        before = sorted(os.listdir("/proc/self/fd"))
        with enqueuer(generators.process_facts, num_readers=2, reader="process") as readers:
            pids += [readers.get()["pid"] for _ in range(2)]
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


# Processes: what they load, and how they end with their parent.


def test_reader_process_is_light():
    with enqueuer(generators.process_facts, reader="process") as readers:
        facts = readers.get()
    assert not facts["tensorflow"]
    assert facts["main"] is None
    assert facts["cuda"] == ""
    assert facts["blocked"] >= {signal.SIGINT, signal.SIGTERM}
    assert facts["peak_kb"] < 150_000


def run_script(folder, body, *arguments, **keywords):
    """Starts a script that lies and runs elsewhere, in a process group of its own."""
    script = folder / "main_script.py"
    script.write_text(textwrap.dedent(body))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Where the tests run in the background of a shell, SIGINT is ignored unless asked for.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **keywords,
    )


def group_members(group):
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getpgid(int(entry)) == group:
                    with open(f"/proc/{entry}/stat") as file:
                        zombie = file.read().rpartition(")")[2].split()[0] == "Z"
                    if not zombie:
                        members.append(int(entry))
            except (ProcessLookupError, FileNotFoundError):
                continue
    return members


TRAINER = """
    import functools, os, signal, sys, time
    assert __name__ == "__main__", "a reader has imported the main script"
    from data.data_util import GeneratorEnqueuer
    from tests.data import reader_generators as generators

    kind, behaviour = sys.argv[1:]
    stopping = []
    if behaviour == "handles":
        signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    readers = GeneratorEnqueuer(
        functools.partial(generators.RandomBatches, size=100), num_readers=2, max_queue_size=4,
        reader=kind)
    readers.start()
    readers.get()
    print("running", flush=True)
    if behaviour == "ends":
        sys.exit(0)
    if behaviour == "crashes":
        raise RuntimeError("bad step")
    if behaviour == "forks" and os.fork() == 0:
        time.sleep(60)
    while not stopping:
        readers.get()
        time.sleep(0.02)
    readers.stop()
    sys.exit(5)
"""


@pytest.mark.parametrize(
    "kind, behaviour, sent, to_group, code",
    [
        ("thread", "ends", None, False, 0),
        ("process", "ends", None, False, 0),
        ("process", "crashes", None, False, 1),
        ("thread", "runs", signal.SIGINT, True, -signal.SIGINT),
        ("process", "runs", signal.SIGINT, True, -signal.SIGINT),
        ("process", "runs", signal.SIGTERM, False, -signal.SIGTERM),
        ("process", "handles", signal.SIGTERM, True, 5),
        ("process", "runs", signal.SIGKILL, False, -signal.SIGKILL),
    ],
)
def test_nothing_is_left_after_the_end_of_the_parent(
    kind, behaviour, sent, to_group, code, tmp_path
):
    shared_before = set(os.listdir("/dev/shm"))
    parent = run_script(tmp_path, TRAINER, kind, behaviour)
    try:
        assert parent.stdout.readline() == "running\n", parent.stderr.read()
        if sent is not None:
            assert len(group_members(parent.pid)) == (3 if kind == "process" else 1)
            (os.killpg if to_group else os.kill)(parent.pid, sent)
        output, errors = parent.communicate(timeout=PATIENCE)
        assert parent.returncode == code
        wait_until(lambda: not group_members(parent.pid))
    finally:
        end_group(parent)
    assert not {name for name in set(os.listdir("/dev/shm")) - shared_before if "psm" in name}
    assert "leaked" not in errors and "ReaderError" not in errors
    traceback_of = {"crashes": "bad step", "runs": "KeyboardInterrupt"}
    expected = sent in (None, signal.SIGINT) and traceback_of.get(behaviour)
    assert errors.count("Traceback") == bool(expected)
    assert not expected or expected in errors


def test_readers_end_with_a_killed_parent_whose_fork_lives_on(tmp_path):
    parent = run_script(tmp_path, TRAINER, "process", "forks")
    try:
        assert parent.stdout.readline() == "running\n", parent.stderr.read()
        wait_until(lambda: len(group_members(parent.pid)) == 4)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(PATIENCE)
        wait_until(lambda: len(group_members(parent.pid)) == 1)
    finally:
        end_group(parent)


def end_group(parent):
    for pid in group_members(parent.pid):
        os.kill(pid, signal.SIGKILL)
    parent.communicate()


def test_a_forked_copy_ends_no_readers_of_its_parent(tmp_path):
    body = """
        import os, sys
        from data.data_util import GeneratorEnqueuer
        from tests.data import reader_generators as generators

        readers = GeneratorEnqueuer(generators.process_facts, num_readers=2, reader="process")
        readers.start()
        readers.get()
        child = os.fork()
        if child == 0:
            readers.stop()
            sys.exit(0)  # runs the exit handlers that it inherited
        os.waitpid(child, 0)
        for _ in range(50):
            readers.get()
        readers.stop()
        print("fine")
    """
    parent = run_script(tmp_path, body)
    output, errors = parent.communicate(timeout=PATIENCE)
    assert (output, errors) == ("fine\n", "")


def test_exit_does_not_wait_for_a_thread_in_a_long_call(tmp_path):
    body = """
        import threading, time
        from data.data_util import GeneratorEnqueuer
        from tests.data import reader_generators as generators

        GeneratorEnqueuer(generators.sleeping, num_readers=2).start()
    """
    parent = run_script(tmp_path, body)
    _, errors = parent.communicate(timeout=50)  # the call takes 60 seconds
    assert parent.returncode == 0
    assert "still busy 2.0 s after stop(): reader 0, reader 1" in errors


def test_python_c_and_another_folder_start_processes(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        "from data.data_util import GeneratorEnqueuer; "
        "from tests.data import reader_generators as generators; "
        "readers = GeneratorEnqueuer(generators.numbered, num_readers=2, reader='process'); "
        "readers.start(); print([readers.get() for _ in range(3)]); readers.stop()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.stdout, done.stderr) == ("[(0, 0), (1, 0), (0, 1)]\n", "")


def test_processes_start_after_a_tensorflow_session(tmp_path):
    body = """
        import tensorflow.compat.v1 as tf
        from data.data_util import GeneratorEnqueuer
        from tests.data import reader_generators as generators

        assert __name__ == "__main__", "a reader has imported the main script"
        with tf.Graph().as_default(), tf.Session() as session:
            session.run(tf.constant(1.0) + 1.0)
            for kind in ("process", "thread"):
                with GeneratorEnqueuer(
                    generators.process_facts, num_readers=2, reader=kind
                ) as readers:
                    print([readers.get()["tensorflow"] for _ in range(10)])
    """
    parent = run_script(tmp_path, body)
    output, errors = parent.communicate(timeout=2 * PATIENCE)
    assert output == f"{[False] * 10}\n{[True] * 10}\n", errors
