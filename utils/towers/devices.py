"""Which devices the towers run on, and what is placed where.

One tower per entry of `--gpu_list`. Variables live on the host; everything else that a tower builds
runs on the tower's device. Without a GPU the K towers run on K logical CPUs, through the same code.
"""

import dataclasses
import glob
import os

import tensorflow.compat.v1 as tf

HOST = "/cpu:0"

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


@dataclasses.dataclass(frozen=True)
class Devices:
    """Where K towers run.

    Attributes:
        kind: 'GPU' or 'CPU' (logical CPUs).
        indices: one device index a tower.
    """

    kind: str
    indices: tuple[int, ...]

    @property
    def num_towers(self):
        """K, the number of towers."""
        return len(self.indices)

    @property
    def host(self):
        """Device of the variables, the averaged gradients and the updates."""
        return HOST

    def tower_name(self, tower):
        """Device string of one tower, for example '/gpu:1'."""
        return f"/{self.kind.lower()}:{self.indices[tower]}"

    def tower_device(self, tower):
        """Device function of one tower, for `tf.device`.

        Variables and the ops that touch their memory go to the host, all other ops to the tower's
        device. A device that an op already asks for is kept.
        """
        tower_spec = tf.DeviceSpec.from_string(self.tower_name(tower))
        host_spec = tf.DeviceSpec.from_string(HOST)

        def place(op):
            asked = tf.DeviceSpec.from_string(op.device or "")
            default = host_spec if op.type in VARIABLE_OPS else tower_spec
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
        return config

    def describe(self, batch_size_per_tower):
        """One line for the start of a run: devices, towers, batch per tower and in all."""
        names = ", ".join(self.tower_name(i) for i in range(self.num_towers))
        why = " (logical CPUs: no GPU is visible)" if self.kind == "CPU" else ""
        return (
            f"{self.num_towers} tower(s) on {names}{why}; variables on {HOST};"
            f" batch {batch_size_per_tower} per tower,"
            f" {batch_size_per_tower * self.num_towers} in all"
        )


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
