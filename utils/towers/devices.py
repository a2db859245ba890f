"""Which devices the towers run on, and what is placed where.

One tower per entry of `--gpu_list`. Variables live on the host; everything else that a tower builds
runs on the tower's device. Without a GPU the K towers run on K logical CPUs, through the same code.
"""

import dataclasses
import glob
import os

import tensorflow.compat.v1 as tf

HOST = "/cpu:0"
PARAMETER_SERVER = "/job:ps"
WORKER = "/job:worker"
COLLECTIVE_LEADER = f"{WORKER}/replica:0/task:0"  # whom workers ask who takes part

# Ops that own or touch a variable's memory stay with the variable: a handle can't be read from
# another device.
VARIABLE_OPS = frozenset(
    {
        "VarHandleOp",
        "VarIsInitializedOp",
        "ReadVariableOp",
        "AssignVariableOp",
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "Variable",
        "VariableV2",
    }
)
BALANCES = ("bytes", "round_robin")  # how variables are spread over parameter servers


class ParameterServers:
    """Spreads variables over the parameter servers of a cluster.

    Args:
        count: number of parameter servers.
        balance: 'bytes': a variable goes to the server with the fewest bytes so far; 'round_robin':
            to the next one.

    Raises:
        ValueError: `balance` is none of BALANCES.
    """

    def __init__(self, count, balance="bytes"):
        if balance not in BALANCES:
            raise ValueError(f"balance={balance} is unknown; use one of {', '.join(BALANCES)}")
        self._loads = [0] * count  # bytes, or variables
        self._by_bytes = balance == "bytes"
        self._chosen = {}  # name of the variable's op -> number of the server

    def device_of(self, op):
        """Device string of the server of a VarHandleOp; every process gives the same answer."""
        if op.name not in self._chosen:
            task = self._loads.index(min(self._loads))
            self._chosen[op.name] = task
            size = tf.TensorShape(op.get_attr("shape")).num_elements() or 1
            self._loads[task] += size * op.get_attr("dtype").size if self._by_bytes else 1
        return parameter_server(self._chosen[op.name])


@dataclasses.dataclass(frozen=True)
class Devices:
    """Where K towers run.

    Attributes:
        kind: 'GPU' or 'CPU' (logical CPUs).
        indices: one device index a tower.
        task: in a cluster the prefix of this worker's devices, such as '/job:worker/task:1'.
        parameter_servers: ParameterServers that keep the variables, or None.
        variables: 'host': variables are on the host; 'tower0': on tower 0's device; 'own': what a
            tower makes is on its own device (utils.towers.replication).
    """

    kind: str
    indices: tuple[int, ...]
    task: str = ""
    parameter_servers: ParameterServers | None = dataclasses.field(default=None, compare=False)
    variables: str = "host"

    @property
    def num_towers(self):
        """K, the number of towers."""
        return len(self.indices)

    @property
    def host(self):
        """Device of what the towers share, such as the step; see `variable_device`."""
        return self.task + HOST

    @property
    def step_device(self):
        """Device of the variable that counts the steps."""
        return parameter_server(0) if self.parameter_servers else self.host

    def tower_name(self, tower):
        """Device string of one tower, for example '/gpu:1' or '/job:worker/task:1/gpu:1'."""
        return f"{self.task}/{self.kind.lower()}:{self.indices[tower]}"

    def variable_device(self, tower):
        """Device string of the variables that a tower makes, without parameter servers."""
        if self.variables == "host":
            return self.host
        return self.tower_name(tower if self.variables == "own" else 0)

    def tower_device(self, tower):
        """Device function of one tower, for `tf.device`.

        Variables go to `variable_device`, or to a parameter server, and the ops that touch their
        memory stay with them; all other ops go to the tower's device. A device that an op already
        asks for is kept.
        """
        tower_spec = tf.DeviceSpec.from_string(self.tower_name(tower))

        def place(op):
            asked = tf.DeviceSpec.from_string(op.device or "")
            default = tower_spec
            if op.type in VARIABLE_OPS:
                default = tf.DeviceSpec.from_string(self._device_of_variable(op, tower))
            if asked.device_type is not None:
                return asked.to_string()
            return asked.make_merged_spec(default).to_string()

        return place

    def session_config(self):
        """ConfigProto with as many logical CPUs as there are CPU towers.

        GPU memory grows on demand.
        """
        config = tf.ConfigProto(allow_soft_placement=True)
        # The rewriter that would merge chains of additions into one AddN: see gradients.PAIRWISE.
        rewrites = config.graph_options.rewrite_options
        rewrites.arithmetic_optimization = rewrites.OFF
        if self.kind == "CPU":
            config.device_count["CPU"] = self.num_towers
        config.gpu_options.allow_growth = True
        if self.task:
            # It would fuse convolution and bias to an op that servers lack for bfloat16.
            rewrites.remapping = rewrites.OFF
            # A worker that is down must not keep the others from starting their sessions.
            config.device_filters.append(self.task)
            if self.parameter_servers:
                config.device_filters.append(PARAMETER_SERVER)
            else:
                config.experimental.collective_group_leader = COLLECTIVE_LEADER
        return config

    def describe(self, batch_size_per_tower):
        """One line for the start of a run: devices, towers, batch per tower and in all."""
        names = ", ".join(self.tower_name(i) for i in range(self.num_towers))
        why = " (logical CPUs: no GPU is visible)" if self.kind == "CPU" else ""
        if self.parameter_servers:
            variables = PARAMETER_SERVER
        elif self.variables == "own" and self.num_towers > 1:
            variables = "each tower's device"
        else:
            variables = self.variable_device(0)
        return (
            f"{self.num_towers} tower(s) on {names}{why}; variables on {variables};"
            f" batch {batch_size_per_tower} per tower,"
            f" {batch_size_per_tower * self.num_towers} in all"
        )

    def _device_of_variable(self, op, tower):
        """Device string of the variable that an op makes or touches."""
        makes = op.type in ("VarHandleOp", "VariableV2", "Variable")
        if self.parameter_servers:
            return self.parameter_servers.device_of(op) if makes else op.inputs[0].device
        if self.variables == "own" and not makes:  # it may be another tower's
            return op.inputs[0].device or self.variable_device(0)
        return self.variable_device(tower)


def in_cluster(place, *, task, num_parameter_servers, balance="bytes"):
    """The devices of one worker, with their names in the cluster.

    Args:
        place: Devices of this process alone.
        task: number of the worker.
        num_parameter_servers: how many there are for the variables; 0: each worker has its own.
        balance: one of BALANCES.

    Returns:
        Devices.
    """
    servers = ParameterServers(num_parameter_servers, balance) if num_parameter_servers else None
    return dataclasses.replace(place, task=worker(task), parameter_servers=servers)


def worker(task):
    """Prefix of a worker's devices."""
    return f"{WORKER}/task:{task}"


def parameter_server_task(task):
    """Prefix of a parameter server's devices."""
    return f"{PARAMETER_SERVER}/task:{task}"


def parameter_server(task):
    """Device string of a parameter server."""
    return parameter_server_task(task) + HOST


def parse_gpu_list(gpu_list):
    """Splits '0,1' into (0, 1).

    Raises:
        ValueError: empty, not numbers, negative, or a number given twice.
    """
    try:
        indices = tuple(int(entry) for entry in gpu_list.split(","))
    except ValueError:
        indices = ()
    if not indices or min(indices) < 0 or len(set(indices)) < len(indices):
        raise ValueError(
            f"--gpu_list={gpu_list} is not a list of different GPU numbers separated by commas;"
            " pass for example --gpu_list=0,1"
        )
    return indices


def resolve_devices(gpu_list, **environment):
    """Finds the devices of `--gpu_list`, one tower per entry.

    Where CUDA_VISIBLE_DEVICES is set it is left alone and the entries index what is visible; where
    it is not, the list sets it. Call this before anything else touches a GPU.

    Args:
        gpu_list: for example '0,1'.
        **environment: of `_find_devices` (for tests).

    Returns:
        Devices; of kind 'CPU' where there is no GPU.

    Raises:
        ValueError: the list is malformed or asks for a GPU that is not there.
    """
    return _find_devices(parse_gpu_list(gpu_list), f"--gpu_list={gpu_list}", **environment)


def resolve_num_gpus(num_gpus, **environment):
    """Finds the devices of `--num_gpus`: the first of the visible ones, one tower each.

    Args:
        num_gpus: number of towers.
        **environment: of `_find_devices` (for tests).

    Returns:
        Devices; of kind 'CPU', with as many towers, where there is no GPU.

    Raises:
        ValueError: it is not positive, or more than there are.
    """
    if num_gpus < 1:
        raise ValueError(f"--num_gpus={num_gpus} must be 1 or more; pass the number of towers")
    return _find_devices(tuple(range(num_gpus)), f"--num_gpus={num_gpus}", **environment)


def resolve_gpu(gpu, **environment):
    """Finds the device of `--gpu`.

    Args:
        gpu: number of the GPU among the visible ones.
        **environment: of `_find_devices` (for tests).

    Returns:
        Devices with one tower; of kind 'CPU' where there is no GPU.

    Raises:
        ValueError: it is negative, or there is no such GPU.
    """
    if gpu < 0:
        raise ValueError(f"--gpu={gpu} must be 0 or more; pass the number of a GPU")
    return _find_devices((gpu,), f"--gpu={gpu}", **environment)


def _find_devices(indices, asked, *, environ=os.environ, list_gpus=None, gpu_nodes=None):
    """Finds GPUs by their numbers.

    Args:
        indices: numbers of the GPUs.
        asked: the flag and its value, for the message.
        environ: the environment, changed in place when it lacks CUDA_VISIBLE_DEVICES.
        list_gpus: function that returns the GPUs that TensorFlow sees.
        gpu_nodes: device files of the GPUs in this machine, seen by TensorFlow or not.
    """
    list_gpus = list_gpus or (lambda: tf.config.list_physical_devices("GPU"))
    gpu_nodes = glob.glob("/dev/nvidia[0-9]*") if gpu_nodes is None else gpu_nodes
    set_by_user = "CUDA_VISIBLE_DEVICES" in environ
    if not set_by_user:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in indices)
    found = len(list_gpus())
    if found == 0 and (set_by_user or not gpu_nodes):
        return Devices("CPU", tuple(range(len(indices))))
    wanted = indices if set_by_user else tuple(range(len(indices)))
    if max(wanted) >= found:
        where = (
            f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']}"
            if set_by_user
            else f"this machine ({len(gpu_nodes)} GPU device file(s))"
        )
        usable = f"only 0 to {found - 1}" if found else "none"
        raise ValueError(
            f"{asked} asks for {len(indices)} GPU(s); TensorFlow found {found} with"
            f" {where}; ask for ones that exist ({usable}), or set CUDA_VISIBLE_DEVICES= to"
            " run on the CPU"
        )
    return Devices("GPU", wanted)
