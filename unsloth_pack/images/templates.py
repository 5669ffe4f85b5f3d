"""How the chat template of a model with images reads the turns of a conversation."""

from typing import Any

from unsloth_pack.data.encoding import TEMPLATE_REFUSALS

_ASKED, _ANSWERED = "a question 7", "an answer 7"


def takes_texts(tokenizer: Any) -> bool:
    """Whether a chat template shows a turn whose content is one text.

    Those of Idefics, SmolVLM and LLaVA show lists of parts alone. They render such a turn without its text,
    and raise nothing.
    """
    texts = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWERED}]
    parts = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in texts]
    return _shows(tokenizer, texts) or not _shows(tokenizer, parts)


def _shows(tokenizer: Any, turns: list[dict[str, Any]]) -> bool:
    from jinja2 import TemplateError

    try:
        shown = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, *TEMPLATE_REFUSALS):
        return False
    return _ASKED in shown and _ANSWERED in shown
