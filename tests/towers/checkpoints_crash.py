"""Saves in child processes that are killed or run out of room; a program of its own, run by a test.

Forks from one process that has TensorFlow loaded and no session, so that dozens of children cost
seconds. Exits with an error on the first folder that does not restore.

    python -m tests.towers.checkpoints_crash every|random|full FOLDER
"""

import os
import random
import resource
import signal
import sys
import time
import traceback

from tests.towers.checkpoints_toy import SIDE, Toy, kill_at_call, steps_in
from utils.towers import checkpoints

ROUNDS = int(os.environ.get("CRASH_ROUNDS", "10"))


def in_child(work):
    """Runs `work(acknowledge)` in a child; returns (process id, pipe of acknowledged steps)."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        return child, read_end
    status = 1
    try:
        os.close(read_end)
        work(lambda step: os.write(write_end, b"%d\n" % step))
        status = 0
    except BaseException:  # what a process that has forked must not pass on to its parent's code
        traceback.print_exc()
    finally:
        os._exit(status)


def finish(child, read_end):
    """Waits for a child; returns (wait status, last acknowledged step or 0)."""
    with os.fdopen(read_end, "rb") as pipe:
        acknowledged = [int(line) for line in pipe.read().split()]
    return os.waitpid(child, 0)[1], max(acknowledged, default=0)


def check(folder, acknowledged):
    """The folder restores, to no older a step than was acknowledged; returns that step."""
    found = steps_in(folder)
    for step, seen in found.items():
        assert seen == {step}, f"checkpoint {step} mixes {seen}"
    assert max(found) >= acknowledged, f"{max(found)} restorable, {acknowledged} was saved"
    return max(found)


def check_clean(folder, keep):
    """Nothing is left over in a folder after a save went through."""
    names = set(os.listdir(folder)) - {"checkpoint"}
    prefixes = checkpoints.candidate_checkpoints(folder)
    expected = {
        os.path.basename(prefix) + ending
        for prefix in prefixes
        for ending in (".index", ".meta", ".data-00000-of-00001", SIDE)
    }
    assert names == expected, f"left over: {sorted(names ^ expected)}"
    assert len(prefixes) <= keep, prefixes


def save_on(toy, folder, count, kill_at=None):
    """Work of a child: goes on from the folder, saves `count` steps, the last one killed."""

    def work(acknowledge):
        toy.start()
        step = 0
        if os.path.isdir(folder):
            step = checkpoints.restore_training(toy.session, folder).step
        for i in range(count):
            step += 1
            toy.mark(step)
            with kill_at_call(kill_at if i == count - 1 else None):
                toy.save(step)
            acknowledge(step)

    return work


def every(folder):
    """Kills at each change of the disk that a save makes, in turn, until a save goes through."""
    toy = Toy(folder, keep=3, start=False)
    status, acknowledged = finish(*in_child(save_on(toy, folder, 4)))
    assert status == 0
    kill_at, killed = 1, True
    while killed:
        # The first save finds what earlier runs left, the second does without.
        status, step = finish(*in_child(save_on(toy, folder, 1 + kill_at % 2, kill_at)))
        killed = status == signal.SIGKILL
        assert killed or status == 0, status
        acknowledged = check(folder, max(acknowledged, step))
        kill_at += 1
    assert kill_at > 12, "the kills did not reach into the save"
    status, _ = finish(*in_child(save_on(toy, folder, 1)))
    assert status == 0
    check_clean(folder, keep=3)
    print(f"killed at {kill_at - 2} places, {acknowledged} steps")


def at_random(folder):
    """Kills from outside, at random moments."""
    toy = Toy(folder, keep=3, start=False)
    randomness = random.Random(0)
    status, acknowledged = finish(*in_child(save_on(toy, folder, 2)))
    assert status == 0
    for _ in range(ROUNDS):
        child, pipe = in_child(save_on(toy, folder, 10**6))
        while not os.read(pipe, 1):  # until it saves
            time.sleep(0.01)
        time.sleep(randomness.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
        status, step = finish(child, pipe)
        assert status == signal.SIGKILL, status
        acknowledged = check(folder, max(acknowledged, step))
    status, _ = finish(*in_child(save_on(toy, folder, 1)))
    assert status == 0
    check_clean(folder, keep=3)
    print(f"killed {ROUNDS} times, {acknowledged} steps")


def full(folder):
    """No file may grow beyond a limit, as on a full disk: an error, and nothing has changed."""
    no_limit = resource.RLIM_INFINITY
    for width, reached in ((2000, "data"), (4, "meta graph")):
        run = os.path.join(folder, reached)

        def work(acknowledge, run=run, width=width):
            toy = Toy(run, keep=3, width=width)
            for step in (1, 2):
                toy.mark(step)
                toy.save(step)
            before = sorted(os.listdir(run))
            for limit in (0, 100, 4096):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, no_limit))
                toy.mark(3)
                try:
                    toy.save(3)
                except checkpoints.CheckpointError as error:
                    assert "model.ckpt-3: File too large; older" in str(error), error
                else:
                    raise AssertionError(f"a limit of {limit} bytes went unnoticed")
                assert sorted(os.listdir(run)) == before
                check(run, 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (no_limit, no_limit))
            toy.save(3)
            acknowledge(3)

        status, acknowledged = finish(*in_child(work))
        assert (status, acknowledged) == (0, 3), (status, acknowledged)
        check(run, 3)
        check_clean(run, keep=3)
    print("full disk: nothing lost")


if __name__ == "__main__":
    {"every": every, "random": at_random, "full": full}[sys.argv[1]](sys.argv[2])
