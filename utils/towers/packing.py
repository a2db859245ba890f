"""Few messages between a worker and its parameter servers: small tensors travel together.

The runtime spends about 400 bytes and a round trip on every tensor that goes from one process to
another. Most variables of a network are vectors of a few hundred bytes.
"""

import tensorflow.compat.v1 as tf

SMALL_BYTES = 64 * 2**10  # a larger tensor travels alone, as soon as it is there


def move(tensors, origins, targets):
    """Tensors on other devices, with the same bits.

    Args:
        tensors: list of tensors.
        origins: list of the device strings that they come from, one each.
        targets: list of the device strings that they go to, one each.

    Returns:
        List in the same order. Small tensors of one type, origin and target are one tensor on the
        way; what travels alone is returned as it was, for the runtime to send.
    """
    moved = list(tensors)
    for indices in _together(tensors, list(zip(origins, targets, strict=True))):
        if len(indices) > 1:
            together = [tensors[i] for i in indices]
            packed = _pack(together, origins[indices[0]])
            parts = _unpack(packed, [part.shape for part in together], targets[indices[0]])
            for i, part in zip(indices, parts, strict=True):
                moved[i] = part
    return moved


class PackedGradients:
    """Gradients on their way to the parameter servers of their variables.

    Attributes:
        pairs: list of (gradient, variable), fewer than there were: where small gradients are one
            tensor, an object stands for their variables that has what
            tf.train.SyncReplicasOptimizer asks of a variable.

    Args:
        grads: list of (gradient, variable) pairs; dense, IndexedSlices or None.
        origin: device string that they come from.
    """

    def __init__(self, grads, origin):
        self._groups = _together(
            [grad for grad, _ in grads], [variable.device for _, variable in grads]
        )
        self.pairs = []
        for indices in self._groups:
            if len(indices) == 1:
                self.pairs.append(grads[indices[0]])
            else:
                packed = _pack([grads[i][0] for i in indices], origin)
                self.pairs.append((packed, _Variables([grads[i][1] for i in indices])))

    def unpack(self, pairs):
        """(gradient, variable) pairs in the order of the beginning, on the parameter servers.

        Args:
            pairs: as `self.pairs`, with the same or other gradients.
        """
        found = {}
        for indices, (grad, target) in zip(self._groups, pairs, strict=True):
            if isinstance(target, _Variables):
                shapes = [variable.shape for variable in target.variables]
                parts = _unpack(grad, shapes, target.device)
                found.update(zip(indices, zip(parts, target.variables, strict=True), strict=True))
            else:
                found[indices[0]] = grad, target
        return [found[i] for i in range(len(found))]


class _Variables:
    """Stands for several variables of one parameter server, whose gradients are one vector.

    Attributes:
        variables: list of variables.
        name: text that differs from the name of any variable.
        device: device string of the parameter server.
    """

    def __init__(self, variables):
        self.variables = variables
        self.name = f"{variables[0].op.name}_and_{len(variables) - 1}_more"
        self.device = variables[0].device

    def get_shape(self):
        """Shape of the vector."""
        return tf.TensorShape([sum(each.shape.num_elements() for each in self.variables)])


def _together(tensors, routes):
    """Groups of indices of tensors, each of which travels as one; a large one is a group alone."""
    groups = {}
    for i, (tensor, route) in enumerate(zip(tensors, routes, strict=True)):
        key = (route, tensor.dtype) if _is_small(tensor) else i
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _is_small(tensor):
    if not isinstance(tensor, tf.Tensor) or not tensor.shape.is_fully_defined():
        return False
    return tensor.shape.num_elements() * tensor.dtype.size <= SMALL_BYTES


def _pack(tensors, device):
    with tf.name_scope("pack"), tf.device(device):
        return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def _unpack(packed, shapes, device):
    with tf.name_scope("unpack"), tf.device(device):
        parts = tf.split(packed, [shape.num_elements() for shape in shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
