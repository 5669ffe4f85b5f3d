"""`report.html` of real runs: packed, padded, resumed; and no run fails because of it."""

import json
import re

import numpy as np
import pytest
from cli_runs import read_metrics

from unsloth_pack.cli import run_report

ADDRESS = re.compile(r"(?:https?:)?//[\w.-]+\.\w+|url\((?!#)|\bsrc=|@import|<script|<link", re.IGNORECASE)


def shown(out):
    return (out / "report.html").read_text()


@pytest.mark.draws
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
def test_a_run_leaves_a_page(is_packed, train, tmp_path):
    assert train(max_steps=3, logging_steps=1, sample_packing=is_packed) == 0
    text = shown(tmp_path / "out")
    assert not ADDRESS.search(text)
    assert text.count("<svg") == (3 if is_packed else 2)


def test_the_row_that_is_drawn_counts_all_but_first_tokens(train, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(run_report, "page_of", lambda *arguments: seen.append(arguments[3]) or "")
    texts = [{"text": word * 9} for word in ("ab", "b", "abc", "c")]
    (tmp_path / "text.json").write_text(json.dumps(texts))
    assert train(dataset=tmp_path / "text.json", sample_packing=True, max_steps=1) == 0
    (row,) = seen
    assert len(row.lengths) > 1
    assert np.flatnonzero(~row.is_counted).tolist() == np.cumsum([0, *row.lengths[:-1]]).tolist()


def test_a_run_does_not_fail_because_of_it(train, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run_report, "page_of", lambda *_: 1 / 0)
    assert train(max_steps=1) == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert "report.html was not written: ZeroDivisionError" in capsys.readouterr().out


def test_trackers_get_the_figures_and_files_of_a_run_and_never_end_it(train, monkeypatch, capsys, tmp_path):
    """A tracker of our own stands for those that may not be installed."""
    seen, out = [], tmp_path / "out"
    monkeypatch.setattr(run_report, "begin_trackers", lambda *_: [lambda *results: seen.append(results)])
    assert train(max_steps=1, sample_packing=True) == 0
    ((figures, files, pictures),) = seen
    assert [path.name for path in files] == ["report.html", "metrics.jsonl", "README.md"]
    assert [path.name for path in pictures] == ["packed_row.png"]
    (summary,) = read_metrics(out)["summary"]
    assert figures["run/last_loss"] == summary["last_loss"]
    assert figures["run/ledger/tokens_read"] == summary["ledger"]["tokens_read"]
    assert 0 < figures["run/fill"] <= 1
    monkeypatch.setattr(run_report, "begin_trackers", lambda *_: [lambda *_: 1 / 0])
    assert train("--overwrite_output_dir", max_steps=1) == 0
    assert "a tracker got no results: ZeroDivisionError" in capsys.readouterr().out
