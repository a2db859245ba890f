"""Whether the other processes of a cluster can be reached: plain TCP connections, no messages."""

import socket
import threading
import time

from absl import logging

from utils.towers.cluster import PS, WORKER, ClusterError

_PROBE_SECONDS = 2.0  # longest time that one attempt takes
_PAUSE_SECONDS = 0.5


def problem(address):
    """Why nothing can be reached at an address.

    Args:
        address: 'host:port'.

    Returns:
        Text such as 'Connection refused', or None where something listens.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None


class HostWatch:
    """Notices processes that cannot be reached for longer than a time-out.

    Args:
        cluster: utils.towers.cluster.Cluster.
        needed: list of (job, task), what this process cannot go on without.
        spare: how many of the needed workers may be missing all the same.
        timeout_seconds: how long one is waited for.
    """

    def __init__(self, cluster, needed, timeout_seconds, spare=0):
        self._cluster = cluster
        self._needed = [name for name in needed if name != (cluster.job, cluster.task)]
        self._spare = spare
        self._timeout = timeout_seconds
        self._since = {}  # (job, task) -> (when it was first missed, why)
        self._lock = threading.Lock()  # of _since
        self._end = threading.Event()
        self._thread = None

    def wait_until_reachable(self, job=None, wait=lambda: None):
        """Returns when all needed processes, or those of one job, can be reached.

        Args:
            job: name of the job, or None.
            wait: called again and again meanwhile.

        Raises:
            ClusterError: one could not be for the time-out, which starts with this call.
        """
        with self._lock:
            self._since.clear()
        said = False
        while missing := self.missing(job):
            sentence = self.lost()
            if sentence:
                raise ClusterError(sentence)
            if not said:
                logging.info("waiting for %s", self._names(missing))
                said = True
            wait()
            time.sleep(min(_PAUSE_SECONDS, self._timeout / 4))

    def missing(self, only_job=None):
        """Looks once: the (job, task) that cannot be reached now, but for the spare ones."""
        for name in self._needed:
            job, task = name
            if only_job not in (None, job):
                continue
            reason = problem(self._cluster.hosts(job)[task])
            with self._lock:
                if reason is None:
                    self._since.pop(name, None)
                else:
                    self._since[name] = self._since.get(name, (time.monotonic(),))[0], reason
        with self._lock:
            missed = [name for name in self._since if only_job in (None, name[0])]
        return self._not_spared(missed)

    def has_servers(self):
        """Whether all parameter servers could be reached at the last look."""
        with self._lock:
            return not any(job == PS for job, _ in self._since)

    def lost(self):
        """One sentence about what could not be reached for the time-out at the last looks, or None.

        Only as many as cannot be spared count.
        """
        gone = self._gone()
        names = self._not_spared(gone)
        if not names:
            return None
        reason = gone[names[0]]
        verb = "has" if len(names) == 1 else "have"
        return (
            f"{self._names(names)} {verb} not answered for {self._timeout:g} seconds ({reason});"
            " start it, or correct the address in --ps_hosts, --worker_hosts or TF_CONFIG"
        )

    def gone(self):
        """Numbers of the workers that could not be reached for the time-out at the last looks."""
        return [task for job, task in self._gone() if job == WORKER]

    def start(self, on_lost):
        """Looks again and again in a thread.

        Args:
            on_lost: called, from that thread, with the sentence of `lost`; again at every look.
        """
        self._thread = threading.Thread(
            target=self._watch, args=(on_lost,), name="host watch", daemon=True
        )
        self._thread.start()

    def stop(self):
        """Ends the thread."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, on_lost):
        while not self._end.wait(min(_PROBE_SECONDS, self._timeout / 4)):
            self.missing()
            sentence = self.lost()
            if sentence:
                on_lost(sentence)

    def _gone(self):
        """{(job, task): why} of what could not be reached for the time-out."""
        now = time.monotonic()
        with self._lock:
            missed = list(self._since.items())
        return {name: why for name, (since, why) in missed if now - since > self._timeout}

    def _not_spared(self, names):
        workers = [name for name in names if name[0] == WORKER]
        spared = workers if len(workers) <= self._spare else []
        return [name for name in names if name not in spared]

    def _names(self, names):
        return ", ".join(self._cluster.describe(job, task) for job, task in sorted(names))
