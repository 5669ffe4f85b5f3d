"""`get_chat_template`: set the chat template of a tokenizer by name; `standardize_sharegpt`.

The Jinja templates mark answers with `{% generation %}`, for TRL's `assistant_only_loss` and the command
line's `--train_on_responses_only`. They refuse tools, since dropping them would change the task.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from unsloth_pack.errors import InputError

Around = tuple[str, str]  # the text before and after a turn


@dataclass(frozen=True)
class ChatFormat:
    """A format of conversations as text, as its maker documents it. `{bos}` and `{end}` stand for tokens."""

    user: Around  # around the text of a question
    answer: str  # before an answer. Its last space belongs to the answer
    instruction_part: str  # the marker of questions for `train_on_responses_only`
    response_part: str  # and that of answers
    system: Around  # around the system's text
    is_within_user: bool = False  # the system's text is inside the first question
    end: str | None = None  # at the end of an answer; None for the tokenizer's end-of-sequence token
    before_end: str = ""  # between an answer and `end`
    after_answer: str = ""  # after `end`, without loss
    default_system: str | None = None  # the default system text; None for no system turn
    begin: str = "{bos}"  # before everything
    trims: bool = False  # strip white space around the text of a turn
    # "hybrid" for a model that may think aloud, whose earlier answers lose their thoughts; "always" if every
    # answer begins with "<think>"
    thinking: str | None = None


def _turns(before: str, behind: str, answer_of: str = "assistant") -> ChatFormat:
    """Build a format with the same text for all roles: `before`, where `*` is the role, and `behind`."""
    user, answer = before.replace("*", "user"), before.replace("*", answer_of)
    system, after = before.replace("*", "system"), behind.removeprefix("{end}")
    return ChatFormat((user, behind), answer, user, answer, (system, behind), after_answer=after)


_CHATML = replace(_turns("<|im_start|>*\n", "{end}\n"), end="<|im_end|>", begin="")
_QWEN_2_5 = replace(
    _CHATML, default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
)
_PHI_3 = replace(_turns("<|*|>\n", "{end}\n"), end="<|end|>", begin="")
_PHI_4 = replace(_turns("<|im_start|>*<|im_sep|>", "{end}"), end="<|im_end|>", begin="")
_LLAMA_3 = replace(_turns("<|start_header_id|>*<|end_header_id|>\n\n", "{end}"), end="<|eot_id|>", trims=True)
# The dates are those of Llama 3.1's own template
_DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
_LLAMA_3_1 = replace(_LLAMA_3, system=(_LLAMA_3.system[0] + _DATES, "{end}"), default_system="")
_GEMMA = replace(
    _turns("<start_of_turn>*\n", "{end}\n", answer_of="model"),
    end="<end_of_turn>",
    system=("", "\n\n"),
    is_within_user=True,
    trims=True,
)
_ZEPHYR = replace(_turns("<|*|>\n", "{end}\n"), begin="")
_MISTRAL = ChatFormat(
    ("[INST] ", " [/INST]"), " ", "[INST]", "[/INST]", ("", "\n\n"), is_within_user=True, trims=True
)
_LLAMA_2 = replace(
    _MISTRAL,
    user=("{bos}[INST] ", " [/INST]"),
    system=("<<SYS>>\n", "\n<</SYS>>\n\n"),
    before_end=" ",
    begin="",
)
_VICUNA = ChatFormat(
    ("USER: ", " "),
    "ASSISTANT: ",
    "USER:",
    "ASSISTANT:",
    ("", " "),
    default_system="A chat between a curious user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite answers to the user's questions.",
)
_ALPACA = ChatFormat(
    ("### Instruction:\n", "\n\n"),
    "### Response:\n",
    "### Instruction:\n",
    "### Response:\n",
    ("", "\n\n"),
    after_answer="\n\n",
    default_system="Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.",
)
CHAT_FORMATS = {
    "alpaca": _ALPACA,
    "chatml": _CHATML,
    **dict.fromkeys(("gemma", "gemma-2", "gemma-3", "gemma-3n"), _GEMMA),
    "llama": _LLAMA_2,
    "llama-3": _LLAMA_3,
    **dict.fromkeys(("llama-3.1", "llama-3.2", "llama-3.3"), _LLAMA_3_1),
    "mistral": _MISTRAL,
    **dict.fromkeys(("phi-3", "phi-3.5"), _PHI_3),
    "phi-4": _PHI_4,
    "qwen-2.5": _QWEN_2_5,
    "qwen-3": replace(_CHATML, thinking="hybrid"),
    "qwen-3-instruct": _CHATML,
    "qwen-3-thinking": replace(_CHATML, thinking="always"),
    "vicuna": _VICUNA,
    "zephyr": _ZEPHYR,
}
"""The formats by name. `get_chat_template` ignores case, hyphens and dots in names."""


# The Jinja template of a format: `format.jinja`, after lines that set its variables.

_PLAIN = {"role": "role", "content": "content", "user": "user", "assistant": "assistant", "system": "system"}


def _build_template(chat: ChatFormat, mapping: Mapping[str, str], end: str | None) -> str:
    """Build the Jinja template of a chat format; `end` is None for the tokenizer's end-of-sequence token."""
    names = {**_PLAIN, **mapping}
    ends = _literal(end) if end is not None else "eos_token"

    def written(text: str) -> str:
        """Return a Jinja expression for text in which `{bos}` and `{end}` stand for tokens."""
        tokens = {"{bos}": "(bos_token or '')", "{end}": ends}
        parts = filter(None, re.split(r"(\{bos\}|\{end\})", text))
        return " + ".join(tokens.get(part) or _literal(part) for part in parts) or "''"

    before_answer = chat.answer.rstrip(" ")
    around = map(written, (*chat.system, *chat.user))
    values = {
        **{name: _literal(names[name]) for name in ("role", "content")},
        **{f"{name}_role": _literal(names[name]) for name in ("user", "assistant", "system")},
        **dict(zip(("system", "behind_system", "user", "behind_user"), around, strict=True)),
        "default_system": "none" if chat.default_system is None else _literal(chat.default_system),
        "is_within_user": _literal(chat.is_within_user),
        "begin": written(chat.begin),
        "before_answer": written(before_answer),
        "lead": _literal(chat.answer[len(before_answer) :]),
        "before_end": _literal(chat.before_end),
        "end": ends,
        "after_answer": written(chat.after_answer),
        "trims": _literal(chat.trims),
        "thinking": _literal(chat.thinking or ""),
    }
    head = "".join(f"{{%- set {name} = {value} -%}}\n" for name, value in values.items())
    return head + Path(__file__).with_name("format.jinja").read_text(encoding="utf-8")


_literal = json.dumps  # a string or a truth value in Jinja's syntax

_MARK = re.compile(r"\{#- unsloth_pack: ([\w.-]+) -#\}")


def get_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | tuple[str, str] = "chatml",
    mapping: Mapping[str, str] | None = None,
    map_eos_token: bool = True,
    system_message: str | None = None,
) -> PreTrainedTokenizerBase:
    """Set a tokenizer's chat template and return the tokenizer. No token is added: the model keeps its size.

    Args:
        tokenizer: changed in place.
        chat_template: a name in `CHAT_FORMATS`, such as "llama-3.1"; a Jinja template; or a Jinja template
            and the token at the end of an answer.
        mapping: the conversations' names for `role`, `content`, `user`, `assistant` and `system`, such as
            `{"role": "from", "content": "value", "user": "human", "assistant": "gpt"}`.
        map_eos_token: set the tokenizer's end-of-sequence token to the token at the end of an answer. If the
            vocabulary lacks it, the template writes the tokenizer's own instead.
        system_message: the default system text.

    Raises:
        InputError: an unknown name or mapping, or a tokenizer that cannot end an answer.
    """
    template, end = chat_template if isinstance(chat_template, tuple | list) else (chat_template, None)
    if "{%" in template or "{{" in template:
        if mapping or system_message:
            raise InputError("mapping and system_message need the name of a template; write them into yours")
    else:
        names = {_normalise(name): name for name in CHAT_FORMATS}
        name = names.get(_normalise(template), "")
        if not name:
            raise InputError(
                f"chat_template is {template!r}; choose one of {', '.join(CHAT_FORMATS)}, give a Jinja "
                "template, or leave the call out to keep the tokenizer's own"
            )
        if unknown := [key for key in mapping or {} if key not in _PLAIN]:
            raise InputError(f"mapping holds {unknown[0]!r}; its keys are {', '.join(_PLAIN)}")
        chat = CHAT_FORMATS[name]
        end = chat.end if end is None else end
        if map_eos_token and end is not None and end not in tokenizer.get_vocab():
            end = None
        if system_message is not None:
            chat = replace(chat, default_system=system_message)
        template = f"{{#- unsloth_pack: {name} -#}}\n" + _build_template(chat, mapping or {}, end)
    if end is not None and end not in tokenizer.get_vocab() and map_eos_token:
        problem = f"chat_template ends answers with {end!r}, which is no token"
        raise InputError(f"{problem}; give one of the vocabulary")
    if end is None and tokenizer.eos_token is None:
        raise InputError(
            "the tokenizer has no eos_token, so no answer would ever end; set tokenizer.eos_token"
        )
    if map_eos_token and end is not None:
        tokenizer.eos_token = end
    tokenizer.chat_template = template
    return tokenizer


def get_parts(tokenizer: object) -> tuple[str, str] | None:
    """Return the markers of questions and answers, if the tokenizer's template was set by name."""
    match = _MARK.match(getattr(tokenizer, "chat_template", None) or "")
    chat = CHAT_FORMATS.get(match[1]) if match else None
    return (chat.instruction_part, chat.response_part) if chat else None


def _normalise(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_SYSTEM_ALIASES = ("system", "developer")
_USER_ALIASES = ("user", "human", "input")
_ASSISTANT_ALIASES = ("assistant", "gpt", "chatgpt", "bot", "model", "output")


def standardize_data_formats(
    dataset: Any,
    tokenizer: Any = None,
    aliases_for_system: Sequence[str] = _SYSTEM_ALIASES,
    aliases_for_user: Sequence[str] = _USER_ALIASES,
    aliases_for_assistant: Sequence[str] = _ASSISTANT_ALIASES,
    batch_size: int = 1000,
    num_proc: int | None = None,
) -> Any:
    """Rewrite a data set's conversations as lists of `{"role": ..., "content": ...}`.

    The column `conversations` or `messages` keeps its name, and the other columns stay. Turns of `{from,
    value}` and roles such as "human" and "gpt" are renamed. A data set without such a column is returned as
    it is.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset`.
        tokenizer: ignored; accepted for compatibility.
        aliases_for_system, aliases_for_user, aliases_for_assistant: names of the roles in the data.
        batch_size, num_proc: as in `Dataset.map`; a stream takes no `num_proc`.

    Raises:
        InputError: a turn has no role or no text, or an unknown role. The error names the row, from 0. A
            stream raises it when the row is read.
    """
    if not hasattr(dataset, "map"):
        raise InputError(f"dataset is a {type(dataset).__name__}; give a datasets.Dataset, such as one split")
    first: dict[str, Any] = {}
    columns = dataset.column_names or list(next(iter(dataset), first))
    column = next((name for name in ("conversations", "messages") if name in columns), None)
    if column is None:
        return dataset
    roles = {"tool": "tool", "observation": "tool"}
    roles |= dict.fromkeys(aliases_for_system, "system") | dict.fromkeys(aliases_for_user, "user")
    roles |= dict.fromkeys(aliases_for_assistant, "assistant")
    # The column is removed, so that the turns get a new type
    options: dict[str, Any] = {"with_indices": True, "batched": True, "remove_columns": [column]}
    if num_proc is not None and hasattr(dataset, "__len__"):
        options["num_proc"] = num_proc
    return dataset.map(partial(_rename, column=column, roles=roles), batch_size=batch_size, **options)


standardize_sharegpt = standardize_data_formats


def _rename(
    batch: Mapping[str, list[Any]], numbers: list[int], column: str, roles: Mapping[str, str]
) -> dict[str, list[Any]]:
    conversations = []
    for number, turns in zip(numbers, batch[column], strict=True):
        where = f"row {number}, column {column!r}"
        if not isinstance(turns, list):
            raise InputError(f"{where}: {reprlib.repr(turns)} is no list; write turns")
        conversations.append([_turn(f"{where}: turn {n}", turn, roles) for n, turn in enumerate(turns)])
    return {column: conversations}


def _turn(where: str, turn: Any, roles: Mapping[str, str]) -> dict[str, object]:
    names = turn if isinstance(turn, dict) else {}
    role = names.get("role") if names.get("role") is not None else names.get("from")
    content = names.get("content") if names.get("content") is not None else names.get("value")
    if role not in roles or content is None:
        raise InputError(
            f"{where} is {reprlib.repr(turn)}; write turns as {{role, content}} or {{from, value}}, with a "
            f"role of {', '.join(roles)}, or name it in aliases_for_user or another of the aliases"
        )
    others = {key: value for key, value in names.items() if key not in ("role", "from", "content", "value")}
    return {"role": roles[str(role)], "content": content, **others}
