"""The files of a checkpoint: where they lie, which belong together, what a file is that is none.

Nothing here needs TensorFlow. A V2 checkpoint is a prefix, `model.ckpt-10`, with the files
`.index`, `.data-00000-of-00001` (one or more shards) and, usually, `.meta`; a V1 checkpoint, such
as slim's `resnet_v1_50.ckpt`, is one file. The file `checkpoint` names the latest prefix; it is a
hint here and no more, since it may keep the folder's old path when the folder is moved.
"""

import collections
import os
import re
import sys
import tempfile
import time
from typing import NamedTuple

from absl import logging

from utils.towers.run_lock import LOCK_FILE, FolderInUseError, FolderLock

STATE_FILE = "checkpoint"
READER_STATE_SUFFIX = ".readers.npz"

_PART = re.compile(r"(?P<prefix>.+)\.(?P<part>index|meta|data-\d{5}-of-\d{5})")
_SHARD = re.compile(r"data-(?P<shard>\d{5})-of-(?P<count>\d{5})")
_STEP = re.compile(r"(?P<base>.+)-(?P<step>\d+)")
_STATE_LINE = re.compile(r'^\s*model_checkpoint_path:\s*"(?P<path>[^"]*)"', re.MULTILINE)
_TABLE_MAGIC = bytes.fromhex(
    "57fb808b247547db"
)  # ends every LevelDB table: V1 files and V2 indexes
_NAMES_SHOWN = 12
_FIXED_NAMES = ("lost+found",)  # stays with its file system

_SIGNATURES = (
    (0, b"\x1f\x8b", "a gzip archive"),
    (0, b"BZh", "a bzip2 archive"),
    (0, b"\xfd7zXZ", "an xz archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"Rar!", "a rar archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"PK\x03\x04", "a zip file (an archive, a NumPy .npz, a Keras or a PyTorch file)"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras weights)"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"\x89PNG", "a picture"),
    (0, b"\xff\xd8\xff", "a picture"),
    (0, b"version https://git-lfs", "a Git LFS pointer and not the file itself"),
    (0, b"\x80\x02", "a Python pickle (an old PyTorch file)"),
)


class CheckpointError(ValueError):
    """What is wrong with a checkpoint or its folder, in one sentence."""


class PreparedDirectory(NamedTuple):
    """Where a training writes.

    Attributes:
        path: absolute path of the existing, writable folder.
        pretrained_model_path: the given one, at its new place if it lay in the moved folder.
        moved_to: where the folder's earlier content is now, or None.
        lock: keeps other trainings out of the folder as long as this process lives.
    """

    path: str
    pretrained_model_path: str | None
    moved_to: str | None
    lock: FolderLock


def prepare_checkpoint_directory(
    checkpoint_path,
    restore,
    pretrained_model_path=None,
    protected=(),
    flag="checkpoint_path",
):
    """Makes the folder that a training writes to; moves what is in it aside, deletes nothing.

    Args:
        checkpoint_path: the folder, with or without a trailing slash; `~` is the home directory.
        restore: True to go on with what is in the folder, which must exist; False to start afresh:
            what is in it moves to `<folder>.<YYYYmmdd-HHMMSS>` (inside the folder where it cannot
            be renamed, as a mount point).
        pretrained_model_path: checkpoint to start from, or None; may lie in the folder. Unless
            restoring, it must exist: looked for first, so that nothing moves in vain.
        protected: paths that must not move, such as the training data; may contain None and ''.
        flag: what the messages call the folder.

    Returns:
        A PreparedDirectory.

    Raises:
        CheckpointError: the path is no folder, cannot be written to, holds something that must
            not move, or another training writes to it.
    """
    path = clean_path(checkpoint_path, flag)
    if os.path.exists(path) and not os.path.isdir(path):
        raise CheckpointError(
            f"{flag} {path} is a file; a folder is required: pass {os.path.dirname(path)} or a new"
            " name"
        )
    if restore:
        if not os.path.isdir(path):
            raise CheckpointError(
                f"there is no folder {path} to restore from; pass the folder of the training to go"
                " on with, or start a new one without restore"
            )
        _check_writable(path, flag)
        return PreparedDirectory(path, pretrained_model_path or None, None, _lock(path, flag))

    target = os.path.realpath(path)  # a link stays, what it points to moves
    _refuse_protected(path, target, protected, flag)
    if pretrained_model_path:
        candidate_checkpoints(pretrained_model_path)
    moved_to = lock = None
    if os.path.isdir(target) and _content(target):
        lock = _lock(target, flag)
        moved_to = _move_aside(target, flag)
        logging.warning("%s was not empty: its files are in %s now", path, moved_to)
    try:
        os.makedirs(target, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot make the folder {path}: {error.strerror}; pass a {flag} that can be written"
        ) from error
    _check_writable(path, flag)
    if lock is not None and not lock.is_in(target):  # it went with the folder
        os.remove(os.path.join(moved_to, LOCK_FILE))
        lock.release()
        lock = None
    lock = lock or _lock(target, flag)
    pretrained = _relocated(pretrained_model_path, target, moved_to)
    if pretrained and pretrained != pretrained_model_path:
        logging.info("pretrained checkpoint %s is %s now", pretrained_model_path, pretrained)
    return PreparedDirectory(path, pretrained, moved_to, lock)


def candidate_checkpoints(path):
    """Finds complete checkpoints: every file is there, their content is not looked at.

    Args:
        path: a folder, a prefix (`ckpt/model.ckpt-1`), one of a checkpoint's files, a V1 file, or a
            prefix without the step (`ckpt/model.ckpt`) where there is none of that very name.

    Returns:
        Prefixes, the newest (highest step) first; one for a path that names a checkpoint.

    Raises:
        CheckpointError: there is none; the sentence says what is there instead.
    """
    given = clean_path(path)
    if os.path.basename(given) == STATE_FILE and os.path.isfile(given):
        given = os.path.dirname(given)
    if os.path.isdir(given):
        return _in_folder(given)
    part = _PART.fullmatch(given)
    prefix = part["prefix"] if part else given
    folder, base = os.path.split(prefix)
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"no checkpoint {given}, there is no folder {folder}; pass the folder or the prefix of"
            " a checkpoint"
        )
    names = _list_folder(folder)
    parts = _parts(names).get(base, set())
    missing = _missing_part(parts)
    if missing is None or (not part and _is_v1(prefix)):
        return [prefix]
    if os.path.isfile(given) and not part:
        raise CheckpointError(
            f"{given} is {describe_file(given)}; a TensorFlow checkpoint is required: pass its"
            " folder or its prefix, such as model.ckpt-1000"
        )
    if parts:
        raise CheckpointError(
            f"checkpoint {prefix} is incomplete, {base}.{missing} is missing; pass another one or"
            " copy it again"
        )
    if any(_series(name) == base for name in _parts(names)):
        steps = [p for p in _in_folder(folder) if _series(os.path.basename(p)) == base]
        if steps:
            return steps
    raise CheckpointError(
        f"no checkpoint {prefix}, files seen in {folder}: {_shown(folder, names)}"
    )


def checkpoint_step(prefix):
    """Step in a checkpoint's name, or None: 10 for `model.ckpt-10`."""
    match = _STEP.fullmatch(os.path.basename(prefix))
    return int(match["step"]) if match else None


def shard_names(prefix):
    """Names of the existing data files of a V2 checkpoint, in order; empty for a V1 file."""
    folder, base = os.path.split(prefix)
    parts = _parts(_list_folder(folder)).get(base, set())
    return sorted(f"{base}.{part}" for part in parts if _SHARD.fullmatch(part))


def checkpoint_files(prefix, suffixes=()):
    """Paths of the existing files of a checkpoint, in the order in which to remove them.

    The index goes first, since a checkpoint without it is none; the side files go last, since they
    mark what is left of a removal that was interrupted.

    Args:
        prefix: path and name without the extension.
        suffixes: extensions of side files, such as '.readers.npz'.
    """
    prefix = os.fspath(prefix)
    shards = [os.path.join(os.path.dirname(prefix), name) for name in shard_names(prefix)]
    side = [prefix + suffix for suffix in suffixes]
    return [p for p in [prefix + ".index", prefix + ".meta", *shards, *side] if os.path.isfile(p)]


def describe_file(path):
    """What a file is that should have been a checkpoint: 'a gzip archive; unpack it'."""
    size = os.path.getsize(path)
    if size == 0:
        return "an empty file"
    with open(path, "rb") as file:
        head = file.read(4096)
    for offset, signature, name in _SIGNATURES:
        if head[offset : offset + len(signature)] == signature:
            return f"{name}; unpack it" if name.endswith("archive") else name
    if os.path.basename(path) in ("saved_model.pb", "frozen_inference_graph.pb") or (
        path.endswith((".pb", ".pbtxt"))
    ):
        return "a graph and not a checkpoint"
    text = head.decode("utf-8", errors="replace")
    if "\0" not in text and "\ufffd" not in text[:-4]:
        page = text.lstrip().lower().startswith(("<!doctype", "<html"))
        return "a web page (the download failed)" if page else "a text file"
    return f"no TensorFlow checkpoint ({size} bytes of something else, or a truncated V1 file)"


def clean_path(path, name="checkpoint path"):
    """Absolute path without a trailing slash, `~` expanded; `name` is for the messages.

    Raises:
        CheckpointError: the path is empty, a URL, or one that TensorFlow cannot read.
    """
    text = os.fspath(path) if path else ""
    if not text.strip():
        raise CheckpointError(f"the {name} is empty; a folder is required: pass its name")
    if "://" in text:
        raise CheckpointError(
            f"{name} {text} is a URL; a local path is required: copy or mount it and pass that"
        )
    absolute = os.path.abspath(os.path.expanduser(text))
    if "[" in absolute or "\\" in absolute:
        raise CheckpointError(
            f"{name} {absolute} has a [ or a backslash, which TensorFlow takes for a"
            " pattern; a path without is required: rename the folder or pass a link to it"
        )
    return absolute


def _in_folder(folder):
    names = _list_folder(folder)
    complete, incomplete = [], []
    for base, parts in sorted(_parts(names).items()):
        missing = _missing_part(parts)
        if missing is None:
            complete.append(base)
        elif parts != {"meta"}:  # a lone .meta is what a V1 checkpoint leaves, and no loss
            incomplete.append(f"{base} is incomplete, {base}.{missing} is missing")
    for text in incomplete:
        logging.warning("in %s, checkpoint %s", folder, text)
    if not complete:
        complete = [
            name
            for name in sorted(names)
            if re.search(r"\.ckpt(-\d+)?$", name) and _is_v1(os.path.join(folder, name))
        ]
    if not complete:
        because = f" ({'; '.join(incomplete)})" if incomplete else ""
        raise CheckpointError(
            f"no checkpoint in {folder}, files seen: {_shown(folder, names)}{because}"
        )
    hint = _state_hint(folder)

    def newest(base):
        file = os.path.join(folder, base if base in names else f"{base}.index")
        step = checkpoint_step(base)
        same_series = hint is not None and _series(base) == _series(hint)
        return same_series, -1 if step is None else step, os.path.getmtime(file)

    complete.sort(key=newest, reverse=True)
    if hint is not None and hint != complete[0]:
        logging.info(
            "the state file of %s names %s; %s is the newest complete checkpoint",
            folder,
            hint,
            complete[0],
        )
    return [os.path.join(folder, base) for base in complete]


def _series(base):
    match = _STEP.fullmatch(base)
    return match["base"] if match else base


def _state_hint(folder):
    """Last part of the path in the state file; the rest may be another machine's."""
    try:
        with open(os.path.join(folder, STATE_FILE), encoding="utf-8", errors="replace") as file:
            match = _STATE_LINE.search(file.read(65536))
    except OSError:  # none there, or not readable: it is only a hint
        return None
    return re.split(r"[/\\]", match["path"])[-1] if match else None


def _parts(names):
    """Parts of each V2 checkpoint: {'model.ckpt-1': {'index', 'meta', 'data-00000-of-00001'}}."""
    found = collections.defaultdict(set)
    for match in filter(None, map(_PART.fullmatch, names)):
        found[match["prefix"]].add(match["part"])
    return found


def _missing_part(parts):
    """One part that a checkpoint lacks, or None when it is complete."""
    if "index" not in parts:
        return "index"
    shards = collections.defaultdict(set)
    for match in filter(None, map(_SHARD.fullmatch, parts)):
        shards[int(match["count"])].add(int(match["shard"]))
    missing = "data-00000-of-00001"
    for count, have in sorted(shards.items()):
        lacking = sorted(set(range(count)) - have)
        if not lacking:
            return None
        missing = f"data-{lacking[0]:05d}-of-{count:05d}"
    return missing


def _is_v1(path):
    if not os.path.isfile(path) or os.path.getsize(path) < 48:
        return False
    with open(path, "rb") as file:
        file.seek(-len(_TABLE_MAGIC), os.SEEK_END)
        return file.read() == _TABLE_MAGIC


def _list_folder(folder):
    try:
        return set(os.listdir(folder)) - {LOCK_FILE}
    except OSError as error:
        raise CheckpointError(
            f"cannot look into {folder}: {error.strerror}; pass the folder of a checkpoint"
        ) from error


def _shown(folder, names):
    marked = sorted(n + "/" if os.path.isdir(os.path.join(folder, n)) else n for n in names)
    more = f" and {len(marked) - _NAMES_SHOWN} more" if len(marked) > _NAMES_SHOWN else ""
    return ", ".join(marked[:_NAMES_SHOWN]) + more if marked else "none"


def _contains(folder, inner):
    return os.path.commonpath([folder, inner]) == folder


def _refuse_protected(path, target, protected, flag):
    """A folder that is moved aside must not take with it what somebody else needs."""
    named = [
        (os.getcwd(), "the current directory"),
        (os.path.expanduser("~"), "the home directory"),
        (tempfile.gettempdir(), "the directory of temporary files"),
        (sys.prefix, "the Python installation"),
        (os.__file__, "the Python installation"),
        (os.path.abspath(__file__), "this program"),
    ]
    named += [(clean_path(item), f"{item}") for item in protected if item]
    if os.path.dirname(target) == target:
        raise CheckpointError(
            f"{flag} {path} is the root directory; a folder of its own is required: pass a new name"
        )
    for inner, what in named:
        if _contains(target, os.path.realpath(inner)):
            relation = "is" if os.path.realpath(inner) == target else "contains"
            raise CheckpointError(
                f"{flag} {path} {relation} {what}, which must not be moved aside; a folder"
                f" of its own is required: pass for example {os.path.join(path, 'checkpoints')}"
            )


def _content(folder):
    """Names that count as an earlier training, without what was moved aside in here before."""
    aside = re.compile(re.escape(os.path.basename(folder)) + r"\.\d{8}-\d{6}(-\d+)?")
    return [
        name
        for name in sorted(_list_folder(folder))
        if name not in _FIXED_NAMES and not aside.fullmatch(name)
    ]


def _lock(folder, flag):
    try:
        return FolderLock(folder)
    except FolderInUseError as error:
        raise CheckpointError(
            f"{flag} {folder} is in use by another training, {error}; pass another folder, or stop"
            " that one first"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot lock {folder}: {error.strerror}; pass a {flag} that can be written"
        ) from error


def _move_aside(folder, flag):
    """Renames the folder, or moves what is in it (a mount point, a parent that is read-only)."""
    name = f"{os.path.basename(folder)}.{time.strftime('%Y%m%d-%H%M%S')}"
    aside = _unused(folder + name[len(os.path.basename(folder)) :])
    try:
        os.rename(folder, aside)
        return aside
    except OSError as error:
        logging.info("cannot rename %s (%s): moving its files", folder, error.strerror)
    aside = _unused(os.path.join(folder, name))
    try:
        content = _content(folder)
        os.mkdir(aside)
        for entry in content:
            os.rename(os.path.join(folder, entry), os.path.join(aside, entry))
    except OSError as error:
        raise CheckpointError(
            f"cannot move the files of {folder} aside: {error.strerror} ({error.filename}); pass an"
            f" empty or new {flag}"
        ) from error
    return aside


def _unused(path):
    taken, number = path, 0
    while os.path.lexists(taken):
        number += 1
        taken = f"{path}-{number}"
    return taken


def _relocated(pretrained_model_path, target, moved_to):
    if not pretrained_model_path or moved_to is None:
        return pretrained_model_path or None
    real = os.path.realpath(clean_path(pretrained_model_path))
    if not _contains(target, real):
        return pretrained_model_path
    folder, base = os.path.split(real)
    beside = _list_folder(folder) if real != target and os.path.isdir(folder) else ()
    if any(name.startswith(base) for name in beside):
        return pretrained_model_path  # in what stayed, since it was moved aside in here before
    return os.path.normpath(os.path.join(moved_to, os.path.relpath(real, target)))


def _check_writable(path, flag):
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {path}: {error.strerror}; pass a {flag} that can be written"
        ) from error
