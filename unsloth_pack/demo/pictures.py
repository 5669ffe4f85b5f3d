"""The vision demo's data: pictures of shapes, drawn from a seed, with dense captions.

A picture is a grid of cells; one to three of them have a shape, as large as its cell or half as large. A
fine-tune teaches dense captions, JSON with a box for each shape; the bundled base model knows captions in
words. Nothing is stored: the same seed draws the same pixels.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_CELLS = 3  # of a picture, down and across
CELL = 32  # pixels a side; the bundled model has one token for each cell
COLOURS = {
    "red": (214, 40, 40),
    "green": (34, 150, 60),
    "blue": (40, 80, 210),
    "yellow": (240, 200, 30),
    "purple": (130, 50, 160),
    "orange": (240, 130, 30),
}
KINDS = ("circle", "square", "triangle", "diamond")
SIZES = {"small": 16, "large": CELL}  # pixels a side
MARK = "<image>"  # the picture's place in a question
DENSE = "Give a dense caption."

_ROWS_OF_SPLIT = {"train": 2000, "test": 100}
_CELLS = (2, MOST_CELLS)
_COUNTS = (1, 2, 3)
_PAPER = ((250, 250, 250), (225, 225, 225), (200, 205, 215), (235, 225, 205))

Turn = dict[str, str]  # `role` and `content`
Row = dict[str, Any]  # `messages` with `<image>` in the question, and `images`


@dataclass(frozen=True, order=True)
class Shape:
    """A shape in the middle of a cell. Shapes sort by row, then by column."""

    row: int
    column: int
    size: str
    colour: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.colour} {self.kind}"

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom in pixels; right and bottom are exclusive."""
        side = SIZES[self.size]
        left, top = (CELL * place + (CELL - side) // 2 for place in (self.column, self.row))
        return left, top, left + side, top + side


@dataclass(frozen=True)
class Scene:
    """The content of a picture."""

    rows: int
    columns: int
    paper: int  # the number of the background
    shapes: tuple[Shape, ...]  # sorted; at most one in a cell

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.columns * CELL, self.rows * CELL

    def dense_caption(self) -> str:
        """Describe the shapes as JSON, with boxes in thousandths of width and height."""
        labels = [{"label": shape.name, "bbox_2d": self.thousandths(shape)} for shape in self.shapes]
        return json.dumps(labels)

    def thousandths(self, shape: Shape) -> list[int]:
        """Return the box of a shape: left, top, right, bottom, each from 0 to 1000."""
        return [round(1000 * edge / side) for edge, side in zip(shape.box, self.size * 2, strict=True)]

    def draw(self) -> Image:
        """Draw the picture in RGB."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", self.size, _PAPER[self.paper])
        pen = ImageDraw.Draw(image)
        for shape in self.shapes:
            left, top, right, bottom = shape.box
            right, bottom = right - 1, bottom - 1  # Pillow draws the last pixel too
            across, down = (left + right) / 2, (top + bottom) / 2
            fill = COLOURS[shape.colour]
            match shape.kind:
                case "circle":
                    pen.ellipse((left, top, right, bottom), fill)
                case "square":
                    pen.rectangle((left, top, right, bottom), fill)
                case "triangle":
                    pen.polygon([(across, top), (right, bottom), (left, bottom)], fill)
                case "diamond":
                    pen.polygon([(across, top), (right, down), (across, bottom), (left, down)], fill)
        return image


def scenes(seed: int) -> Iterator[Scene]:
    """Generate endless scenes, which may repeat."""
    rng = Random(seed)
    while True:
        rows, columns = rng.choice(_CELLS), rng.choice(_CELLS)
        places = rng.sample([*product(range(rows), range(columns))], rng.choice(_COUNTS))
        shapes = [
            Shape(*place, rng.choice([*SIZES]), rng.choice([*COLOURS]), rng.choice(KINDS))
            for place in sorted(places)
        ]
        yield Scene(rows, columns, rng.randrange(len(_PAPER)), tuple(shapes))


def distinct(drawn: Iterator[Scene], count: int, seen: set[Scene]) -> list[Scene]:
    """Return the next `count` scenes outside `seen`, and add them to it."""
    new: list[Scene] = []
    while len(new) < count:
        scene = next(drawn)
        if scene not in seen:
            seen.add(scene)
            new.append(scene)
    return new


def turns(question: str, answer: str) -> list[Turn]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def dense_row(scene: Scene) -> Row:
    """Build a row of the fine-tune's task."""
    return picture_row(scene, turns(DENSE, scene.dense_caption()))


def picture_row(scene: Scene, conversation: list[Turn]) -> Row:
    """Build a conversation about a picture: `messages`, and `images` with the bytes of a PNG file."""
    file = io.BytesIO()
    scene.draw().save(file, "PNG")
    first, *others = conversation
    first = first | {"content": MARK + first["content"]}
    return {"messages": [first, *others], "images": [file.getvalue()]}


def heldout_scenes() -> list[Scene]:
    """Return the scenes of the split `test`, which no model trained on, not even the bundled one."""
    return distinct(scenes(seed=1), _ROWS_OF_SPLIT["test"], set())


def dense_rows(split: str) -> list[Row]:
    """Return the rows of a split of the fine-tune; no picture is in both splits."""
    held_out = heldout_scenes()
    if split == "test":
        return [dense_row(scene) for scene in held_out]
    return [dense_row(scene) for scene in distinct(scenes(seed=2), _ROWS_OF_SPLIT[split], {*held_out})]
