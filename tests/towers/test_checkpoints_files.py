"""Finding checkpoints and preparing their folder, on files made up here; no TensorFlow needed."""

import contextlib
import errno
import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest

from utils.towers import checkpoint_files
from utils.towers.checkpoint_files import (
    CheckpointError,
    candidate_checkpoints,
    checkpoint_step,
    prepare_checkpoint_directory,
)
from utils.towers.checkpoint_files import (
    checkpoint_files as files_of,
)
from utils.towers.run_lock import LOCK_FILE

TABLE_END = bytes.fromhex("57fb808b247547db")


def touch(folder, *names, content=b"x"):
    os.makedirs(folder, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(content)


def make_checkpoint(folder, base, shards=1):
    touch(
        folder,
        f"{base}.index",
        f"{base}.meta",
        *[f"{base}.data-{i:05d}-of-{shards:05d}" for i in range(shards)],
    )


def bases(prefixes):
    return [os.path.basename(prefix) for prefix in prefixes]


# ---- finding ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        "{d}/ckpt",
        "{d}/ckpt/",
        "./ckpt",
        "./ckpt//",
        "ckpt/model.ckpt-10",
        "{d}/ckpt/model.ckpt-10",
        "ckpt/model.ckpt-10.index",
        "ckpt/model.ckpt-10.meta",
        "ckpt/model.ckpt-10.data-00000-of-00001",
        "ckpt/checkpoint",
    ],
)
def test_every_way_to_name_a_checkpoint(tmp_path, monkeypatch, given):
    make_checkpoint(tmp_path / "ckpt", "model.ckpt-10")
    touch(tmp_path / "ckpt", "checkpoint", content=b'model_checkpoint_path: "model.ckpt-10"\n')
    monkeypatch.chdir(tmp_path)
    found = candidate_checkpoints(given.format(d=tmp_path))
    assert found == [str(tmp_path / "ckpt" / "model.ckpt-10")]


def test_home_directory_is_expanded(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "ckpt", "model.ckpt-1")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bases(candidate_checkpoints("~/ckpt")) == ["model.ckpt-1"]


def test_newest_first_by_number_and_not_by_letters(tmp_path):
    for step in (9, 100, 10):
        make_checkpoint(tmp_path, f"model.ckpt-{step}")
    assert bases(candidate_checkpoints(tmp_path)) == [
        "model.ckpt-100",
        "model.ckpt-10",
        "model.ckpt-9",
    ]


@pytest.mark.parametrize(
    "state",
    [
        b'model_checkpoint_path: "/home/somebody/else/model.ckpt-5"\n',
        b'model_checkpoint_path: "C:\\\\runs\\\\model.ckpt-5"\n',
        b'model_checkpoint_path: "model.ckpt-77"\n',
        b"model_checkpoint_pa",
        b"\xff\xfe\x00",
        b"",
        None,
    ],
)
def test_state_file_is_only_a_hint(tmp_path, state):
    make_checkpoint(tmp_path, "model.ckpt-5")
    make_checkpoint(tmp_path, "model.ckpt-6")
    if state is not None:
        touch(tmp_path, "checkpoint", content=state)
    assert bases(candidate_checkpoints(tmp_path)) == ["model.ckpt-6", "model.ckpt-5"]


def test_state_file_decides_between_two_series(tmp_path):
    make_checkpoint(tmp_path, "model.ckpt-5")
    make_checkpoint(tmp_path, "other-900")
    touch(tmp_path, "checkpoint", content=b'model_checkpoint_path: "model.ckpt-5"\n')
    assert bases(candidate_checkpoints(tmp_path)) == ["model.ckpt-5", "other-900"]


def test_name_without_step(tmp_path):
    make_checkpoint(tmp_path, "model.ckpt")
    assert bases(candidate_checkpoints(tmp_path)) == ["model.ckpt"]
    assert checkpoint_step(tmp_path / "model.ckpt") is None
    assert checkpoint_step(tmp_path / "model.ckpt-12") == 12


def test_name_without_step_stands_for_the_newest_where_there_is_none_of_that_name(tmp_path):
    for name in ("model.ckpt-9", "model.ckpt-10", "other-900", "model.ckpt-11"):
        make_checkpoint(tmp_path, name)
    (tmp_path / "model.ckpt-11.index").unlink()
    assert bases(candidate_checkpoints(tmp_path / "model.ckpt")) == [
        "model.ckpt-10",
        "model.ckpt-9",
    ]
    make_checkpoint(tmp_path, "model.ckpt")
    assert bases(candidate_checkpoints(tmp_path / "model.ckpt")) == ["model.ckpt"]


def test_incomplete_checkpoints_are_passed_over_with_a_notice(tmp_path, caplog):
    make_checkpoint(tmp_path, "model.ckpt-1")
    make_checkpoint(tmp_path, "model.ckpt-2", shards=2)
    make_checkpoint(tmp_path, "model.ckpt-3", shards=3)
    make_checkpoint(tmp_path, "model.ckpt-4")
    (tmp_path / "model.ckpt-3.data-00001-of-00003").unlink()
    (tmp_path / "model.ckpt-4.index").unlink()
    assert bases(candidate_checkpoints(tmp_path)) == ["model.ckpt-2", "model.ckpt-1"]
    assert "model.ckpt-3.data-00001-of-00003 is missing" in caplog.text
    assert "model.ckpt-4.index is missing" in caplog.text


def test_incomplete_prefix_is_an_error_that_names_the_file(tmp_path):
    make_checkpoint(tmp_path, "model.ckpt-1")
    (tmp_path / "model.ckpt-1.data-00000-of-00001").unlink()
    with pytest.raises(CheckpointError, match="model.ckpt-1.data-00000-of-00001 is missing"):
        candidate_checkpoints(tmp_path / "model.ckpt-1")


def test_empty_folder_and_folder_of_other_things(tmp_path):
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}, files seen: none"):
        candidate_checkpoints(tmp_path)
    touch(tmp_path, "events.out", "notes.txt")
    (tmp_path / "sub").mkdir()
    with pytest.raises(CheckpointError, match="files seen: events.out, notes.txt, sub/"):
        candidate_checkpoints(f"{tmp_path}/")
    touch(tmp_path, *[f"{i:03d}.jpg" for i in range(500)])
    with pytest.raises(CheckpointError, match="and 491 more"):
        candidate_checkpoints(tmp_path)


def test_wrong_names(tmp_path):
    make_checkpoint(tmp_path, "model.ckpt-10")
    with pytest.raises(CheckpointError, match="model.ckpt-1, files seen.*model.ckpt-10.index"):
        candidate_checkpoints(tmp_path / "model.ckpt-1")
    with pytest.raises(
        CheckpointError, match="no checkpoint .*model.ckpt-1, there is no folder .*nowhere"
    ):
        candidate_checkpoints(tmp_path / "nowhere" / "model.ckpt-1")
    with pytest.raises(CheckpointError, match="empty"):
        candidate_checkpoints("")
    with pytest.raises(CheckpointError, match="TensorFlow takes for a pattern"):
        candidate_checkpoints(tmp_path / "run[1]")
    with pytest.raises(CheckpointError, match="URL"):
        candidate_checkpoints("gs://bucket/run")


def test_v1_file_by_name_and_in_a_folder(tmp_path):
    touch(tmp_path, "resnet_v1_50.ckpt", content=b"\0" * 100 + TABLE_END)
    assert bases(candidate_checkpoints(tmp_path / "resnet_v1_50.ckpt")) == ["resnet_v1_50.ckpt"]
    assert bases(candidate_checkpoints(tmp_path)) == ["resnet_v1_50.ckpt"]
    make_checkpoint(tmp_path, "model.ckpt-3")  # a training beside the weights it started from
    assert bases(candidate_checkpoints(tmp_path)) == ["model.ckpt-3"]


def test_files_that_are_no_checkpoints_are_named(tmp_path):
    touch(tmp_path, "a.txt", content=b"hello\n")
    touch(tmp_path, "a.ckpt", content=b"<!DOCTYPE html><html>quota exceeded</html>")
    touch(tmp_path, "b.ckpt", content=b"")
    touch(tmp_path, "c.ckpt", content=bytes(range(256)) * 4)
    touch(tmp_path, "d.h5", content=b"\x89HDF\r\n\x1a\n" + b"\0" * 100)
    touch(tmp_path, "e.ckpt", content=b"version https://git-lfs.github.com/spec/v1\n")
    touch(tmp_path, "f.pb", content=b"\x0a\x10graph")
    with tarfile.open(tmp_path / "g.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.txt")
    with tarfile.open(tmp_path / "h.tar", "w") as archive:
        archive.add(tmp_path / "a.txt", "a.txt")
    with zipfile.ZipFile(tmp_path / "i.zip", "w") as archive:
        archive.write(tmp_path / "a.txt")
    np.savez(tmp_path / "j.npz", a=1)
    expected = {
        "a.txt": "a text file",
        "a.ckpt": "a web page",
        "b.ckpt": "an empty file",
        "c.ckpt": "no TensorFlow checkpoint",
        "d.h5": "HDF5",
        "e.ckpt": "Git LFS",
        "f.pb": "a graph and not a checkpoint",
        "g.tar.gz": "gzip archive; unpack it",
        "h.tar": "tar archive; unpack it",
        "i.zip": "zip file",
        "j.npz": "NumPy .npz",
    }
    for name, words in expected.items():
        with pytest.raises(CheckpointError, match=f"{name} is .*{words}") as caught:
            candidate_checkpoints(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_files_of_a_checkpoint_and_of_no_other(tmp_path):
    make_checkpoint(tmp_path, "model.ckpt-1", shards=2)
    make_checkpoint(tmp_path, "model.ckpt-10")
    touch(tmp_path, "model.ckpt-1.readers.npz", "model.ckpt-1.txt")
    assert bases(files_of(tmp_path / "model.ckpt-1", [".readers.npz"])) == [
        "model.ckpt-1.index",
        "model.ckpt-1.meta",
        "model.ckpt-1.data-00000-of-00002",
        "model.ckpt-1.data-00001-of-00002",
        "model.ckpt-1.readers.npz",
    ]


@contextlib.contextmanager
def lock_holder(folder):
    """A process that holds the lock of a folder."""
    program = "import sys; from utils.towers.run_lock import FolderLock; "
    program += "lock = FolderLock(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    root = pathlib.Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program, folder],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


# ---- preparing the folder ---------------------------------------------------------------------


@pytest.mark.parametrize("slash", ["", "/"])
def test_folder_is_made(tmp_path, slash):
    place = prepare_checkpoint_directory(f"{tmp_path}/a/b{slash}", restore=False)
    assert place[:3] == (str(tmp_path / "a" / "b"), None, None)
    assert os.listdir(place.path) == [LOCK_FILE]


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("relative", [False, True])
def test_what_is_in_the_folder_moves_aside(tmp_path, monkeypatch, caplog, slash, relative):
    make_checkpoint(tmp_path / "run", "model.ckpt-1")
    before = sorted(os.listdir(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    given = ("./run" if relative else str(tmp_path / "run")) + slash
    place = prepare_checkpoint_directory(given, restore=False)
    assert place.path == str(tmp_path / "run") and os.listdir(place.path) == [LOCK_FILE]
    assert sorted(os.listdir(place.moved_to)) == before
    assert os.path.dirname(place.moved_to) == str(tmp_path)
    assert place.moved_to in caplog.text


def test_moved_aside_twice_in_one_second(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files.time, "strftime", lambda _: "20200102-030405")
    places = []
    for _ in range(3):
        make_checkpoint(tmp_path / "run", "model.ckpt-1")
        places.append(prepare_checkpoint_directory(tmp_path / "run", restore=False))
    assert bases(place.moved_to for place in places) == [
        "run.20200102-030405",
        "run.20200102-030405-1",
        "run.20200102-030405-2",
    ]
    assert all(len(os.listdir(place.moved_to)) == 3 for place in places)


@pytest.mark.parametrize("restore", [True, False])
def test_folder_of_a_running_training_is_refused(tmp_path, restore):
    make_checkpoint(tmp_path / "run", "model.ckpt-1")
    before = sorted(os.listdir(tmp_path / "run"))
    with lock_holder(tmp_path / "run") as holder:
        with pytest.raises(CheckpointError, match=f"--log_dir .*/run .*process {holder.pid} on "):
            prepare_checkpoint_directory(tmp_path / "run", restore, flag="--log_dir")
        assert os.listdir(tmp_path) == ["run"]
        assert sorted(os.listdir(tmp_path / "run")) == sorted([*before, LOCK_FILE])
        holder.kill()
        holder.wait()
        place = prepare_checkpoint_directory(tmp_path / "run", restore, flag="--log_dir")
    assert os.path.isfile(tmp_path / "run" / LOCK_FILE)
    assert place.moved_to is None or LOCK_FILE not in os.listdir(place.moved_to)


def test_messages_name_the_flag(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path, restore in [
        ("file", False),
        ("file", True),
        ("", False),
        ("/", False),
        ("file/x", 0),
    ]:
        given = tmp_path / path if path else ""
        with pytest.raises(CheckpointError, match="--log_dir") as caught:
            prepare_checkpoint_directory(given, restore, protected=[tmp_path], flag="--log_dir")
        assert "checkpoint_path" not in str(caught.value)


def test_restoring_moves_nothing(tmp_path):
    make_checkpoint(tmp_path / "run", "model.ckpt-1")
    place = prepare_checkpoint_directory(tmp_path / "run", restore=True)
    assert place.moved_to is None and os.listdir(tmp_path) == ["run"]


def test_restoring_from_nowhere_makes_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="no folder .*run to restore from"):
        prepare_checkpoint_directory(tmp_path / "run", restore=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("refused", [errno.EBUSY, errno.EXDEV, errno.EACCES])
def test_folder_that_cannot_be_renamed(tmp_path, monkeypatch, refused):
    """A mount point, such as a container's volume: its files move into a sub-folder."""
    run = tmp_path / "run"
    make_checkpoint(run, "model.ckpt-1")
    (run / "lost+found").mkdir()
    rename = os.rename

    def rename_no_mount_point(source, target):
        if source == str(run):
            raise OSError(refused, os.strerror(refused), source)
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_no_mount_point)
    place = prepare_checkpoint_directory(run, False, run / "model.ckpt-1")
    assert os.path.dirname(place.moved_to) == str(run)
    moved = os.path.basename(place.moved_to)
    assert sorted(os.listdir(run)) == sorted([LOCK_FILE, moved, "lost+found"])
    assert candidate_checkpoints(place.pretrained_model_path)

    again = prepare_checkpoint_directory(run, False, place.pretrained_model_path)
    assert again.moved_to is None, "nothing but what was moved aside before"

    make_checkpoint(run, "model.ckpt-2")
    third = prepare_checkpoint_directory(run, False, place.pretrained_model_path)
    assert third.moved_to not in (None, place.moved_to)
    assert candidate_checkpoints(third.pretrained_model_path) == [
        os.path.join(place.moved_to, "model.ckpt-1")
    ]


def test_files_that_cannot_be_moved(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "run", "model.ckpt-1")

    def refuse(source, _):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), source)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match="cannot move .*run aside: Read-only file system"):
        prepare_checkpoint_directory(tmp_path / "run", restore=False)
    assert len(os.listdir(tmp_path / "run")) >= 3


@pytest.mark.parametrize(
    "pretrained",
    ["run/model.ckpt-1", "run/", "run", "run/best/model.ckpt-7", "run/model.ckpt-1.index"],
)
def test_pretrained_checkpoint_in_the_folder_is_found_at_its_new_place(
    tmp_path, monkeypatch, pretrained
):
    make_checkpoint(tmp_path / "run", "model.ckpt-1")
    make_checkpoint(tmp_path / "run" / "best", "model.ckpt-7")
    monkeypatch.chdir(tmp_path)
    expected = bases(candidate_checkpoints(pretrained))
    place = prepare_checkpoint_directory("run/", False, pretrained)
    assert place.pretrained_model_path.startswith(place.moved_to)
    assert bases(candidate_checkpoints(place.pretrained_model_path)) == expected


def test_pretrained_checkpoint_elsewhere_keeps_its_path(tmp_path):
    make_checkpoint(tmp_path / "run", "model.ckpt-1")
    make_checkpoint(tmp_path / "run2", "model.ckpt-2")  # a name that begins alike
    given = str(tmp_path / "run2" / "model.ckpt-2")
    assert prepare_checkpoint_directory(tmp_path / "run", False, given)[1] == given


def test_pretrained_checkpoint_that_is_none_moves_nothing(tmp_path):
    make_checkpoint(tmp_path / "run", "model.ckpt-1")
    with pytest.raises(CheckpointError, match="no checkpoint .*resnet"):
        prepare_checkpoint_directory(tmp_path / "run", False, tmp_path / "resnet_v1_50.ckpt")
    assert os.listdir(tmp_path) == ["run"]


def test_link_stays_and_its_target_moves(tmp_path):
    make_checkpoint(tmp_path / "disk" / "run", "model.ckpt-1")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    pretrained = tmp_path / "link" / "model.ckpt-1"
    place = prepare_checkpoint_directory(tmp_path / "link", False, pretrained)
    assert os.path.dirname(place.moved_to) == str(tmp_path / "disk")
    assert (tmp_path / "link").is_symlink() and os.listdir(place.path) == [LOCK_FILE]
    assert candidate_checkpoints(place.pretrained_model_path)


def test_paths_that_must_not_move(tmp_path, monkeypatch):
    data = tmp_path / "all" / "data"
    touch(data, "img_1.jpg")
    work = tmp_path / "project" / "work"
    touch(work, "script.py")
    home = tmp_path / "home" / "me"
    touch(home, ".profile")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for path, reason in [
        ("/", "is the root directory"),
        (".", "is the current directory"),
        ("..", "contains the current directory"),
        (tmp_path, "contains"),
        ("~", "is the home directory"),
        (data, f"is {data}"),
        (data.parent, f"contains {data}"),
        (os.path.dirname(checkpoint_files.__file__), "contains this program"),
    ]:
        with pytest.raises(CheckpointError, match=reason):
            prepare_checkpoint_directory(path, False, protected=[str(data) + "/", None, ""])
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    inside = prepare_checkpoint_directory(data / "run", False, protected=[data])
    assert inside.path == str(data / "run")


def test_protected_path_behind_a_link(tmp_path):
    touch(tmp_path / "data", "img_1.jpg")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with pytest.raises(CheckpointError, match="must not be moved"):
        prepare_checkpoint_directory(tmp_path / "link", False, protected=[tmp_path / "data"])


def test_file_in_the_way(tmp_path):
    touch(tmp_path, "run")
    for restore in (False, True):
        with pytest.raises(CheckpointError, match="run is a file; a folder is required"):
            prepare_checkpoint_directory(tmp_path / "run", restore)
    with pytest.raises(CheckpointError, match="cannot make the folder .*Not a directory"):
        prepare_checkpoint_directory(tmp_path / "run" / "inner", restore=False)


@pytest.mark.parametrize("restore", [False, True])
def test_folder_that_cannot_be_written(tmp_path, monkeypatch, restore):
    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpoint_files.tempfile, "TemporaryFile", refuse)
    with pytest.raises(CheckpointError, match=f"cannot write to {tmp_path}: Read-only"):
        prepare_checkpoint_directory(tmp_path, restore)
