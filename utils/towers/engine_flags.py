"""The flags that every training script has in common: how towers share, compute and are fed.

    engine_flags.define()                         # in a script's define_flags(), below its own
    options = engine_flags.options_from_flags(FLAGS)
    options, place = engine_flags.settle(options, place, cluster, FLAGS)  # raises, before a graph

Each is off by default: the default is what the originals do.
"""

import dataclasses

from absl import flags

INPUTS = ("feed", "queue")
VARIABLE_UPDATES = ("parameter_server", "replicated")
PARAMETER_DEVICES = ("cpu", "gpu")
LR_SCALINGS = ("none", "linear")
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
COMPRESSIONS = ("none", "float16")
LARGEST_NUMBER = 10**9  # of the flags that count something
FLAG_OF = {"async_updates": "async"}  # field -> flag, where they differ


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """The values of the flags, see `define`; the defaults are theirs."""

    input: str = "feed"
    input_queue_size: int = 2
    input_queue_megabytes: int = 0
    variable_update: str = "parameter_server"
    local_parameter_device: str = "cpu"
    sync_bn: bool = False
    accumulate_steps: int = 1
    clip_norm: float = 0.0
    lr_scaling: str = "none"
    base_batch: int = 0
    warmup_steps: int = 0
    compute_dtype: str = "float32"
    compress_gradients: str = "none"
    recompute: bool = False
    xla: bool = False
    ps_hosts: tuple[str, ...] = ()
    worker_hosts: tuple[str, ...] = ()
    job_name: str = ""
    task_index: int = 0
    async_updates: bool = False
    backup_workers: int = 0
    cluster_timeout: int = 60

    @property
    def replicated(self):
        """Whether every tower has a copy of the variables."""
        return self.variable_update == "replicated"

    def place_variables(self, place):
        """The Devices with the variables where the flags want them.

        Args:
            place: utils.towers.devices.Devices.
        """
        where = "tower0" if self.local_parameter_device == "gpu" else "host"
        return dataclasses.replace(place, variables="own" if self.replicated else where)

    def learning_rate_factor(self, tower_batch, num_towers):
        """What `--lr_scaling` multiplies the learning rate by.

        Args:
            tower_batch: samples of a tower.
            num_towers: towers of all workers.

        Returns:
            Samples of an update over `base_batch`, or over those of one tower; 1 without scaling.
        """
        if self.lr_scaling == "none":
            return 1
        return tower_batch * num_towers * self.accumulate_steps / (self.base_batch or tower_batch)


DEFAULTS = EngineOptions()


def define(flag_values=flags.FLAGS):
    """Defines the flags.

    Args:
        flag_values: absl FlagValues that get them.
    """
    default = DEFAULTS
    positive = {"lower_bound": 1, "upper_bound": LARGEST_NUMBER}
    flags.DEFINE_enum(
        "input", default.input, INPUTS, "how batches get into the graph", flag_values=flag_values
    )
    flags.DEFINE_integer(
        "input_queue_size",
        default.input_queue_size,
        "batches in the queue of --input=queue",
        **positive,
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "input_queue_megabytes",
        default.input_queue_megabytes,
        "most memory of the queue of --input=queue, MB; 0: as --input_queue_size says",
        0,
        LARGEST_NUMBER,
        flag_values=flag_values,
    )
    flags.DEFINE_enum(
        "variable_update",
        default.variable_update,
        VARIABLE_UPDATES,
        "one copy of the variables, or one on each tower's device with an all-reduce",
        flag_values=flag_values,
    )
    flags.DEFINE_enum(
        "local_parameter_device",
        default.local_parameter_device,
        PARAMETER_DEVICES,
        "device of the one copy of the variables; gpu: that of tower 0",
        flag_values=flag_values,
    )
    flags.DEFINE_boolean(
        "sync_bn",
        default.sync_bn,
        "batch norm with the statistics of all towers together",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "accumulate_steps",
        default.accumulate_steps,
        "batches whose gradients make one update",
        1,
        10**6,
        flag_values=flag_values,
    )
    flags.DEFINE_float(
        "clip_norm",
        default.clip_norm,
        "largest global norm of the gradients; 0: any",
        0.0,
        flag_values=flag_values,
    )
    flags.DEFINE_enum(
        "lr_scaling",
        default.lr_scaling,
        LR_SCALINGS,
        "linear: the learning rate times the samples of an update over --base_batch",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "base_batch",
        default.base_batch,
        "samples of an update that the learning rate is meant for; 0: those of one tower",
        0,
        LARGEST_NUMBER,
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "warmup_steps",
        default.warmup_steps,
        "steps in which the rate climbs from unscaled to scaled",
        0,
        LARGEST_NUMBER,
        flag_values=flag_values,
    )
    flags.DEFINE_enum(
        "compute_dtype",
        default.compute_dtype,
        COMPUTE_DTYPES,
        "of convolutions and matrix products; weights stay float32, float16 scales the loss",
        flag_values=flag_values,
    )
    flags.DEFINE_enum(
        "compress_gradients",
        default.compress_gradients,
        COMPRESSIONS,
        "type of the gradients on their way between devices",
        flag_values=flag_values,
    )
    flags.DEFINE_boolean(
        "recompute",
        default.recompute,
        "less memory: activations are computed again for gradients",
        flag_values=flag_values,
    )
    flags.DEFINE_boolean("xla", default.xla, "towers compiled by XLA", flag_values=flag_values)
    flags.DEFINE_list("ps_hosts", "", "host:port of each parameter server", flag_values=flag_values)
    flags.DEFINE_list(
        "worker_hosts",
        "",
        "host:port of each worker; the first is the chief",
        flag_values=flag_values,
    )
    flags.DEFINE_string(
        "job_name", default.job_name, "what this process is: ps or worker", flag_values=flag_values
    )
    flags.DEFINE_integer(
        "task_index",
        default.task_index,
        "number of this process in its job",
        0,
        flag_values=flag_values,
    )
    flags.DEFINE_boolean(
        "async",
        default.async_updates,
        "workers do not wait for each other",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "backup_workers",
        default.backup_workers,
        "slowest workers that a step does not wait for",
        0,
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "cluster_timeout",
        default.cluster_timeout,
        "seconds to wait for a host that cannot be reached",
        **positive,
        flag_values=flag_values,
    )


def options_from_flags(values):
    """EngineOptions of parsed flags.

    Args:
        values: absl's FLAGS.

    Returns:
        EngineOptions.
    """
    found = {}
    for field in dataclasses.fields(EngineOptions):
        value = values[FLAG_OF.get(field.name, field.name)].value
        found[field.name] = tuple(value) if isinstance(value, list) else value
    return EngineOptions(**found)


def settings_of_worker(options, place, seed, **more):
    """What must be the same in all workers of a cluster, or they would train different things.

    Args:
        options: EngineOptions.
        place: utils.towers.devices.Devices.
        seed: value of --seed.
        **more: of the script; values that JSON can hold.

    Returns:
        Dict name -> value.
    """
    return {
        "variable_update": options.variable_update,
        "sync_bn": options.sync_bn,
        "accumulate_steps": options.accumulate_steps,
        "clip_norm": options.clip_norm,
        "lr_scaling": options.lr_scaling,
        "base_batch": options.base_batch,
        "warmup_steps": options.warmup_steps,
        "compute_dtype": options.compute_dtype,
        "compress_gradients": options.compress_gradients,
        "async": options.async_updates,
        "backup_workers": options.backup_workers,
        "number of towers": place.num_towers,
        "seed": seed,
        **more,
    }


# --- what does not go together -------------------------------------------------------------------


def _is(field, *values):
    """Condition: the field has one of these values; without values: it is not its default."""
    if values:
        return lambda options: getattr(options, field) in values
    return lambda options: getattr(options, field) != getattr(DEFAULTS, field)


# (field, condition, other field, condition, sentence). Both true: refused.
REFUSED = (
    (
        *("input_queue_size", _is("input_queue_size"), "input", _is("input", "feed")),
        "--input_queue_size is of no use without a queue; add --input=queue or drop it",
    ),
    (
        *("input_queue_megabytes", _is("input_queue_megabytes"), "input", _is("input", "feed")),
        "--input_queue_megabytes is of no use without a queue; add --input=queue or drop it",
    ),
    (
        *("variable_update", _is("variable_update", "replicated")),
        *("local_parameter_device", _is("local_parameter_device", "gpu")),
        "--variable_update=replicated keeps variables on every tower's device; drop"
        " --local_parameter_device=gpu",
    ),
    (
        *("variable_update", _is("variable_update", "replicated"), "ps_hosts", _is("ps_hosts")),
        "--variable_update=replicated needs no parameter servers; drop --ps_hosts, or the job ps"
        " of TF_CONFIG",
    ),
    (
        *("variable_update", _is("variable_update", "replicated")),
        *("async_updates", _is("async_updates", True)),
        "--variable_update=replicated keeps all copies equal in every step; drop --async",
    ),
    (
        *("variable_update", _is("variable_update", "replicated")),
        *("backup_workers", _is("backup_workers")),
        "--variable_update=replicated needs every worker in every step; drop --backup_workers",
    ),
    (
        *("local_parameter_device", _is("local_parameter_device", "gpu")),
        *("ps_hosts", _is("ps_hosts")),
        "--ps_hosts keep the variables; drop --local_parameter_device=gpu",
    ),
    (
        *("sync_bn", _is("sync_bn", True), "ps_hosts", _is("ps_hosts")),
        "--sync_bn needs all towers in every step, which workers with parameter servers do not"
        " promise; use --variable_update=replicated without --ps_hosts",
    ),
    (
        *("sync_bn", _is("sync_bn", True), "xla", _is("xla", True)),
        "--sync_bn exchanges statistics inside the tower, which XLA cannot compile; drop --xla",
    ),
    (
        *("warmup_steps", _is("warmup_steps"), "lr_scaling", _is("lr_scaling", "none")),
        "--warmup_steps climbs to a scaled learning rate; add --lr_scaling=linear or drop it",
    ),
    (
        *("base_batch", _is("base_batch"), "lr_scaling", _is("lr_scaling", "none")),
        "--base_batch is the batch that a scaled learning rate starts from; add"
        " --lr_scaling=linear or drop it",
    ),
    (
        *("compute_dtype", _is("compute_dtype", "float16"), "ps_hosts", _is("ps_hosts")),
        "--compute_dtype=float16 skips steps that overflow, on which workers with parameter"
        " servers do not agree; use --compute_dtype=bfloat16",
    ),
    (
        *("recompute", _is("recompute", True), "xla", _is("xla", True)),
        "--recompute has no effect on what --xla compiles; drop one of them",
    ),
    (
        *("async_updates", _is("async_updates", True), "backup_workers", _is("backup_workers")),
        "--backup_workers are for workers that wait for each other; drop --async",
    ),
)


def check(options, place, bn_updates):
    """Refuses options that do not go together.

    Args:
        options: EngineOptions.
        place: the towers' Devices.
        bn_updates: the script's absl Flag --bn_updates.

    Raises:
        ValueError: one sentence that names the flag to change.
    """
    for _, first, _, second, sentence in REFUSED:
        if first(options) and second(options):
            raise ValueError(sentence)
    if options.sync_bn and bn_updates.value != bn_updates.default:
        raise ValueError(
            f"--sync_bn gives all towers the same statistics; drop --bn_updates={bn_updates.value}"
        )
    if options.local_parameter_device == "gpu" and place.kind != "GPU":
        raise ValueError(
            "--local_parameter_device=gpu needs a GPU, and none is visible; use"
            " --local_parameter_device=cpu"
        )
    if options.worker_hosts and not options.ps_hosts and not options.replicated:
        raise ValueError(
            "workers without parameter servers have the variables themselves; add"
            " --variable_update=replicated or --ps_hosts"
        )
    if options.worker_hosts and options.backup_workers >= len(options.worker_hosts):
        raise ValueError(
            f"--backup_workers={options.backup_workers} leaves none of"
            f" {len(options.worker_hosts)} workers to wait for; pass a smaller number"
        )
    if not options.ps_hosts:
        for field in ("async_updates", "backup_workers"):
            if getattr(options, field) != getattr(DEFAULTS, field):
                flag = FLAG_OF.get(field, field)
                raise ValueError(f"--{flag} needs parameter servers; add --ps_hosts or drop it")


def settle(options, place, cluster, values):
    """Checks the options, and says where towers and variables are.

    Args:
        options: EngineOptions.
        place: utils.towers.devices.Devices of this process.
        cluster: utils.towers.cluster.Cluster in which it is a worker, or None.
        values: absl's FLAGS, of which --seed and --bn_updates matter as well.

    Returns:
        Tuple (options, place): with the hosts of the cluster, and the Devices in it.

    Raises:
        ValueError: the options do not go together; one sentence that names the flag to change.
    """
    if cluster:
        options, place = cluster.options(options), cluster.devices(place)
        if values["seed"].value is None:
            raise ValueError(
                "the workers of a cluster divide one order of the data, so they need the same"
                " --seed; pass for example --seed=0 to all"
            )
    check(options, place, values["bn_updates"])
    return options, options.place_variables(place)
