"""For notebooks: chat templates by name, conversations in one form, and training on answers only."""

from unsloth_pack.chat_templates.answers import train_on_responses_only
from unsloth_pack.chat_templates.templates import (
    CHAT_FORMATS,
    ChatFormat,
    get_chat_template,
    standardize_data_formats,
    standardize_sharegpt,
)

__all__ = [
    "CHAT_FORMATS",
    "ChatFormat",
    "get_chat_template",
    "standardize_data_formats",
    "standardize_sharegpt",
    "train_on_responses_only",
]
