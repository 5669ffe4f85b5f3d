"""Gemma 3: images of one size."""

from __future__ import annotations

import math
from typing import Any

from unsloth_pack.errors import InputError
from unsloth_pack.images.tiled import TiledImages, side_of, size_of_tiles
from unsloth_pack.images.tokens import Cut


class Gemma3Images(TiledImages):
    """Gemma 3: every image becomes one square, with the same number of tokens."""

    needed = ("do_pan_and_scan", "do_resize", "size")
    own_limit = ""
    shrinks = False

    @property
    def most_pixels(self) -> int:
        return side_of(self._vision.image_size) ** 2

    def pixels_of_tokens(self, tokens: int) -> int:
        return tokens * self.most_pixels // self._of_tile

    def saved(self) -> dict[str, Any]:
        return {"image_seq_length": self._of_tile}

    def cut_from_output(self, output: Any, place: int) -> Cut:
        return Cut(whole=self._of_tile)

    def _sizes(self) -> list[tuple[str, Any, str, Any]]:
        if self._processor.do_pan_and_scan:
            problem = "the image processor's do_pan_and_scan is true, which cuts further images out of one"
            raise InputError(f"{problem}, and they are not prepared here; set it to false")
        if not self._processor.do_resize:
            problem = "the image processor's do_resize is false, and the model takes images of one size"
            raise InputError(f"{problem}; set it to true")
        return [size_of_tiles(self._processor, self._vision)]

    def _options(self, most_pixels: int | None) -> dict[str, Any]:
        return {}

    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        return Cut(whole=self._of_tile)

    @property
    def _of_tile(self) -> int:
        return math.isqrt(self._config.mm_tokens_per_image) ** 2
