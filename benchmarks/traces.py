"""What tf.RunMetadata says of a step: where ops and variables were, and how long devices idled."""

import re

import tensorflow.compat.v1 as tf

from utils.towers import replication

# Also names that they get when the graph is optimised, such as _FusedConv2D or _FusedBatchNormEx.
HEAVY = re.compile("Conv2D|BatchNorm")


def place_of(device):
    """(type, index) of a device string, for example ('GPU', 1)."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type, spec.device_index


def misplaced_ops(partition_graphs, place):
    """Convolutions, batch norm and their gradients that ran on no tower's device.

    Args:
        partition_graphs: of tf.RunMetadata.
        place: utils.towers.devices.Devices.

    Returns:
        (list of 'op on device', dict 'type:index' of each tower's device -> number of such ops).
    """
    numbers = {place_of(place.tower_name(i)): 0 for i in range(place.num_towers)}
    misplaced = []
    for node in _nodes(partition_graphs):
        if not HEAVY.search(node.op):
            continue
        found = place_of(node.device)
        if found in numbers:
            numbers[found] += 1
        else:
            misplaced.append(f"{node.name} on {node.device}")
    return misplaced, {f"{kind}:{index}": count for (kind, index), count in numbers.items()}


def misplaced_variables(partition_graphs, graph, place):
    """Trainable variables and their copies that are not where they were asked for.

    Args:
        partition_graphs: of tf.RunMetadata.
        graph: tf.Graph of the training.
        place: utils.towers.devices.Devices.

    Returns:
        (list of 'variable on device', number of variables). One that the step did not use counts
        as misplaced.
    """
    wanted = {
        variable.op.name: place.variable_device(0)
        for variable in graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)
    }
    for tower in range(1, place.num_towers):
        prefix = f"replica_{tower}/"
        for copy in graph.get_collection(replication.REPLICA_VARIABLES):
            if copy.op.name.startswith(prefix):
                wanted[copy.op.name] = place.variable_device(tower)
    found = {
        node.name: node.device for node in _nodes(partition_graphs) if node.op == "VarHandleOp"
    }
    misplaced = [
        f"{name} on {found.get(name, 'no device')}"
        for name, device in wanted.items()
        if name not in found or place_of(found[name]) != place_of(device)
    ]
    return misplaced, len(wanted)


def idle_share(step_stats, device):
    """Share of a step in which a device ran nothing.

    The step is from the first to the last activity of any device. Of a GPU the kernels and copies
    of its streams count, as its driver reports them; of a CPU the ops.

    Args:
        step_stats: of tf.RunMetadata, traced fully.
        device: string, as of Devices.tower_name.

    Returns:
        Share, or None where nothing was reported of the device.
    """
    wanted = place_of(device)
    begin, end, busy = None, None, []
    for stats in step_stats.dev_stats:
        name, _, stream = stats.device.partition("/stream:")
        spans = [
            (
                node.all_start_micros + node.op_start_rel_micros,
                node.all_start_micros + node.op_end_rel_micros,
            )
            for node in stats.node_stats
        ]
        if not spans:
            continue
        first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
        begin = first if begin is None else min(begin, first)
        end = last if end is None else max(end, last)
        # What the host did for a GPU is listed under the device itself, its kernels under streams.
        counts = bool(stream) if wanted[0] == "GPU" else not stream
        if counts and place_of(name) == wanted:
            busy += spans
    if not busy or end <= begin:
        return None
    return 1 - _union(busy) / (end - begin)


def _union(spans):
    """Total length of intervals that may overlap."""
    total, reached = 0, None
    for start, stop in sorted(spans):
        start = start if reached is None else max(start, reached)
        if stop > start:
            total += stop - start
            reached = stop
        elif reached is None:
            reached = start
    return total


def _nodes(partition_graphs):
    for graph in partition_graphs:
        yield from graph.node
        for function in graph.library.function:
            yield from function.node_def
