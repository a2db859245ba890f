"""Which of the networks a checkpoint is of, by its variables' names and shapes."""

_FIRST_KERNELS = ("conv1/weights", "layer1/conv0/weights", "layer1/conv0_0/weights")
_WITH_NORMALS = " with normals"
_AS_SHIPPED = (
    "pointnet2_cls_msg as its repository shipped it last, with the transposed first layer"
    " (--as_shipped, in Python get_model(..., as_shipped=True))"
)


def describe_checkpoint(shapes):
    """Says which network a checkpoint is of, and with which settings.

    Args:
        shapes: {variable name: list of int}, as `CheckpointReader.shapes`.

    Returns:
        Text like 'pointnet2_cls_ssg with normals', or None for none of these networks.
    """
    model = _model(shapes)
    if model is None:
        return None
    kernel = shapes[_first_kernel(shapes)]
    if model == "pointnet_cls_basic":
        channels = kernel[1]
    elif model == "pointnet2_cls_msg" and kernel[2] not in (3, 6):
        return _AS_SHIPPED
    else:
        channels = kernel[2]
    normals = _WITH_NORMALS if channels == 6 and "_cls_" in model else ""
    return f"{model}{normals}"


def check_checkpoint(prefix, shapes, *, model, normal=False, as_shipped=False):
    """Refuses a checkpoint that is known to be of another of these networks.

    Args:
        prefix: path of the checkpoint, for the message.
        shapes: of `describe_checkpoint`.
        model: name of the network's module.
        normal: whether it is with normals.
        as_shipped: of pointnet2_cls_msg.get_model.

    Raises:
        ValueError: it is; one sentence.
    """
    found = describe_checkpoint(shapes)
    wanted = model
    if as_shipped:  # its first layer does not depend on the channels
        wanted = _AS_SHIPPED
    elif normal:
        wanted += _WITH_NORMALS
    if found not in (None, wanted):
        raise ValueError(
            f"{prefix} is of {found} and not of {wanted}; pass the flags of that network (--model,"
            " --normal, --as_shipped) or another checkpoint"
        )


def _first_kernel(shapes):
    return next((name for name in _FIRST_KERNELS if name in shapes), None)


def _model(shapes):
    first = _first_kernel(shapes)
    if first is None or len(shapes[first]) != 4:
        return None
    if first == "conv1/weights":
        return "pointnet_cls_basic" if "conv5/weights" in shapes else None
    multi_scale = first == "layer1/conv0_0/weights"
    if "fc3/weights" in shapes:
        return "pointnet2_cls_msg" if multi_scale else "pointnet2_cls_ssg"
    if multi_scale:
        return "pointnet2_part_seg_msg_one_hot" if _has_scope(shapes, "fp_layer3") else None
    if _has_scope(shapes, "fa_layer4"):
        return "pointnet2_sem_seg"
    return "pointnet2_part_seg" if _has_scope(shapes, "fa_layer3") else None


def _has_scope(shapes, scope):
    return any(name.startswith(scope + "/") for name in shapes)
