"""Conversations whose images are written before ids are made of their text, since both may merge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unsloth_pack.data.encoding import Encoder


class WritingEncoder(Encoder):
    """Changes what a chat template has written before ids are made of it.

    Args:
        write: the text with images, of one without. It changes no text in front of a change by what follows.
        others: as `Encoder` takes them.
    """

    def __init__(self, *args: Any, write: Callable[[str], str], **others: Any):
        super().__init__(*args, **others)
        self._write = write

    def _rendered(self, conversations: list[Any], marked: bool, options: dict[str, Any]) -> Mapping[str, Any]:
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer: Any = self.tokenizer
        template = tokenizer.get_chat_template(self.chat_template, tools=options.get("tools"))
        given: dict[str, Any] = {**tokenizer.special_tokens_map, **options}
        rendered: Any = render_jinja_template(
            conversations, chat_template=template, return_assistant_tokens_mask=marked, **given
        )
        texts, answers = rendered
        made = tokenizer([*map(self._write, texts)], add_special_tokens=False, verbose=False)
        ids = made["input_ids"]
        if not marked:
            return {"input_ids": ids}
        masks = [
            self._marks(made, number, text, spans)
            for number, (text, spans) in enumerate(zip(texts, answers, strict=True))
        ]
        return {"input_ids": ids, "assistant_masks": masks}

    def _marks(self, made: Any, number: int, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
        """1 on the tokens of the answers in a text, as transformers marks them."""
        marks = [0] * len(made["input_ids"][number])
        for begin, end in spans:
            first = made.char_to_token(number, len(self._write(text[:begin])))
            last = made.char_to_token(number, len(self._write(text[:end])) - 1)
            if first is not None and last is not None:
                marks[first : last + 1] = [1] * (last + 1 - first)
        return marks
