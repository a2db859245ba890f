"""The groups of figures that `bench.py` measures."""

import dataclasses

EIGEN = {"TF_ENABLE_ONEDNN_OPTS": "0"}
ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "1"}


@dataclasses.dataclass(frozen=True)
class Group:
    """Figures that are measured together, in a process of their own.

    Attributes:
        function: 'module.function' in the package `benchmarks`; returns a list of Figure.
        figures: their names, in this order.
        arguments: keyword arguments of the function.
        environment: variables of the process's environment.
        on_devices: whether the function takes the Devices to measure on, as `place`.
    """

    function: str
    figures: tuple[str, ...]
    arguments: dict = dataclasses.field(default_factory=dict)
    environment: dict = dataclasses.field(default_factory=dict)
    on_devices: bool = False


# TensorFlow's oneDNN kernels have a fixed cost a call, which towers pay K times; so engine figures
# are taken with the kernels that cost in proportion to the batch, and with oneDNN beside them.
GROUPS = {
    "generator": Group(
        "data_figures.generator", ("generator_512_many_words", "generator_512_many_words_uncached")
    ),
    "labels": Group("data_figures.label_maps", ("label_maps_512_30_quads",)),
    "readers": Group(
        "data_figures.readers",
        (
            "readers_two_threads",
            "readers_two_processes",
            "readers_two_threads_uncached",
            "readers_two_processes_uncached",
        ),
    ),
    "lanms": Group("data_figures.lanms", ("lanms_3000",)),
    "towers": Group(
        "tower_figures.tower_overhead",
        ("tower_overhead_k1", "tower_overhead_k2", "tower_overhead_k4"),
        environment=EIGEN,
    ),
    "towers_onednn": Group(
        "tower_figures.tower_overhead",
        ("tower_overhead_k1_onednn", "tower_overhead_k2_onednn", "tower_overhead_k4_onednn"),
        {"suffix": "_onednn"},
        ONEDNN,
    ),
    "equality": Group(
        "strategy_figures.equality",
        ("equality_k2", "equality_k4", "equality_sync_bn_k2", "equality_sync_bn_k4"),
        environment=EIGEN,
    ),
    "mirrored": Group(
        "strategy_figures.mirrored",
        (
            "mirrored_strategy_k2_time",
            "mirrored_strategy_k2_ops",
            "mirrored_strategy_k4_time",
            "mirrored_strategy_k4_ops",
        ),
        environment=EIGEN,
    ),
    "mirrored_onednn": Group(
        "strategy_figures.mirrored",
        ("mirrored_strategy_k2_onednn_time", "mirrored_strategy_k4_onednn_time"),
        {"suffix": "_onednn"},
        ONEDNN,
    ),
    "averaging": Group("tower_figures.averaging", ("average_gradients_k2", "average_gradients_k4")),
    "ops": Group("tower_figures.ops_linear_in_k", ("ops_linear_in_k",)),
    "build": Group("tower_figures.build_time", ("build_time_linear_in_k",)),
    "update_modes": Group(
        "tower_figures.update_modes", ("replicated_k2", "sync_bn_k2"), environment=EIGEN
    ),
    "east": Group(
        "east_figures.two_towers", ("east_two_towers", "east_two_towers_batch_8"), environment=EIGEN
    ),
    "east_onednn": Group(
        "east_figures.two_towers",
        ("east_two_towers_onednn", "east_two_towers_batch_8_onednn"),
        {"suffix": "_onednn"},
        ONEDNN,
    ),
    "input": Group(
        "input_figures.overlap",
        ("input_overlap_half", "input_overlap_nine_tenths"),
        environment=EIGEN,
    ),
    "input_waiting": Group("input_figures.waiting", ("input_waiting_share",), environment=EIGEN),
    "steps": Group("east_figures.fetches", ("runs_per_step", "bytes_fetched_per_step")),
    "summaries": Group("script_figures.summary_cost", ("summaries_every_100",), environment=EIGEN),
    "summaries_onednn": Group(
        "script_figures.summary_cost",
        ("summaries_every_100_onednn",),
        {"suffix": "_onednn"},
        ONEDNN,
    ),
    "finalised_east": Group("script_figures.finalised_east", ("graph_finalised_east",)),
    "finalised_pointnet2": Group(
        "script_figures.finalised_pointnet2", ("graph_finalised_pointnet2",)
    ),
    "grpc": Group(
        "cluster_figures.bytes_of_reference_net",
        ("grpc_bytes_reference_k1", "grpc_bytes_reference_k2"),
    ),
    "grpc_east": Group(
        "cluster_figures.bytes_of_east", ("grpc_bytes_east_k1", "grpc_bytes_east_k2")
    ),
    "memory": Group("process_figures.memory", ("resident_memory_k4", "resident_memory_steps")),
    "reader_start": Group("process_figures.reader_start", ("reader_start", "reader_memory")),
    "points": Group(
        "point_figures.speed", ("fps_1024_to_512", "ball_query_1024_to_512", "three_nn_1024_to_512")
    ),
    "points_memory": Group(
        "point_figures.memory",
        (
            "fps_1024_to_512_memory",
            "ball_query_1024_to_512_memory",
            "three_nn_1024_to_512_memory",
        ),
    ),
    "points_share": Group("point_training_figures.share", ("sampling_and_grouping_share",)),
    "points_towers": Group(
        "point_training_figures.two_towers", ("pointnet2_two_towers",), environment=EIGEN
    ),
    "points_towers_onednn": Group(
        "point_training_figures.two_towers",
        ("pointnet2_two_towers_onednn",),
        {"suffix": "_onednn"},
        ONEDNN,
    ),
    "points_ops": Group(
        "point_training_figures.ops", ("pointnet2_ops_of_a_tower", "pointnet2_ops_in_vain")
    ),
    "augmentation": Group("cloud_figures.augmentation", ("augmentation_32_clouds",)),
}


def _on_devices(function, *figures):
    return Group(f"gpu_figures.{function}", tuple(f"gpu_{f}" for f in figures), on_devices=True)


# With --gpu, each on all GPUs that are visible.
GPU_GROUPS = {
    "gpu_placement": _on_devices("placement", "placement_ops", "placement_variables"),
    "gpu_equality": _on_devices("equality", "equality", "equality_sync_bn"),
    "gpu_overhead": _on_devices("overhead", "tower_overhead"),
    "gpu_mirrored": _on_devices("mirrored", "mirrored_strategy_time", "mirrored_strategy_ops"),
    "gpu_averaging": _on_devices("averaging", "average_gradients_k2", "average_gradients_k4"),
    "gpu_input": _on_devices("overlap", "input_overlap_half", "input_overlap_nine_tenths"),
    "gpu_throughput": _on_devices(
        "throughput",
        "examples_per_second_constant",
        "examples_per_second_feed",
        "examples_per_second_queue",
        "examples_per_second_staged",
    ),
    "gpu_idle": _on_devices("idle", "idle_share_constant", "idle_share_staged"),
    "gpu_scaling": _on_devices("scaling", "scaling_cpu", "scaling_gpu", "scaling_replicated"),
}
ALL_GROUPS = {**GROUPS, **GPU_GROUPS}
