"""Where a text stands among token ids, although a tokenizer may join its ends with what is beside it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

_BESIDE = "a"  # some decoders strip a space that nothing stands before


@dataclass(frozen=True, eq=False)
class DocumentText:
    """The text of one document, and where each token of it ends.

    Args:
        ends: `[tokens]` int64, in letters of `text`.
    """

    text: str
    ends: np.ndarray

    def spans(self, marker: str) -> list[tuple[int, int]]:
        """The first token of a marker, and the first behind it, wherever it stands.

        A token that holds the end of the marker and text behind it belongs to that text. One that holds its
        begin belongs to the marker.
        """
        places, at = [], self.text.find(marker)
        while at >= 0:
            places.append(at)
            at = self.text.find(marker, at + len(marker))
        begins = np.asarray(places, np.int64)
        firsts, lasts = (np.searchsorted(self.ends, each, "right") for each in (begins, begins + len(marker)))
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


class TokenTexts:
    """The text of token ids, one by one, so that a place in the text tells the token.

    A letter that is spread over several tokens is not readable; no marker with such a letter is found.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        (self._before, *_) = tokenizer(_BESIDE, add_special_tokens=False)["input_ids"]
        self._n_before = len(self._decoded([self._before]))
        self._known: dict[int, str] = {}

    def __call__(self, ids: np.ndarray) -> DocumentText:
        """The text of a document of `[tokens]` ids."""
        parts = [self._text_of(token) for token in ids.tolist()]
        return DocumentText("".join(parts), np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts))))

    def _text_of(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decoded([self._before, token])[self._n_before :]
        return self._known[token]

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
