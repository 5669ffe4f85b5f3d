"""The page of a run: complete, correct, closed to the network, and never in the way of a run."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from unsloth_pack.patching.report import PatchReport
from unsloth_pack.report.html import (
    PackedRowSeen,
    draw_row,
    page_of,
    placed,
)

pytestmark = pytest.mark.draws
PATCH = PatchReport("llama", 2, "sdpa", "<why>", {"norms": "5 RMS norms"}, {"loss": "a & b"})
ROW = PackedRowSeen([5, 3], np.array([0, 1, 1, 0, 1, 0, 1, 1], bool), 10)
SEEN = (PATCH, np.array([5, 3, 9]), ROW, 9)
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
LINES[-1] |= {"peak_memory_bytes": 3 * 2**29, "mfu": 0.25, "broken_images": 0}


class Page(HTMLParser):
    """The elements and texts of a page, whose elements are closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

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
    assert not re.search(r"@import|url\(", styles)
    (policy,) = (a["content"] for tag, a in read.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    return read


def test_it_asks_nobody_and_shows_everything():
    text = page_of(LINES, *SEEN)
    shown = "".join(asks_nobody(text).texts)
    parts = ["tokens read1.2 M", "2.13.0", "5 RMS norms", "a & b", "<why>", "5, 3 tokens", "5 of 8", "null"]
    for part in (*parts, "eval", "<img src=http://evil.example/x.png>"):  # as text
        assert part in shown, part
    assert "\x1b" not in shown
    assert text.count("<svg") == 3
    assert len(re.findall(r'id="row-boundary-\d+"', text)) == 2
    assert "Held-out rows" not in shown
    ids, used = re.findall(r' id="([^"]+)"', text), re.findall(r'(?:href="|url\()#([^")]+)', text)
    assert len(set(ids)) == len(ids)
    assert set() < set(used) <= set(ids)


def test_figures_have_words_and_units_and_zeros_are_left_out():
    shown = asks_nobody(page_of(LINES, *SEEN)).texts
    told = shown[shown.index("Summary") : shown.index("Patch")]
    assert [text for text in told if text.strip()] == [
        *("Summary", "updates", "2", "seconds", "2.5"),
        *("peak memory", "1.50 GiB", "MFU", "25.0%"),
    ]


def test_a_row_of_fifty_documents_is_drawn_in_strips():
    lengths = [20, 60] * 25
    row = PackedRowSeen(lengths, np.ones(2000, bool), 2100)
    text = page_of(LINES, PATCH, np.array(lengths), row, 99)
    shown = "".join(asks_nobody(text).texts)
    assert "50 documents of 20 to 60 tokens" in shown
    assert len(re.findall(r'id="row-boundary-\d+"', text)) == 50
    strips = draw_row(row).axes
    assert [axes.get_xlim() for axes in strips] == [(0, 525), (525, 1050), (1050, 1575), (1575, 2100)]


def test_images_stand_above_their_tokens():
    numbers = np.random.default_rng(0)
    pixels = [numbers.integers(0, 256, (h, 8, 3), dtype=np.uint8) for h in (4, 8)]
    is_image = np.array([0, 1, 1, 1, 1, 0, 0, 1, 1, 0], bool)  # of four tokens, which touch, and of two
    images = placed(is_image, [2, 2, 2], [*pixels, pixels[0]])
    assert [(image.first, image.tokens) for image in images] == [(1, 2), (3, 2), (7, 2)]
    row = PackedRowSeen([6, 4], ~is_image, 12, images)
    read = asks_nobody(page_of(LINES, PATCH, np.array([6, 4]), row, 9))
    assert [tag for tag, _ in read.elements].count("image") == 3
    assert "Images have 6 of the tokens" in "".join(read.texts)
    (first, *_) = (axes for axes in draw_row(row).axes[0].child_axes)
    assert np.array_equal(first.images[0].get_array(), pixels[0])


def test_answers_of_a_demo():
    example = {"prompt": "<a>", "before": "one", "after": "two", "expected": "three"}
    line = {"kind": "demo", "exact_match_before": 0.0, "exact_match_after": 0.955, "examples": [example]}
    shown = "".join(asks_nobody(page_of([*LINES, line], *SEEN)).texts)
    for part in ("Held-out rows", "0.0% before", "95.5% after", *example.values()):
        assert part in shown
