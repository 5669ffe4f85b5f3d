"""Chat templates by name, conversations in one form, and training on the answers alone. For notebooks."""

from unsloth_pack.chat_templates.by_name import get_chat_template
from unsloth_pack.chat_templates.formats import CHAT_FORMATS, ChatFormat
from unsloth_pack.chat_templates.responses import train_on_responses_only
from unsloth_pack.chat_templates.standardize import standardize_data_formats, standardize_sharegpt

__all__ = [
    "CHAT_FORMATS",
    "ChatFormat",
    "get_chat_template",
    "standardize_data_formats",
    "standardize_sharegpt",
    "train_on_responses_only",
]
