"""`report.html` of real runs: packed, padded, resumed; and no run fails because of it."""

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

from unsloth_pack.cli import run_report

ADDRESS = re.compile(r"(?:https?:)?//[\w.-]+\.\w+|url\((?!#)|\bsrc=|@import|<script|<link", re.IGNORECASE)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


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


def test_a_resumed_run_shows_all_updates(train, finished):
    assert ": 3 updates" in shown(finished)
    shutil.rmtree(finished / "checkpoint-3")
    (finished / "report.html").unlink()
    assert train("--resume", max_steps=3, save_steps=1) == 0
    assert ": 3 updates" in shown(finished)


def test_a_run_does_not_fail_because_of_it(train, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run_report, "page_of", lambda *_: 1 / 0)
    assert train(max_steps=1) == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert "report.html was not written: ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.draws
@pytest.mark.skipif(not BROWSER, reason=f"none of {', '.join(BROWSERS)} is installed")
def test_a_browser_shows_it(train, tmp_path):
    """The browser finds no name in the network, and logs what the page asks for."""
    assert train("--sample_packing", max_steps=2, logging_steps=1) == 0
    page = tmp_path / "out" / "report.html"
    shown, logged = in_a_browser(page, tmp_path)
    assert shown.count("<svg") == 3
    assert "CONSOLE" not in logged
    asking = tmp_path / "asking.html"
    asking.write_text(page.read_text().replace("<h1>", '<img src="http://example.com/a.png"><h1>'))
    assert "violates the following Content Security Policy" in in_a_browser(asking, tmp_path)[1]


def in_a_browser(page, tmp_path):
    """The page's elements, and what the browser logs about it."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'browser'}"]
    command = [BROWSER, *options, "--enable-logging=stderr", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr
