"""Which ops of a graph its runs need, seen at `tf.Session.run`, and who made the others."""

import collections
import contextlib
import pathlib
import unittest.mock

import tensorflow.compat.v1 as tf

ROOT = pathlib.Path(__file__).resolve().parent.parent
OWN = ("benchmarks", "data", "nets", "tests", "utils")  # beside the scripts; not an environment


@contextlib.contextmanager
def observed_runs():
    """Records what sessions run.

    Yields:
        Dict graph -> set of names of the ops that were fetched or run, filled while it lasts.
    """
    fetched = collections.defaultdict(set)
    run = tf.Session.run

    def observed(session, fetches, *args, **keywords):
        for fetch in tf.nest.flatten(fetches):
            element = session.graph.as_graph_element(fetch)
            fetched[session.graph].add(getattr(element, "op", element).name)
        return run(session, fetches, *args, **keywords)

    with unittest.mock.patch.object(tf.Session, "run", observed):
        yield fetched


def needed(graph, names):
    """The ops that some ops need: these, their inputs, what they wait for, and so on.

    Args:
        graph: tf.Graph.
        names: of ops.

    Returns:
        Set of tf.Operation.
    """
    found, waiting = set(), [graph.get_operation_by_name(name) for name in names]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
    return found


def made_in_vain(graph, needed_ops):
    """The ops that nothing needs, parted by whether the code that made them could do without.

    TensorFlow makes ops of its own beside those that were asked for: whether a variable is
    initialized, zeros for outputs that have no gradient. These come from a call, in a tower, that
    also made ops that are needed. A call that made none of them was made in vain.

    Args:
        graph: tf.Graph.
        needed_ops: set of tf.Operation.

    Returns:
        (in_vain, beside): Counter of 'file:line' of the calls in vain, one for each op, and Counter
        of the types of the other ops.
    """
    calls = collections.defaultdict(list)
    for op in graph.get_operations():
        lines = tuple(
            f"{pathlib.Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
            for frame in op.traceback
            if _is_own(pathlib.Path(frame.filename))
        )
        scope = op.name.partition("/")[0] if "/" in op.name else ""  # that of a tower, if any
        calls[scope, lines].append(op)
    in_vain, beside = collections.Counter(), collections.Counter()
    for (_, lines), ops in calls.items():
        unneeded = [op for op in ops if op not in needed_ops]
        if len(unneeded) == len(ops):
            in_vain[lines[-1]] += len(ops)
        else:
            beside.update(op.type for op in unneeded)
    return in_vain, beside


def _is_own(path):
    """Whether a file is one of the project's, which may have an environment in its folder."""
    return path.parent == ROOT or any(ROOT / folder in path.parents for folder in OWN)
