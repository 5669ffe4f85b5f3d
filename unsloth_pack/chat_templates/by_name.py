"""`get_chat_template`: give a tokenizer the chat template of a family of models."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from unsloth_pack.chat_templates.formats import CHAT_FORMATS
from unsloth_pack.chat_templates.rendering import PLAIN, template_of
from unsloth_pack.errors import InputError

_MARK = re.compile(r"\{#- unsloth_pack: ([\w.-]+) -#\}")


def get_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | tuple[str, str] = "chatml",
    mapping: Mapping[str, str] | None = None,
    map_eos_token: bool = True,
    system_message: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer, with a chat template. No token is added, so the model keeps its size.

    Args:
        tokenizer: changed in place, and returned.
        chat_template: a name in `CHAT_FORMATS`, such as "llama-3.1"; a Jinja template; or a Jinja template
            and the token that ends an answer.
        mapping: what the conversations call `role`, `content`, `user`, `assistant` and `system`, such as
            `{"role": "from", "content": "value", "user": "human", "assistant": "gpt"}`.
        map_eos_token: make the token that ends an answer the tokenizer's end-of-sequence token. If the
            vocabulary lacks it, the template writes the tokenizer's own instead.
        system_message: the system's text where a conversation has none.

    Raises:
        InputError: an unknown name or mapping, or a tokenizer that cannot end an answer.
    """
    if not hasattr(tokenizer, "apply_chat_template"):
        raise InputError(
            f"tokenizer is a {type(tokenizer).__name__}; give what from_pretrained returned second"
        )
    given, end = chat_template if isinstance(chat_template, tuple | list) else (chat_template, None)
    if not isinstance(given, str) or not isinstance(end, str | None):
        raise InputError(f"chat_template is {chat_template!r}; give a name, a template, or it with a token")
    if "{%" in given or "{{" in given:
        if mapping or system_message:
            raise InputError("mapping and system_message need the name of a template; write them into yours")
        template = given
    else:
        name = _known_name(given)
        chat = CHAT_FORMATS[name]
        end = chat.end if end is None else end
        if map_eos_token and end is not None and end not in tokenizer.get_vocab():
            end = None
        if system_message is not None:
            chat = replace(chat, default_system=system_message)
        template = _marked(name) + template_of(chat, _checked(mapping), end)
    if end is not None and end not in tokenizer.get_vocab() and map_eos_token:
        raise InputError(
            f"chat_template ends answers with {end!r}, which is no token; give one of the vocabulary"
        )
    if end is None and tokenizer.eos_token is None:
        raise InputError(
            "the tokenizer has no eos_token, so no answer would ever end; set tokenizer.eos_token"
        )
    if map_eos_token and end is not None:
        tokenizer.eos_token = end
    tokenizer.chat_template = template
    return tokenizer


def parts_of(tokenizer: Any) -> tuple[str, str] | None:
    """The markers of questions and answers, if the tokenizer's template came from a name."""
    begins = _MARK.match(getattr(tokenizer, "chat_template", None) or "")
    chat = CHAT_FORMATS.get(begins[1]) if begins else None
    return (chat.instruction_part, chat.response_part) if chat else None


def _marked(name: str) -> str:
    """A comment that says which format a template writes."""
    return f"{{#- unsloth_pack: {name} -#}}\n"


def _known_name(name: str) -> str:
    def bare(spelling: str) -> str:
        return re.sub(r"[^a-z0-9]", "", spelling.lower())

    found = {bare(known): known for known in CHAT_FORMATS}.get(bare(name))
    if found is None:
        raise InputError(
            f"chat_template is {name!r}; choose one of {', '.join(CHAT_FORMATS)}, give a Jinja template, or "
            "leave the call out to keep the tokenizer's own"
        )
    return found


def _checked(mapping: Mapping[str, str] | None) -> Mapping[str, str]:
    for key, name in (mapping or {}).items():
        if key not in PLAIN or not isinstance(name, str):
            raise InputError(
                f"mapping holds {key!r}: {name!r}; its keys are {', '.join(PLAIN)}, its values text"
            )
    return mapping or {}
