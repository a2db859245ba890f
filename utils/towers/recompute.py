"""`--recompute`: less memory, because activations are computed again when gradients need them.

The forward pass of a tower is cut into segments. What crosses a cut is kept; the rest of a segment
is let go, and computed once more, by copies of its ops, as soon as the gradients have come back to
the segment's end. The last segment is kept as it is. Layers know nothing of this: the cuts are
found in the graph. What must happen once does: stateful ops (variables, random numbers, exchanges
between towers) have no copies, and the updates that layers register are those of the first pass.
What does not depend on variables, such as the sampled points of a cloud, is kept too.
"""

import math

import tensorflow.compat.v1 as tf

from utils.towers import compat

_CONTROL_FLOW = frozenset({"Switch", "Merge", "Enter", "Exit", "NextIteration"})


def gradients(loss, variables, aggregation_method):
    """As `tf.gradients`, with copies of the forward pass for the backward pass.

    Args:
        loss: float32 scalar.
        variables: list of resource variables.
        aggregation_method: of `tf.gradients`.

    Returns:
        List of gradients, None where a variable has no influence on the loss.

    Raises:
        ValueError: there is a `tf.cond` or a loop of TensorFlow 1 between variables and loss.
    """
    segments = _segments(_forward_ops(loss, variables))
    if not segments:
        return [None] * len(variables)
    number = {op: i for i, segment in enumerate(segments) for op in segment}
    upstream = {loss.ref(): tf.ones_like(loss)}
    found = [[] for _ in variables]
    for i in reversed(range(len(segments))):
        inputs = {
            tensor.ref(): tensor
            for op in segments[i]
            for tensor in op.inputs
            if number.get(tensor.op, i) < i and tensor.dtype.is_floating
        }
        ends = [tensor for op in segments[i] for tensor in op.outputs if tensor.ref() in upstream]
        if not ends:
            continue
        arrived = [upstream[tensor.ref()] for tensor in ends]
        copies = {} if i == len(segments) - 1 else _copy(segments[i], arrived)
        ends = [copies.get(tensor.ref(), tensor) for tensor in ends]
        # What later segments sent to an input goes along, so that it is the first summand.
        sent = [tensor for key, tensor in inputs.items() if key in upstream]
        grads = tf.gradients(
            [*ends, *sent],
            [*inputs.values(), *variables],
            [*arrived, *(upstream[tensor.ref()] for tensor in sent)],
            stop_gradients=list(inputs.values()),
            gate_gradients=True,
            aggregation_method=aggregation_method,
        )
        upstream.update((key, grad) for key, grad in zip(inputs, grads) if grad is not None)
        for known, grad in zip(found, grads[len(inputs) :]):
            if grad is not None:
                known.append(grad)
    return [_total(grads) for grads in found]


def _forward_ops(loss, variables):
    """Ops between the variables and the loss, in the order in which they were built."""
    handles = {variable.handle.op for variable in variables}
    ancestors, pending = set(), [loss.op]
    while pending:
        op = pending.pop()
        if op not in ancestors:
            ancestors.add(op)
            pending.extend(tensor.op for tensor in op.inputs)
    forward, depends = [], set(handles)
    for op in loss.graph.get_operations():
        if op in ancestors and any(tensor.op in depends for tensor in op.inputs):
            depends.add(op)
            if op.type != "ReadVariableOp":
                forward.append(op)
            if op.type in _CONTROL_FLOW:
                raise ValueError(
                    f"{op.name} belongs to a tf.cond or a loop, which cannot be computed again for"
                    " gradients; build the tower without it (is_training as a Python bool), or do"
                    " not recompute"
                )
    return forward


def _segments(ops):
    """Cuts a list of ops where few tensors cross, into about as many pieces as each has ops."""
    place = {op: i for i, op in enumerate(ops)}
    crossing = [0] * (len(ops) + 1)  # number of tensors from before to after each op
    for i, op in enumerate(ops):
        for tensor in op.outputs:
            used = [place[consumer] for consumer in tensor.consumers() if consumer in place]
            for cut in range(i + 1, max(used, default=i) + 1):
                crossing[cut] += 1
    longest = math.isqrt(len(ops))
    segments, start = [], 0
    while start < len(ops):
        end = len(ops)
        if end - start > longest:
            candidates = range(start + (longest + 1) // 2, start + longest + 1)
            end = min(candidates, key=lambda cut: (crossing[cut], -cut))
        segments.append(ops[start:end])
        start = end
    return segments


def _must_run_once(op):
    """Whether it has a state, or calls a function, whose gradient knows its first run only."""
    return op.op_def.is_stateful or any(attribute.type == "func" for attribute in op.op_def.attr)


def _copy(ops, after):
    """Copies of the ops that may run twice, to be run after the tensors `after`.

    Returns:
        {reference of a tensor: its copy}.
    """
    copies = {}
    with tf.name_scope("recompute"), tf.control_dependencies(after):
        for op in ops:
            if not _must_run_once(op):
                inputs = [copies.get(tensor.ref(), tensor) for tensor in op.inputs]
                copy = compat.copy_op(op, inputs)
                copies.update(
                    (old.ref(), new) for old, new in zip(op.outputs, copy.outputs, strict=True)
                )
    return copies


def _total(grads):
    if len(grads) < 2:
        return grads[0] if grads else None
    total = tf.convert_to_tensor(grads[0])
    for grad in grads[1:]:
        total += grad
    return total
