"""A link inside an output folder is replaced; what it points to stays as it was."""

import json

import pytest

from unsloth_pack.checkpoints.atomic import atomic_dir
from unsloth_pack.report.callbacks import MetricsFile


@pytest.fixture
def precious(tmp_path):
    """A file that nothing here may change."""
    path = tmp_path / "precious"
    path.write_text('{"kind": "mine"}\n')
    yield path
    assert path.read_text() == '{"kind": "mine"}\n'
    assert path.stat().st_nlink == 1


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def holds_only(folder, *names):
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    return not any(path.is_symlink() for path in folder.rglob("*"))


@pytest.mark.parametrize("name", ["metrics.jsonl", ".metrics.jsonl.aside"])
def test_metrics(name, out, precious):
    """Lines that a link held stay, in a file of its own."""
    (out / name).symlink_to(precious)
    metrics = MetricsFile(out)
    metrics.write("log", step=1)
    kinds = [json.loads(line)["kind"] for line in metrics.path.read_text().splitlines()]
    assert kinds == (["mine"] if name == "metrics.jsonl" else []) + ["log"]
    assert holds_only(out, "metrics.jsonl")


def test_saved_folders(out, precious, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (out / "config.json").symlink_to(precious)
    (out / "other").symlink_to(tmp_path / "elsewhere")
    with atomic_dir(out) as folder:
        (folder / "other" / "deep").mkdir(parents=True)
        for name in ("config.json", "other/weights", "other/deep/weights"):
            (folder / name).write_text("new")
    assert holds_only(out, "config.json", "other")
    assert (out / "other" / "deep" / "weights").read_text() == "new"
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_that_is_named_may_be_a_link(is_there, out, tmp_path):
    if is_there:
        (out / "old").write_text("old")
    else:
        out.rmdir()
    (tmp_path / "link").symlink_to(out)
    with atomic_dir(tmp_path / "link") as folder:
        (folder / "new").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert holds_only(out, "new", *(["old"] if is_there else []))
