"""The networks of PointNet++; each module has placeholder_inputs, get_model and get_loss."""

import importlib

CLASSIFIERS = ("pointnet2_cls_ssg", "pointnet2_cls_msg", "pointnet_cls_basic")


def load_network(model, as_shipped=False):
    """Imports a network.

    Args:
        model: name of its module.
        as_shipped: see `pointnet2_cls_msg.get_model`.

    Returns:
        (module, settings): settings are further arguments of its get_model.

    Raises:
        ValueError: as_shipped for another network.
    """
    if as_shipped and model != "pointnet2_cls_msg":
        raise ValueError(f"as_shipped is a variant of pointnet2_cls_msg, not of {model}; leave it")
    network = importlib.import_module(f"{__name__}.{model}")
    return network, {"as_shipped": True} if as_shipped else {}
