import pytest
import tensorflow.compat.v1 as tf

from utils.towers import compat, devices


def resolve(gpu_list, environ, found, nodes=()):
    return devices.resolve_devices(
        gpu_list, environ=environ, list_gpus=lambda: ["gpu"] * found, gpu_nodes=list(nodes)
    )


def test_cuda_visible_devices_is_left_alone_and_indexed():
    environ = {"CUDA_VISIBLE_DEVICES": "4,6,7"}
    place = resolve("0,2", environ, found=3)
    assert place == devices.Devices("GPU", (0, 2))
    assert [place.tower_name(i) for i in (0, 1)] == ["/gpu:0", "/gpu:2"]
    assert environ == {"CUDA_VISIBLE_DEVICES": "4,6,7"}


def test_the_list_sets_cuda_visible_devices_where_nobody_did():
    environ = {}
    assert resolve("3,1", environ, found=2) == devices.Devices("GPU", (0, 1))
    assert environ == {"CUDA_VISIBLE_DEVICES": "3,1"}


@pytest.mark.parametrize(
    "environ", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0,1"}]
)
def test_no_gpu_gives_as_many_logical_cpus(environ):
    place = resolve("0,1,5", dict(environ), found=0)
    assert place == devices.Devices("CPU", (0, 1, 2))
    assert place.session_config().device_count["CPU"] == 3


def test_hidden_gpus_mean_the_cpu_only_if_the_user_hid_them():
    nodes = ["/dev/nvidia0", "/dev/nvidia1"]
    assert resolve("0", {"CUDA_VISIBLE_DEVICES": "-1"}, found=0, nodes=nodes).kind == "CPU"
    with pytest.raises(ValueError, match="found 0 with this machine .2 GPU"):
        resolve("7", {}, found=0, nodes=nodes)


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}])
def test_more_towers_than_gpus(environ):
    with pytest.raises(ValueError, match="asks for 3 GPU.*found 2"):
        resolve("0,1,2", environ, found=2, nodes=["/dev/nvidia0", "/dev/nvidia1"])


@pytest.mark.parametrize("gpu_list", ["", "a", "0,,1", "0,0", "-1", "0;1", "1.0"])
def test_malformed_list(gpu_list):
    with pytest.raises(ValueError, match="for example --gpu_list=0,1"):
        resolve(gpu_list, {}, found=8)


def test_description():
    text = devices.Devices("CPU", (0, 1)).describe(14)
    assert "2 tower(s) on /cpu:0, /cpu:1 (logical CPUs: no GPU is visible);" in text
    assert "2 tower(s) on /gpu:0, /gpu:3;" in devices.Devices("GPU", (0, 3)).describe(14)
    assert "batch 14 per tower, 28 in all" in text


@pytest.mark.parametrize(
    "variables, of_towers, words",
    [
        ("host", ["/cpu:0", "/cpu:0"], "variables on /cpu:0;"),
        ("tower0", ["/gpu:3", "/gpu:3"], "variables on /gpu:3;"),
        ("own", ["/gpu:3", "/gpu:5"], "variables on each tower's device;"),
    ],
)
def test_variables_are_where_they_are_asked_to_be(variables, of_towers, words):
    place = devices.Devices("GPU", (3, 5), variables=variables)
    assert [place.variable_device(i) for i in (0, 1)] == of_towers
    assert words in place.describe(1)
    assert place.host == "/cpu:0"


def test_ops_stay_with_the_variable_that_they_touch():
    place = devices.Devices("GPU", (3, 5), variables="own")
    with tf.Graph().as_default():
        with tf.device(place.tower_device(0)):
            variable = tf.get_variable("v", [2], use_resource=True)
        with tf.device(place.tower_device(1)):
            own = tf.get_variable("own", [2], use_resource=True)
            values = [variable.read_value(), own.read_value()]
            variable.assign(values[1] * 2.0)
        reads = [op.inputs[0].op if op.type == "Identity" else op for op in (v.op for v in values)]
        assert [variable.device, own.device] == ["/device:GPU:3", "/device:GPU:5"]
        assert [op.device for op in reads] == ["/device:GPU:3", "/device:GPU:5"]
        assert [op.type for op in reads] == ["ReadVariableOp"] * 2
        assigns = [op for op in tf.get_default_graph().get_operations() if "AssignVar" in op.type]
        assert [op.device for op in assigns] == ["/device:GPU:3", "/device:GPU:5", "/device:GPU:3"]


@pytest.mark.parametrize("version", ["1.15.5", "2.20.0", "2.9.1"])
def test_old_tensorflow_is_refused(version):
    with pytest.raises(ValueError, match=f"TensorFlow {version} is installed; 2.21"):
        compat.check_tensorflow(version)


@pytest.mark.parametrize("version", ["2.21.0", "2.22.0-rc1", "3.0.0"])
def test_tested_or_newer_tensorflow_passes(version):
    compat.check_tensorflow(version)


def test_num_gpus_are_the_first_of_the_visible_ones():
    environ = {}
    place = devices.resolve_num_gpus(2, environ=environ, list_gpus=lambda: ["g"] * 2, gpu_nodes=[])
    assert place == devices.Devices("GPU", (0, 1)) and environ == {"CUDA_VISIBLE_DEVICES": "0,1"}
    no_gpu = {"environ": {}, "list_gpus": list, "gpu_nodes": []}
    assert devices.resolve_num_gpus(3, **no_gpu) == devices.Devices("CPU", (0, 1, 2))
    assert devices.resolve_gpu(5, **no_gpu) == devices.Devices("CPU", (0,))


def test_messages_name_the_flag_that_was_given():
    one = {"environ": {"CUDA_VISIBLE_DEVICES": "0"}, "list_gpus": lambda: ["g"], "gpu_nodes": []}
    with pytest.raises(ValueError, match="--num_gpus=2 asks for 2 GPU.*found 1.*only 0 to 0"):
        devices.resolve_num_gpus(2, **one)
    with pytest.raises(ValueError, match="--gpu=1 asks for 1 GPU.*found 1"):
        devices.resolve_gpu(1, **one)
    with pytest.raises(ValueError, match="--num_gpus=0 must be 1 or more"):
        devices.resolve_num_gpus(0, **one)
    with pytest.raises(ValueError, match="--gpu=-1 must be 0 or more"):
        devices.resolve_gpu(-1, **one)
