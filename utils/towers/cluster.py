"""Which processes train together, and which of them this one is.

A cluster has workers, each with its own towers and its own share of the data, and maybe parameter
servers, which keep the variables. It is described to every process alike: by the environment
variable TF_CONFIG, or by --ps_hosts, --worker_hosts, --job_name and --task_index.

    cluster = cluster_of(options)
    if cluster and cluster.is_parameter_server:
        return cluster_server.serve(cluster, timeout_seconds=options.cluster_timeout)
    options, place = engine_flags.settle(options, place, cluster, FLAGS)

Worker 0 is the chief: it alone initialises or restores the variables, saves and writes summaries.
"""

import dataclasses
import json
import os

import tensorflow.compat.v1 as tf

from utils.towers import devices

PS = "ps"
WORKER = "worker"
CHIEFS = ("chief", "master")  # what TF_CONFIG may call worker 0 as a job of its own
_EXAMPLE = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'


class ClusterError(Exception):
    """Another process of the cluster cannot be worked with; the message names it."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes that train together, seen from one of them.

    Attributes:
        ps_hosts: 'host:port' of each parameter server; empty where workers exchange gradients
            among themselves.
        worker_hosts: 'host:port' of each worker, the chief first.
        job: 'ps' or 'worker': what this process is.
        task: its number in its job.
    """

    ps_hosts: tuple[str, ...]
    worker_hosts: tuple[str, ...]
    job: str
    task: int

    @property
    def num_workers(self):
        """Number of workers."""
        return len(self.worker_hosts)

    @property
    def is_parameter_server(self):
        """Whether this process only keeps variables."""
        return self.job == PS

    @property
    def is_chief(self):
        """Whether this process saves and writes summaries."""
        return self.job == WORKER and self.task == 0

    @property
    def address(self):
        """'host:port' of this process."""
        return self.hosts(self.job)[self.task]

    def hosts(self, job):
        """'host:port' of each task of a job, 'ps' or 'worker'."""
        return self.ps_hosts if job == PS else self.worker_hosts

    def describe(self, job, task):
        """How messages name a process: 'worker 1 at b:2222'."""
        return f"{job} {task} at {self.hosts(job)[task]}"

    def definition(self):
        """{job: list of 'host:port'}, the same in every process."""
        jobs = {PS: list(self.ps_hosts), WORKER: list(self.worker_hosts)}
        return {job: hosts for job, hosts in jobs.items() if hosts}

    def definition_for_server(self):
        """The processes that this one has to do with, {job: {task: 'host:port'}}.

        Without the other workers, if there are parameter servers: what a worker asks of all its
        peers, such as to forget variables, must not wait for one that is away.
        """
        definition = {job: dict(enumerate(hosts)) for job, hosts in self.definition().items()}
        if self.ps_hosts and self.job == WORKER:
            definition[WORKER] = {self.task: self.address}
        return definition

    def signature(self):
        """Text that is equal in all processes that can work together."""
        return json.dumps({"cluster": self.definition(), "tensorflow": tf.__version__})

    def check_alike(self, settings, other, other_settings):
        """Refuses a worker that trains with other settings than this one.

        Args:
            settings: {name: value} of this worker.
            other: number of the other worker.
            other_settings: its settings.

        Raises:
            ClusterError: names the first difference.
        """
        for name in sorted({*settings, *other_settings}):
            own, others = settings.get(name), other_settings.get(name)
            if own != others:
                raise ClusterError(
                    f"{self.describe(self.job, self.task)} has {name} {own}, and"
                    f" {self.describe(WORKER, other)} has {others}; give all workers the same"
                    " flags and data"
                )

    def options(self, options):
        """EngineOptions with this cluster's hosts, wherever they were described.

        Args:
            options: utils.towers.engine_flags.EngineOptions.
        """
        return dataclasses.replace(
            options,
            ps_hosts=self.ps_hosts,
            worker_hosts=self.worker_hosts,
            job_name=self.job,
            task_index=self.task,
        )

    def devices(self, place, balance="bytes"):
        """The towers of this worker: `place` with the names that its devices have in the cluster.

        Args:
            place: utils.towers.devices.Devices of this process alone.
            balance: how variables are spread over the parameter servers, one of
                utils.towers.devices.BALANCES.

        Returns:
            Devices.
        """
        return devices.in_cluster(
            place, task=self.task, num_parameter_servers=len(self.ps_hosts), balance=balance
        )


def cluster_of(options, environ=os.environ):
    """The cluster that the environment or the flags describe.

    Args:
        options: utils.towers.engine_flags.EngineOptions.
        environ: the environment, which may have TF_CONFIG.

    Returns, Raises: see `cluster_from`.
    """
    return cluster_from(
        environ.get("TF_CONFIG"),
        options.ps_hosts,
        options.worker_hosts,
        options.job_name,
        options.task_index,
    )


def cluster_from(tf_config_json=None, ps_hosts=(), worker_hosts=(), job_name="", task_index=0):
    """The cluster that TF_CONFIG or the flags describe.

    Args:
        tf_config_json: value of TF_CONFIG, or None.
        ps_hosts, worker_hosts, job_name, task_index: values of the flags.

    Returns:
        Cluster, or None where nothing describes one.

    Raises:
        ValueError: the description is incomplete or contradicts itself; one sentence.
    """
    from_environment = _from_tf_config(tf_config_json) if (tf_config_json or "").strip() else None
    from_flags = None
    if ps_hosts or worker_hosts or job_name or task_index:
        from_flags = _from_flags(tuple(ps_hosts), tuple(worker_hosts), job_name, task_index)
    if from_environment and from_flags and from_environment != from_flags:
        raise ValueError(
            "TF_CONFIG and the flags --ps_hosts, --worker_hosts, --job_name, --task_index describe"
            " different clusters or tasks; pass only one of them"
        )
    return from_environment or from_flags


def _from_flags(ps_hosts, worker_hosts, job_name, task_index):
    if not worker_hosts:
        given = "--ps_hosts" if ps_hosts else "--job_name" if job_name else "--task_index"
        raise ValueError(
            f"{given} needs workers; pass --worker_hosts=host:port,... too, or drop {given}"
        )
    if not job_name:
        raise ValueError(
            "nothing says what this process is in the cluster; pass --job_name=worker or"
            " --job_name=ps, and --task_index"
        )
    if job_name not in (PS, WORKER):
        raise ValueError(
            f"--job_name={job_name} is no job of a cluster; pass --job_name=worker or --job_name=ps"
        )
    return _checked(
        Cluster(ps_hosts, worker_hosts, job_name, task_index),
        {PS: "--ps_hosts", WORKER: "--worker_hosts"},
        f"--task_index={task_index}",
    )


def _from_tf_config(text):
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"TF_CONFIG is not JSON ({error}); it must be like {_EXAMPLE}, or unset"
        ) from error
    jobs = config.get("cluster") if isinstance(config, dict) else None
    if not isinstance(jobs, dict) or not jobs:
        raise ValueError(f"TF_CONFIG has no cluster; it must be like {_EXAMPLE}, or unset")
    known = (PS, WORKER, *CHIEFS)
    for job, hosts in jobs.items():
        if job not in known:
            raise ValueError(
                f"TF_CONFIG has the job {job}, which has no part in a training; use"
                f" {', '.join(known)}"
            )
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise ValueError(
                f"TF_CONFIG gives the job {job} {json.dumps(hosts)}; it must be a list of"
                ' "host:port"'
            )
    chiefs = [host for job in CHIEFS for host in jobs.get(job, [])]
    if len(chiefs) > 1:
        raise ValueError(
            f"TF_CONFIG has {len(chiefs)} chiefs ({', '.join(chiefs)}); name one, the others as"
            " worker"
        )
    job, task = _task_of(config, jobs)
    if job == WORKER:
        task += len(chiefs)
    cluster = Cluster(
        tuple(jobs.get(PS, [])),
        (*chiefs, *jobs.get(WORKER, [])),
        PS if job == PS else WORKER,
        task,
    )
    if not cluster.worker_hosts:
        raise ValueError('TF_CONFIG has parameter servers and no worker; add "worker": [...]')
    named = {PS: "TF_CONFIG's job ps", WORKER: "TF_CONFIG's job worker"}
    return _checked(cluster, named, f"TF_CONFIG's task {config['task'].get('index')}")


def _task_of(config, jobs):
    """(job, index) of TF_CONFIG's task, as it is written there."""
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise ValueError(
            'TF_CONFIG does not say which task this is; add "task": {"type": "worker", "index": 0}'
        )
    if not isinstance(task["type"], str) or task["type"] not in jobs:
        raise ValueError(
            f"TF_CONFIG's task is of type {task['type']}, and the cluster has only"
            f" {', '.join(sorted(jobs))}; correct one of them"
        )
    index = task["index"]
    if isinstance(index, str) and index.isdecimal():  # as some launchers write it
        index = int(index)
    count = len(jobs[task["type"]])
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise ValueError(
            f"TF_CONFIG's task index {json.dumps(task['index'])} is none of the {count} tasks of"
            f" job {task['type']}; pass 0 to {count - 1}"
        )
    return task["type"], index


def _checked(cluster, named, asked):
    """The cluster, if its addresses are good and it has this task.

    Args:
        cluster: Cluster.
        named: {job: where its addresses come from}.
        asked: where the task's number comes from.
    """
    seen = {}
    for job in (PS, WORKER):
        for host in cluster.hosts(job):
            name, colon, port = host.rpartition(":")
            valid = colon and port.isdecimal() and 0 < int(port) < 65536
            if not valid or not name or set(name) & set("/@ \t"):
                raise ValueError(
                    f"{named[job]} has {host!r}, which is no host:port; write it like"
                    " 192.168.0.1:2222"
                )
            address = name.replace("localhost", "127.0.0.1").lower(), int(port)
            if address in seen:
                raise ValueError(
                    f"{named[job]} has {host}, which {named[seen[address]]} has too; every process"
                    " needs a port of its own"
                )
            seen[address] = job
    count = len(cluster.hosts(cluster.job))
    if not count:
        raise ValueError(
            f"this process is of job {cluster.job}, and {named[cluster.job]} is empty; pass the"
            f" addresses of all of job {cluster.job}"
        )
    if not 0 <= cluster.task < count:
        raise ValueError(
            f"{asked} is none of the {count} tasks of job {cluster.job}; pass 0 to {count - 1}"
        )
    return cluster
