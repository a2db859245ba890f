"""The layout holds: who may import whom, where devices are named, and that imports do nothing."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOT_LISTED = {"tests", "demo", "build"}  # not part of the code, besides hidden folders

# Of `utils` without `utils.towers`, the modules that build graphs; the others serve readers too.
GRAPH_UTILS = {"utils.tf_util", "utils.pointnet_util"}
# Of the engine, what layers may know: pending updates, and what a tower asks of them.
UNDER_LAYERS = ("utils.towers.averages", "utils.towers.layer_options")
UNDER_GRAPH_UTILS = ("nets.layers", "nets.pointnet2.ops", *UNDER_LAYERS)
DEVICE = re.compile(r"/(device:)?[cg]pu:|/device:", re.IGNORECASE)


def code_files():
    """Python files of the repository except the tests, relative to its root."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "*.py"]
    try:
        names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        files = [pathlib.PurePath(name) for name in names.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive, or no git
        files = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    return sorted(
        path
        for path in files
        if path.parts[0] not in NOT_LISTED
        and not any(part.startswith(".") for part in path.parts)
        and (ROOT / path).is_file()
    )


def module_name(path):
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(source, module, is_package=False):
    """Absolute dotted names that a module imports, anywhere in it.

    `from a import b` counts as both `a` and `a.b`, because `b` may be a module.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".") if node.level else []
            parents = parents[: len(parents) + is_package - node.level]
            base = ".".join(parents + ([node.module] if node.module else []))
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def within(name, *modules):
    return any(name == module or name.startswith(module + ".") for module in modules)


def forbidden(module, name, scripts):
    """Whether `module` must not import `name`; `scripts` are the names of all scripts."""
    is_script_import = within(name, *scripts)
    if within(module, "data"):
        others = within(name, "utils") and name != "utils"
        allowed = within(name, "utils.geometry", "utils.provider")
        return is_script_import or within(name, "tensorflow", "nets") or (others and not allowed)
    if within(module, "nets"):
        allowed = within(name, *UNDER_LAYERS, *GRAPH_UTILS) or name == "utils.towers"
        others = within(name, "utils") and name != "utils"
        return is_script_import or within(name, "data") or (others and not allowed)
    if within(module, "utils.towers"):
        others = within(name, "utils") and name != "utils" and not within(name, "utils.towers")
        return is_script_import or within(name, "nets", "data") or others
    if within(module, "utils"):
        if module in GRAPH_UTILS:
            inside = name in ("nets", "nets.pointnet2", "utils.towers")
            allowed = inside or within(name, *UNDER_GRAPH_UTILS)
            return is_script_import or (
                within(name, "nets", "data", "utils.towers") and not allowed
            )
        return is_script_import or within(name, "tensorflow", "nets", "data", "utils.towers")
    # Measurements take the scripts as they are, and nothing but their command needs them.
    measures = within(module, "benchmarks")
    return (is_script_import and name != module and not measures) or (
        within(name, "benchmarks") and not measures and module != "bench"
    )


def string_literals(source):
    """(line, text) of every string in a module, docstrings and parts of f-strings included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            yield node.lineno, text


def run_fresh(program, cwd, *arguments):
    """Output of a program in a fresh interpreter that finds the repository's modules."""
    environment = dict(
        os.environ, PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1", TF_CPP_MIN_LOG_LEVEL="2"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPTS = {module_name(path) for path in code_files() if len(path.parts) == 1}


@pytest.mark.parametrize("path", code_files(), ids=str)
def test_import_directions(path):
    module = module_name(path)
    source = (ROOT / path).read_text(encoding="utf-8")
    names = imported_names(source, module, path.name == "__init__.py")
    assert [name for name in sorted(names) if forbidden(module, name, SCRIPTS)] == []


@pytest.mark.parametrize(
    "module, source, name",
    [
        ("data.icdar", "import tensorflow.compat.v1 as tf", "tensorflow.compat.v1"),
        ("data.icdar", "def f():\n  from tensorflow import io", "tensorflow"),
        ("data.icdar", "from utils import towers", "utils.towers"),
        ("data.icdar", "from utils.nms import x", "utils.nms"),
        ("data.icdar", "from ..nets import east", "nets"),
        ("nets.east", "from utils.towers import devices", "utils.towers.devices"),
        ("nets.east", "import utils.towers.loop", "utils.towers.loop"),
        ("nets.east", "from data import icdar", "data"),
        ("utils.towers.loop", "from utils import nms", "utils.nms"),
        ("utils.towers.loop", "from .. import nms", "utils.nms"),
        ("utils.towers.loop", "import nets", "nets"),
        ("utils.towers.loop", "import multigpu_train", "multigpu_train"),
        ("utils.nms", "import tensorflow", "tensorflow"),
        ("utils.nms", "from utils.towers import compat", "utils.towers"),
        ("utils.nms", "from nets import layers", "nets.layers"),
        ("utils.tf_util", "from utils.towers import context", "utils.towers.context"),
        (
            "utils.pointnet_util",
            "from nets.pointnet2 import pointnet2_cls_ssg",
            "nets.pointnet2.pointnet2_cls_ssg",
        ),
        ("eval", "from multigpu_train import tower_loss", "multigpu_train"),
        ("eval", "from benchmarks import measure", "benchmarks"),
    ],
)
def test_forbidden_imports_are_found(module, source, name):
    names = imported_names(source, module)
    assert name in names and forbidden(module, name, {"eval", "multigpu_train"})


@pytest.mark.parametrize(
    "module, source",
    [
        ("data.icdar", "import numpy\nfrom utils import geometry\nfrom data import data_util"),
        ("nets.east", "from nets import layers\nfrom utils import tf_util\nimport tensorflow"),
        ("nets.layers", "from utils.towers.averages import add_moving_average_update"),
        ("utils.towers.loop", "from . import averages\nfrom utils.towers import compat"),
        ("utils.tf_util", "import tensorflow\nfrom utils.towers.averages import x"),
        ("utils.pointnet_util", "from nets.pointnet2.ops import x\nfrom utils import tf_util"),
        ("eval", "from utils.towers import devices\nfrom utils import nms\nfrom nets import east"),
        ("benchmarks.east_figures", "import multigpu_train\nfrom benchmarks import measure"),
    ],
)
def test_allowed_imports_pass(module, source):
    names = imported_names(source, module)
    assert not [name for name in names if forbidden(module, name, {"eval", "multigpu_train"})]


def test_devices_are_named_in_one_module_only():
    owner = pathlib.PurePath("utils/towers/devices.py")
    found = []
    for path in code_files():
        literals = string_literals((ROOT / path).read_text(encoding="utf-8"))
        found += [(path, line) for line, text in literals if DEVICE.search(text)]
    assert [f"{path}:{line}" for path, line in found if path != owner] == []
    assert any(path == owner for path, _ in found)  # the search itself works


def test_readers_and_evaluation_tools_do_not_load_tensorflow(tmp_path):
    modules = [
        module
        for module in map(module_name, code_files())
        if within(module, "data", "utils")
        and not within(module, "utils.towers")
        and module not in GRAPH_UTILS
    ]
    assert "data" in modules
    program = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('tensorflow', 'keras')])"
    )
    assert run_fresh(program, tmp_path, *modules).strip() == "[]"


def test_imports_have_no_side_effect(tmp_path):
    modules = [module_name(path) for path in code_files()]
    program = (
        "import importlib, sys, threading, multiprocessing\n"
        "from absl import flags\n"
        "modules, sys.argv = sys.argv[1:], ['program', '--no_such_flag=1']\n"
        "state = lambda: (list(flags.FLAGS), flags.FLAGS.is_parsed(), sys.argv, sys.path)\n"
        "import tensorflow as tf\n"  # its own effects do not count
        "before = repr(state())\n"
        "for module in modules:\n"
        "    importlib.import_module(module)\n"
        "assert repr(state()) == before, 'flags, arguments or search path changed'\n"
        "assert tf.executing_eagerly(), 'eager mode was turned off'\n"
        "assert not tf.compat.v1.get_default_graph().get_operations(), 'ops were built'\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not multiprocessing.active_children(), 'processes were started'\n"
    )
    assert run_fresh(program, tmp_path, *modules) == ""
    assert os.listdir(tmp_path) == []
