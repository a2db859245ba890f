"""`--variable_update=replicated`: every tower has the trainable variables on its own device.

Tower 0's are the variables themselves: they alone are initialized, saved and restored, under the
names they always have. Tower i's copies are named `replica_<i>/...` and are in the collection
REPLICA_VARIABLES only; so are their optimizer's slots. All copies start equal, get the same
gradients and so stay equal, bit by bit, without being sent around.

    place = dataclasses.replace(place, variables="own")
    replicas = Replicas(place, [make_optimizer() for _ in range(place.num_towers)])
    group = collectives.CollectiveGroup(place.num_towers)
    for i in range(place.num_towers):
        with replicas.tower_variables(i), context.tower_context(place, i) as tower:
            loss = tower_loss(..., reuse_variables)  # reuse_variables: True after tower 0
            tower_grads.append(replicas.compute_gradients(i, loss))
        towers.append(tower)
    copies = collectives.mean_gradients(group, place, tower_grads)  # [K][N] (gradient, variable)
    group.check()
    with tf.device(place.variable_device(0)):  # averages are of tower 0's alone
        train_op.build_train_op(replicas, copies, global_step, towers, ...)  # as its optimizer
    synchronize = replicas.synchronize_op()
    ...
    session.run(initialize)  # or restore
    session.run(synchronize)

Variables that are not trained, such as the moving statistics of batch norm, have no copies: they
are with tower 0. Which towers' batches count for them is a rule of its own (`bn_updates` of
`utils.towers.train_op`), which copies would not follow; and a training step never reads them.
"""

import contextlib
import functools

import tensorflow.compat.v1 as tf

REPLICA_VARIABLES = "replica_variables"


class Replicas:
    """The towers' copies of the trainable variables, and an optimizer for each.

    Takes the place of a tf.train.Optimizer in `train_op.build_train_op`.

    Args:
        devices: utils.towers.devices.Devices with variables='own'.
        optimizers: K objects of the same tf.train.Optimizer, because each counts its own steps.

    Raises:
        ValueError: the devices put variables elsewhere, or there is not one optimizer a tower.
    """

    def __init__(self, devices, optimizers):
        if devices.variables != "own":
            raise ValueError(
                f"variables={devices.variables} leaves no place for copies; pass Devices with"
                " variables='own'"
            )
        if len(optimizers) != devices.num_towers:
            raise ValueError(
                f"{len(optimizers)} optimizer(s) for {devices.num_towers} towers; pass one a tower"
            )
        self._devices = devices
        self._optimizers = optimizers
        self._copies = [{} for _ in optimizers]  # per tower: name of the variable -> copy
        self._regularization_losses = [[] for _ in optimizers]

    @contextlib.contextmanager
    def tower_variables(self, tower):
        """What is built within uses tower `tower`'s variables; to be entered before its context.

        `tf.get_variable` gives copies of trainable variables. The regularizer of a copy makes the
        loss of that tower: `GraphKeys.REGULARIZATION_LOSSES` holds the tower's own within, and
        again when it is entered a second time; outside, tower 0's.

        Args:
            tower: number of the tower, 0 first.

        Yields:
            Nothing.
        """
        if tower == 0:
            yield
            return
        losses = tf.get_collection_ref(tf.GraphKeys.REGULARIZATION_LOSSES)
        of_tower_0 = list(losses)
        losses[:] = self._regularization_losses[tower]
        try:
            with tf.variable_scope(
                tf.get_variable_scope(),
                custom_getter=functools.partial(self._get_copy, tower),
                auxiliary_name_scope=False,
            ):
                yield
        finally:
            self._regularization_losses[tower] = list(losses)
            losses[:] = of_tower_0

    def variables(self, tower):
        """A tower's variables, in the order of the trainable variables.

        Args:
            tower: number of the tower.

        Returns:
            List of variables; of tower 0 the trainable variables themselves.

        Raises:
            ValueError: tower 0 has a variable that this tower did not use.
        """
        trainable = tf.trainable_variables()
        if tower == 0:
            return trainable
        unused = [v.op.name for v in trainable if v.op.name not in self._copies[tower]]
        if unused:
            raise ValueError(
                f"tower {tower} did not use {len(unused)} variable(s) of tower 0, first"
                f" {unused[0]}; build every tower alike, within tower_variables, and make variables"
                " with tf.get_variable"
            )
        return [self._copies[tower][v.op.name] for v in trainable]

    def compute_gradients(self, tower, loss, **keywords):
        """Gradients of a tower's loss by the tower's variables.

        Args:
            tower: number of the tower.
            loss: scalar.
            **keywords: of `tf.train.Optimizer.compute_gradients`.

        Returns:
            List of N (gradient, variable) pairs.
        """
        variables = self.variables(tower)
        return self._optimizers[tower].compute_gradients(loss, variables, **keywords)

    def apply_gradients(self, copies, global_step=None):
        """Updates every tower's variables on the tower's device.

        Args:
            copies: K lists of N (gradient, variable) pairs, with equal gradients in all towers.
            global_step: variable that counts the steps; increased by 1 after all updates.

        Returns:
            An op.
        """
        updates = []
        for tower, (optimizer, grads) in enumerate(zip(self._optimizers, copies)):
            with tf.device(self._devices.tower_device(tower)), _state_of_copies(tower):
                updates.append(optimizer.apply_gradients(grads))
        if global_step is not None:
            with tf.control_dependencies(updates), tf.device(global_step.device):
                updates.append(global_step.assign_add(1, read_value=False))
        return tf.group(*updates, name="apply_to_copies")

    def pairs(self):
        """What has copies: trainable variables, and once gradients are applied, their slots.

        Returns:
            List of (variable of tower 0, its copy).
        """
        pairs = []
        first = self._optimizers[0]
        for tower, optimizer in enumerate(self._optimizers[1:], start=1):
            variables = list(zip(self.variables(0), self.variables(tower)))
            slots = [
                (first.get_slot(variable, name), optimizer.get_slot(copy, name))
                for name in first.get_slot_names()
                for variable, copy in variables
                if first.get_slot(variable, name) is not None
            ]
            # What an optimizer has besides slots, such as Adam's powers: by name, in one order.
            others = zip(_without(first, slots, 0), _without(optimizer, slots, 1), strict=True)
            pairs += [*variables, *slots, *others]
        return pairs

    def synchronize_op(self):
        """An op that gives every copy the value of tower 0's variable.

        To be built after `apply_gradients`, and run once tower 0's variables are initialized or
        restored.
        """
        values = {}  # each is read once
        assigns = []
        for variable, copy in self.pairs():
            if variable.ref() not in values:
                with tf.device(variable.device):
                    values[variable.ref()] = variable.read_value()
            with tf.device(copy.device):
                assigns.append(copy.assign(values[variable.ref()], read_value=False))
        return tf.group(*assigns, name="synchronize_copies")

    def _get_copy(self, tower, getter, name, **keywords):
        """Custom getter of `tf.get_variable`: the tower's copy of a trainable variable."""
        variable = getter(name, **{**keywords, "regularizer": None})
        if not variable.trainable:
            return variable
        copies = self._copies[tower]
        if name not in copies:
            copies[name] = getter(
                f"replica_{tower}/{name}",
                shape=variable.shape,
                dtype=variable.dtype.base_dtype,
                initializer=tf.zeros_initializer(),  # never run: see synchronize_op
                regularizer=keywords["regularizer"],
                reuse=False,
                trainable=False,  # which would add it to the trainable variables
                collections=[REPLICA_VARIABLES],
                use_resource=True,
                constraint=keywords["constraint"],
            )
        return copies[name]


@contextlib.contextmanager
def _state_of_copies(tower):
    """Variables made within belong to the copies of a tower after the first."""
    if tower == 0:
        yield
        return

    def create(next_creator, **keywords):
        return next_creator(**{**keywords, "collections": [REPLICA_VARIABLES]})

    with contextlib.ExitStack() as stack:
        stack.enter_context(tf.name_scope(f"replica_{tower}/"))
        with tf.init_scope():  # an optimizer makes its state there, also if it is within a tf.cond
            stack.enter_context(tf.variable_creator_scope(create))
        yield


def _without(optimizer, slots, side):
    """Variables of an optimizer that are no slots, by name."""
    known = {pair[side].ref() for pair in slots}
    return [variable for variable in optimizer.variables() if variable.ref() not in known]
