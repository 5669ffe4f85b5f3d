"""Where a text stands among token ids, although a tokenizer may join its ends with what is beside it."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of byte fallback
_BESIDE = "a"  # some decoders strip a space that nothing stands before


@dataclass(frozen=True, eq=False)
class DocumentText:
    """The text of one document, and where each token of it ends.

    Args:
        text: in UTF-8: a letter may be spread over several tokens.
        ends: `[tokens]` int64, in bytes of `text`.
    """

    text: bytes
    ends: np.ndarray

    def spans(self, marker: str) -> list[tuple[int, int]]:
        """The first token of a marker, and the first behind it, wherever it stands.

        A token that holds the end of the marker and text behind it belongs to that text. One that holds its
        begin belongs to the marker.
        """
        places = [match.span() for match in re.finditer(re.escape(marker.encode()), self.text)]
        firsts, lasts = np.searchsorted(self.ends, np.asarray(places, np.int64).reshape(-1, 2).T, "right")
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


class TokenTexts:
    """The text of token ids, one by one, so that a place in the text tells the token."""

    def __init__(self, tokenizer: Any):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self._byte_of_letter = {letter: byte for byte, letter in bytes_to_unicode().items()}
        (self._before, *_) = tokenizer(_BESIDE, add_special_tokens=False)["input_ids"]
        self._n_before = len(self._decoded([self._before]))
        self._known: dict[int, bytes] = {}

    def __call__(self, ids: np.ndarray) -> DocumentText:
        """The text of a document of `[tokens]` ids."""
        parts = [self._text_of(token) for token in ids.tolist()]
        return DocumentText(b"".join(parts), np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts))))

    def _text_of(self, token: int) -> bytes:
        if token not in self._known:
            text = self._decoded([self._before, token])[self._n_before :]
            self._known[token] = self._part_of_letter(token) if "\ufffd" in text else text.encode()
        return self._known[token]

    def _part_of_letter(self, token: int) -> bytes:
        """The bytes of a token that is no text by itself, in a vocabulary with byte fallback or of bytes."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if byte := _BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return bytes(self._byte_of_letter[letter] for letter in piece if letter in self._byte_of_letter)

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
