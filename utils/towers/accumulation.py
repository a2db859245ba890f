"""Gradients added up over several batches before one update, each tower for itself."""

import tensorflow.compat.v1 as tf

COLLECTION = "accumulated_gradients"


class Accumulators:
    """Sums of a tower's gradients over batches, weighted by the batches' samples.

    The sums are on the towers' devices, so that nothing travels until the update. They are in no
    checkpoint: a training is saved after an update, when they are zero.

    Attributes:
        add_op: op that adds the gradients of one batch; there after `totals`.
        samples_before: int32 scalar, samples of the batches added up before the one at hand.

    Args:
        place: utils.towers.devices.Devices.
        inputs: tensor whose first axis is the batch of all towers.
    """

    def __init__(self, place, inputs):
        self._place = place
        self._sums = []
        self.add_op = None
        with tf.device(place.host):
            self._samples = tf.cast(tf.shape(inputs)[0], tf.float32)
            self._seen = _zero_variable("accumulated_gradients/samples", [])
            self._seen_before = self._seen.read_value()
            self.samples_before = tf.cast(self._seen_before, tf.int32)

    def totals(self, tower_grads):
        """Gradients of the mean loss over the batches added up and the one at hand.

        Args:
            tower_grads: K lists of N (gradient, variable) pairs, of the batch at hand.

        Returns:
            The same lists with dense gradients; None stays None.
        """
        with tf.device(self._place.host):
            all_samples = self._seen_before + self._samples
        with tf.control_dependencies([self._seen_before]):  # what it was before this batch
            adds = [self._seen.assign_add(self._samples, read_value=False)]
        totals = []
        for tower, grads in enumerate(tower_grads):
            totals.append([])
            for grad, variable in grads:
                if grad is None:
                    totals[-1].append((None, variable))
                    continue
                with tf.device(self._place.tower_name(tower)):
                    weighted = tf.convert_to_tensor(grad) * self._samples
                    sums = _zero_variable(
                        f"accumulated_gradients/{tower}/{variable.op.name}", grad.shape
                    )
                    adds.append(sums.assign_add(weighted, read_value=False))
                    totals[-1].append(((sums.read_value() + weighted) / all_samples, variable))
                self._sums.append(sums)
        self.add_op = tf.group(*adds)
        return totals

    def clear(self):
        """A new op that sets all sums to zero, under the control dependencies of the caller."""
        return tf.group(
            *(v.assign(tf.zeros(v.shape), read_value=False) for v in [self._seen, *self._sums])
        )


def _zero_variable(name, shape):
    return tf.get_variable(
        name,
        shape,
        tf.float32,
        tf.zeros_initializer(),
        trainable=False,
        collections=[COLLECTION],
        use_resource=True,
    )
