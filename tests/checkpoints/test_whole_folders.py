"""Saves into folders that are there: on mounts, beside other saves, killed in the middle."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from unsloth_pack.checkpoints.atomic import atomic_dir, claimed, holds
from unsloth_pack.errors import InputError

HEX = "0a1b2c3d"


def save(target, *names, text="new", **options):
    with atomic_dir(target, **options) as folder:
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_text(text)


def content(folder):
    found = (path for path in folder.rglob("*") if path.is_file() and ".aside" not in str(path))
    return {str(path.relative_to(folder)): path.read_text() for path in found}


@pytest.mark.parametrize("is_there", [True, False])
def test_the_next_save_removes_what_a_killed_one_left_and_nothing_else(is_there, tmp_path):
    out = tmp_path / "out"
    names = [".out.0a1b2c3d.aside", ".out.5-merged.0a1b2c3d.aside", ".out.aside", ".other.0a1b2c3d.aside"]
    if is_there:
        names += ["out/.0a1b2c3d.aside", "out/.other.0a1b2c3d.aside"]
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("half")
    save(out, "file")
    gone = {"out/.0a1b2c3d.aside"} if is_there else {".out.0a1b2c3d.aside"}
    assert {name for name in names if not (tmp_path / name).exists()} == gone


@pytest.mark.parametrize("is_there", [True, False])
def test_two_saves_at_once_leave_each_other_alone(is_there, tmp_path):
    out = tmp_path / "out"
    if is_there:
        out.mkdir()
        (out / "notes").write_text("mine")
    with atomic_dir(out) as first:
        (first / "a").write_text("first")
        if is_there:
            save(out, "a", text="second")
        assert (first / "a").read_text() == "first"
        assert holds(out if is_there else tmp_path)
    assert content(out)["a"] == "first"


OLD = {"config.json": "old", "a": "old", "stale": "old", "notes": "old"}
NEW = {"config.json": "new", "a": "new", "z": "new", "notes": "old"}


def old_folder(path):
    path.mkdir()
    for name, text in OLD.items():
        (path / name).write_text(text)
    return path


def save_over(folder):
    save(folder, "a", "config.json", "z", last=["config.json"], replaces=lambda name: name == "stale")


def at_rename(number, act):
    """Plants `act` before the rename of that number."""
    rename, made = os.rename, []

    def counted(source, goal):
        made.append(goal)
        if len(made) == number:
            act()
        rename(source, goal)

    return counted


@pytest.mark.parametrize("number", range(1, 8))
def test_a_kill_in_the_middle_never_leaves_a_mixture(number, tmp_path):
    out = old_folder(tmp_path / "out")
    run = multiprocessing.get_context("fork").Process(target=killed_at, args=(number, out))
    run.start()
    run.join()
    assert run.exitcode == (9 if number < 7 else 0)
    found = content(out)
    assert found["notes"] == "old"
    if number == 1:
        assert found == OLD
    elif number == 7:
        assert found == NEW
    else:
        assert "config.json" not in found
    save_over(out)
    assert content(out) == NEW
    assert holds(out) == sorted(NEW) == sorted(os.listdir(out))


def killed_at(number, out):
    os.rename = at_rename(number, lambda: os._exit(9))
    save_over(out)
    os._exit(0)


@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("error", [KeyboardInterrupt, PermissionError])
def test_a_failure_in_the_middle_changes_nothing(number, error, tmp_path, monkeypatch):
    out = old_folder(tmp_path / "out")

    def fail():
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", at_rename(number, fail))
        with pytest.raises((KeyboardInterrupt, InputError)):
            save_over(out)
    assert content(out) == OLD
    assert not list(tmp_path.rglob("*.aside"))


# Claims


def test_a_claim_ends_with_its_context(tmp_path):
    folder = tmp_path / "deep" / "out"
    with claimed(folder):
        with pytest.raises(InputError, match="is in use by another run"), claimed(folder):
            pass
        assert folder.is_dir()
    assert not (tmp_path / "deep").exists()
    with claimed(folder):
        (folder / "file").write_text("kept")
    assert content(tmp_path) == {"deep/out/file": "kept"}


CLAIMING = """
import os, sys, time
from pathlib import Path
from unsloth_pack.checkpoints.atomic import claimed

with claimed(Path(sys.argv[1])):
    if not os.fork():
        print(os.getpid(), flush=True)  # the child has begun
    time.sleep(600)
"""


def test_a_claim_ends_with_its_process(tmp_path):
    run = subprocess.Popen([sys.executable, "-c", CLAIMING, tmp_path / "out"], stdout=subprocess.PIPE)
    child = int(run.stdout.readline())
    with pytest.raises(InputError, match="is in use"), claimed(tmp_path / "out"):
        pass
    run.kill()
    run.wait()
    try:
        with claimed(tmp_path / "out"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_refuses_nobody(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / f".{HEX}.aside").mkdir()
    with claimed(tmp_path), claimed(tmp_path):
        save(tmp_path, "a")
    assert content(tmp_path) == {"a": "new"}
    assert (tmp_path / f".{HEX}.aside").exists()  # another process may be writing it
