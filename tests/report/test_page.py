"""The page of a run: complete, correct, closed to the network, and never in the way of a run."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from unsloth_pack.patching.report import PatchReport
from unsloth_pack.report import html
from unsloth_pack.report.html import (
    NAME,
    PackedRowSeen,
    RunSeen,
    draw_row,
    packed_row,
    page_of,
    placed,
    with_speed,
    write_page,
)

pytestmark = pytest.mark.draws
PATCH = PatchReport("llama", 2, "sdpa", "<why>", {"norms": "5 RMS norms"}, {"loss": "a & b"})
ROW = PackedRowSeen([5, 3], np.array([0, 1, 1, 0, 1, 0, 1, 1], bool), 10)
SEEN = RunSeen(PATCH, np.array([5, 3, 9]), ROW, 9)
VOID = {"meta", "link", "br", "img", "input", "hr", "base", "source", "embed"}


def log(step, seconds, tokens, **more):
    return {"kind": "log", "step": step, "seconds": seconds, "num_tokens": tokens, **more}


LINES = [
    {
        "kind": "config",
        "options": {"model_name": "<img src=http://evil.example/x.png>", "dataset": "\x1b[31mred", "r": None},
        "versions": {"torch": "2.13.0"},
        "processes": 1,
    },
    log(1, 1.0, 100, loss=3.0, learning_rate=1e-3, memory_bytes=2**30),
    log(2, 2.0, 300, loss=2.0, learning_rate=5e-4, memory_bytes=2**30),
    log(2, 2.5, 300, eval_loss=2.2),
    {"kind": "summary", "steps": 2, "seconds": 2.5, "ledger": {"tokens_read": 1234567}, "last_loss": None},
]


class Page(HTMLParser):
    """The elements of a page, and whether each is closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def asks_nobody(text):
    """Nothing in the page makes a browser ask for anything."""
    read = Page(text)
    assert read.open == []
    for tag, attributes in read.elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "form", "a")
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "action", "background", "ping")
            assert not name.startswith("on")
            if name.endswith("href"):
                assert value.startswith("data:image/png;base64," if tag == "image" else "#")
            if name == "style":
                assert "url(" not in value.replace("url(#", "")
    styles = "".join(re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL))
    assert "@import" not in styles
    assert "url(" not in styles
    (policy,) = (a["content"] for tag, a in read.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    return read


def test_it_asks_nobody():
    read = asks_nobody(page_of(LINES, SEEN))
    shown = "".join(read.texts)
    assert "<img src=http://evil.example/x.png>" in shown  # as text
    assert "\x1b" not in shown


def test_what_it_shows():
    text = page_of(LINES, SEEN)
    shown = "".join(Page(text).texts)
    for part in ("1,234,567", "2.13.0", "5 RMS norms", "a & b", "<why>", "5, 3 tokens", "5 of 8", "eval"):
        assert part in shown, part
    assert text.count("<svg") == 3
    assert "could not be drawn" not in shown


def test_the_boundaries_of_the_row():
    text = packed_row(PackedRowSeen([2, 3, 4], np.zeros(9, bool), 12))
    assert len(re.findall(r'id="row-boundary-\d+"', text)) == 3


def test_images_stand_above_their_tokens():
    numbers = np.random.default_rng(0)
    pixels = [numbers.integers(0, 256, (h, 8, 3), dtype=np.uint8) for h in (4, 8)]
    is_image = np.array([0, 1, 1, 1, 1, 0, 0, 1, 1, 0], bool)  # of four tokens, which touch, and of two
    images = placed(is_image, [2, 2, 2], [*pixels, pixels[0]])
    assert [(image.first, image.tokens) for image in images] == [(1, 2), (3, 2), (7, 2)]
    row = PackedRowSeen([6, 4], ~is_image, 12, images)
    seen = RunSeen(PATCH, np.array([6, 4]), row, 9)
    read = asks_nobody(page_of(LINES, seen))
    assert [tag for tag, _ in read.elements].count("image") == 3
    assert "Images have 6 of the tokens" in "".join(read.texts)
    (first, *_) = (axes for axes in draw_row(row).axes[0].child_axes)
    assert np.array_equal(first.images[0].get_array(), pixels[0])


def test_answers_of_a_demo():
    example = {"prompt": "<a>", "before": "one", "after": "two", "expected": "three"}
    line = {"kind": "demo", "exact_match_before": 0.0, "exact_match_after": 0.955, "examples": [example]}
    shown = "".join(asks_nobody(page_of([*LINES, line], SEEN)).texts)
    for part in ("0.0% before", "95.5% after", *example.values()):
        assert part in shown
    assert "Held-out rows" not in page_of(LINES, SEEN)


def test_ids_are_unique():
    ids = re.findall(r' id="([^"]+)"', page_of(LINES, SEEN))
    assert len(set(ids)) == len(ids)
    used = re.findall(r'(?:href="|url\()#([^")]+)', page_of(LINES, SEEN))
    assert used
    assert set(used) <= set(ids)


def test_speed_after_a_resume():
    """The clock of the process that goes on begins at 0."""
    log_lines = [
        log(1, 10.0, 100, loss=1),
        log(2, 20.0, 200, loss=1),
        log(3, 5.0, 300, loss=1),
        log(4, 7.0, 400, loss=1),
    ]
    speeds = [line.get("tokens_per_second") for line in with_speed(log_lines)]
    assert speeds == [10.0, 10.0, None, 50.0]


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (RunSeen(PATCH, None, None, 9), "The data streams"),
        (RunSeen(PATCH, np.array([3]), None, 9), "not packed"),
    ],
)
def test_what_there_is_not(seen, says):
    assert says in page_of(LINES, seen)


@pytest.mark.parametrize("kept", [[0, -1], [0, 1, -1]], ids=["nothing logged", "one line"])
def test_short_runs(kept):
    assert "could not be drawn" not in page_of([LINES[place] for place in kept], SEEN)


def test_a_figure_that_fails_leaves_the_page(monkeypatch):
    def fail(*args):
        raise RuntimeError("no <fonts>\nhere")

    monkeypatch.setattr(html, "curves", fail)
    text = page_of(LINES, SEEN)
    assert "could not be drawn: RuntimeError: no &lt;fonts&gt;" in text
    assert text.count("<svg") == 2


def test_it_is_written_over_its_own_and_over_no_other(tmp_path):
    for _ in "ab":
        assert write_page(tmp_path, LINES, SEEN) is None
    assert (tmp_path / NAME).read_text().startswith("<!DOCTYPE html>")
    (tmp_path / NAME).write_text("mine")
    assert "somebody else" in write_page(tmp_path, LINES, SEEN)
    assert (tmp_path / NAME).read_text() == "mine"


def test_a_link_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / NAME).symlink_to(tmp_path / "theirs")
    assert write_page(tmp_path, LINES, SEEN) is None
    assert not (tmp_path / NAME).is_symlink()
    assert (tmp_path / "theirs").read_text() == "precious"


def test_a_failure_leaves_the_page_of_before(tmp_path, monkeypatch):
    write_page(tmp_path, LINES, SEEN)
    before = (tmp_path / NAME).read_bytes()
    monkeypatch.setattr(html, "_STYLE", None)
    monkeypatch.setattr(html, "_section", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_page(tmp_path, LINES, SEEN)
    assert (tmp_path / NAME).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_numbers_that_json_lacks():
    assert json.loads(json.dumps(LINES)) == LINES
    assert "null" in page_of(LINES, SEEN)
