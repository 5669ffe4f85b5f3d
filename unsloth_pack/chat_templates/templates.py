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


# The Jinja template of a format.

_PLAIN = {"role": "role", "content": "content", "user": "user", "assistant": "assistant", "system": "system"}

_TEMPLATE = """\
{%- if tools -%}
  {{- raise_exception('this chat template writes no tools; keep the model\\'s own') -}}
{%- endif -%}
{%- macro text(content) -%}
  {%- if content is string -%}{{- content@TRIM@ -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part is string or part['type'] != 'text' -%}
        {{- raise_exception('this chat template writes text alone') -}}
      {%- endif -%}
      {{- part['text']@TRIM@ -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set seen = namespace(system=@DEFAULT_SYSTEM@, question=-1) -%}
{%- set turns = messages -%}
{%- if turns and turns[0][@ROLE@] == @SYSTEM_ROLE@ -%}
  {%- set seen.system = text(turns[0][@CONTENT@]) -%}
  {%- set turns = turns[1:] -%}
{%- endif -%}
{%- for turn in turns -%}
  {%- if turn[@ROLE@] == @USER_ROLE@ -%}{%- set seen.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- @BEGIN@ -}}
@SYSTEM_APART@
{%- for turn in turns -%}
  {%- if turn[@ROLE@] == @USER_ROLE@ -%}
    {{- @USER@ -}}
    @SYSTEM_WITHIN@
    {{- text(turn[@CONTENT@]) + @BEHIND_USER@ -}}
  {%- elif turn[@ROLE@] == @ASSISTANT_ROLE@ -%}
    {%- set answer = text(turn[@CONTENT@]) -%}
    @THOUGHTS@
    {{- @ANSWER@ -}}
    {%- generation -%}
      {{- @LEAD@ + answer + @BEFORE_END@ + @END@ -}}
    {%- endgeneration -%}
    {{- @AFTER_ANSWER@ -}}
  {%- else -%}
    {{- raise_exception('this chat template has no turn of role ' ~ turn[@ROLE@]) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- @ANSWER@@PROMPT_OF_THOUGHTS@ -}}
{%- endif -%}
"""
_SYSTEM_APART = """\
{%- if seen.system is not none -%}{{- @SYSTEM@ + seen.system + @BEHIND_SYSTEM@ -}}{%- endif -%}"""
_QUESTION_FIRST = """\
{%- if turns|length < messages|length and (not turns or turns[0][@ROLE@] != @USER_ROLE@) -%}
  {{- raise_exception('this chat template puts the system text into the first question; begin with one') -}}
{%- endif -%}"""
_SYSTEM_WITHIN = """\
{%- if loop.first and seen.system is not none -%}
      {{- @SYSTEM@ + seen.system + @BEHIND_SYSTEM@ -}}
    {%- endif -%}"""
_HYBRID = """\
{%- set thoughts = turn.get('reasoning_content') or '' -%}
    {%- if not thoughts and '</think>' in answer -%}
      {%- set thoughts = answer.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
    {%- endif -%}
    {%- set answer = answer.split('</think>')[-1].lstrip('\\n') -%}
    {%- if loop.index0 > seen.question -%}
      {%- set answer = '<think>\\n' + thoughts + '\\n</think>\\n\\n' + answer -%}
    {%- endif -%}"""
_NO_THOUGHTS = """ + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '')"""
_BEGIN_THINKING = """ + '<think>\\n'"""


def _build_template(chat: ChatFormat, mapping: Mapping[str, str], end: str | None) -> str:
    """Build the Jinja template of a chat format; `end` is None for the tokenizer's end-of-sequence token."""
    names = {**_PLAIN, **mapping}
    ends = _literal(end) if end is not None else "eos_token"

    def written(text: str) -> str:
        """Return a Jinja expression for text in which `{bos}` and `{end}` stand for tokens."""
        tokens = {"{bos}": "(bos_token or '')", "{end}": ends}
        parts = filter(None, re.split(r"(\{bos\}|\{end\})", text))
        return " + ".join(tokens.get(part) or _literal(part) for part in parts) or "''"

    prompt, around = chat.answer.rstrip(" "), map(written, (*chat.system, *chat.user))
    values = {
        "SYSTEM_APART": _QUESTION_FIRST if chat.is_within_user else _SYSTEM_APART,
        "SYSTEM_WITHIN": _SYSTEM_WITHIN if chat.is_within_user else "",
        "THOUGHTS": _HYBRID if chat.thinking else "",
        "PROMPT_OF_THOUGHTS": {"hybrid": _NO_THOUGHTS, "always": _BEGIN_THINKING}.get(
            chat.thinking or "", ""
        ),
        "TRIM": " | trim" if chat.trims else "",
        "DEFAULT_SYSTEM": "none" if chat.default_system is None else _literal(chat.default_system),
        **{f"{key.upper()}_ROLE": _literal(names[key]) for key in ("user", "assistant", "system")},
        **{key.upper(): _literal(names[key]) for key in ("role", "content")},
        **dict(zip(("SYSTEM", "BEHIND_SYSTEM", "USER", "BEHIND_USER"), around, strict=True)),
        "BEGIN": written(chat.begin),
        "ANSWER": written(prompt),
        "LEAD": _literal(chat.answer[len(prompt) :]),
        "BEFORE_END": _literal(chat.before_end),
        "END": ends,
        "AFTER_ANSWER": written(chat.after_answer),
    }
    template = _TEMPLATE
    for name, value in values.items():
        template = template.replace(f"@{name}@", value)
    return template


_literal = json.dumps  # a string in Jinja's syntax

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
