"""`get_chat_template`: set the chat template of a tokenizer by name; `standardize_sharegpt`.

The Jinja templates mark answers with `{% generation %}`, for TRL's `assistant_only_loss` and the command
line's `--train_on_responses_only`. They refuse tools, since dropping them would change the task.
"""

import json
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from unsloth_pack.chat_templates.formats import CHAT_FORMATS, ChatFormat
from unsloth_pack.errors import InputError

PLAIN = {"role": "role", "content": "content", "user": "user", "assistant": "assistant", "system": "system"}

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


def build_template(chat: ChatFormat, mapping: Mapping[str, str], end: str | None) -> str:
    """Build the Jinja template of a chat format.

    Args:
        mapping: the conversations' names for the keys and roles of `PLAIN`.
        end: the token at the end of an answer; None for the tokenizer's end-of-sequence token.
    """
    names = {**PLAIN, **mapping}
    ends = _literal(end) if end is not None else "eos_token"

    def written(text: str) -> str:
        """Return a Jinja expression for text in which `{bos}` and `{end}` stand for tokens."""
        tokens = {"{bos}": "(bos_token or '')", "{end}": ends}
        parts = filter(None, re.split(r"(\{bos\}|\{end\})", text))
        return " + ".join(tokens.get(part) or _literal(part) for part in parts) or "''"

    thinks = chat.thinking is not None
    asks = {"hybrid": _NO_THOUGHTS, "always": _BEGIN_THINKING}.get(chat.thinking or "", "")
    prompt = chat.answer.rstrip(" ")
    values = {
        "SYSTEM_APART": _QUESTION_FIRST if chat.is_within_user else _SYSTEM_APART,
        "SYSTEM_WITHIN": _SYSTEM_WITHIN if chat.is_within_user else "",
        "THOUGHTS": _HYBRID if thinks else "",
        "PROMPT_OF_THOUGHTS": asks,
        "TRIM": " | trim" if chat.trims else "",
        "DEFAULT_SYSTEM": "none" if chat.default_system is None else _literal(chat.default_system),
        **{f"{key.upper()}_ROLE": _literal(names[key]) for key in ("user", "assistant", "system")},
        "ROLE": _literal(names["role"]),
        "CONTENT": _literal(names["content"]),
        "BEGIN": written(chat.begin),
        "SYSTEM": written(chat.system[0]),
        "BEHIND_SYSTEM": written(chat.system[1]),
        "USER": written(chat.user[0]),
        "BEHIND_USER": written(chat.user[1]),
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
    if not hasattr(tokenizer, "apply_chat_template"):
        kind = type(tokenizer).__name__
        raise InputError(f"tokenizer is a {kind}; give what from_pretrained returned second")
    template, end = chat_template if isinstance(chat_template, tuple | list) else (chat_template, None)
    if not isinstance(template, str) or not isinstance(end, str | None):
        raise InputError(f"chat_template is {chat_template!r}; give a name, a template, or it with a token")
    if "{%" in template or "{{" in template:
        if mapping or system_message:
            raise InputError("mapping and system_message need the name of a template; write them into yours")
    else:
        name = _find_name(template)
        chat = CHAT_FORMATS[name]
        end = chat.end if end is None else end
        if map_eos_token and end is not None and end not in tokenizer.get_vocab():
            end = None
        if system_message is not None:
            chat = replace(chat, default_system=system_message)
        template = f"{{#- unsloth_pack: {name} -#}}\n" + build_template(chat, _check_mapping(mapping), end)
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


def get_parts(tokenizer: Any) -> tuple[str, str] | None:
    """Return the markers of questions and answers, if the tokenizer's template was set by name."""
    match = _MARK.match(getattr(tokenizer, "chat_template", None) or "")
    chat = CHAT_FORMATS.get(match[1]) if match else None
    return (chat.instruction_part, chat.response_part) if chat else None


def _find_name(name: str) -> str:
    def normalise(spelling: str) -> str:
        return re.sub(r"[^a-z0-9]", "", spelling.lower())

    known = {normalise(known): known for known in CHAT_FORMATS}.get(normalise(name))
    if known is None:
        raise InputError(
            f"chat_template is {name!r}; choose one of {', '.join(CHAT_FORMATS)}, give a Jinja template, or "
            "leave the call out to keep the tokenizer's own"
        )
    return known


def _check_mapping(mapping: Mapping[str, str] | None) -> Mapping[str, str]:
    for key, name in (mapping or {}).items():
        if key not in PLAIN or not isinstance(name, str):
            keys = f"its keys are {', '.join(PLAIN)}, its values text"
            raise InputError(f"mapping holds {key!r}: {name!r}; {keys}")
    return mapping or {}


_COLUMNS = ("conversations", "messages")
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
    column = next((name for name in _COLUMNS if name in columns), None)
    if column is None:
        return dataset
    roles = {"tool": "tool", "observation": "tool"}
    roles |= dict.fromkeys(aliases_for_system, "system") | dict.fromkeys(aliases_for_user, "user")
    roles |= dict.fromkeys(aliases_for_assistant, "assistant")
    rename: Callable[..., Any] = partial(_rename, column=column, roles=roles)
    options: dict[str, Any] = {"with_indices": True, "batched": True, "batch_size": batch_size}
    options["remove_columns"] = [column]  # so that the turns get a new type
    if num_proc is not None and hasattr(dataset, "__len__"):
        options["num_proc"] = num_proc
    return dataset.map(rename, **options)


standardize_sharegpt = standardize_data_formats


def _rename(
    batch: dict[str, list[Any]], numbers: list[int], column: str, roles: dict[str, str]
) -> dict[str, list[Any]]:
    rows = zip(numbers, batch[column], strict=True)
    return {column: [_conversation(number, column, turns, roles) for number, turns in rows]}


def _conversation(number: int, column: str, turns: Any, roles: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(turns, list):
        raise InputError(f"row {number}, column {column!r}: {reprlib.repr(turns)} is no list; write turns")
    return [_turn(number, column, place, turn, roles) for place, turn in enumerate(turns)]


def _turn(number: int, column: str, place: int, turn: Any, roles: dict[str, str]) -> dict[str, Any]:
    where = f"row {number}, column {column!r}: turn {place}"
    if not isinstance(turn, dict):
        remedy = "write turns as {role, content} or {from, value}"
        raise InputError(f"{where} is {reprlib.repr(turn)}; {remedy}")
    role = turn.get("role") if turn.get("role") is not None else turn.get("from")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if role not in roles:
        raise InputError(
            f"{where} has the role {reprlib.repr(role)}; name it in aliases_for_system, aliases_for_user or "
            f"aliases_for_assistant, or use one of {', '.join(roles)}"
        )
    if content is None:
        raise InputError(f"{where} has no content: {reprlib.repr(turn)}; fill it in or remove the row")
    others = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value")}
    return {"role": roles[role], "content": content, **others}
