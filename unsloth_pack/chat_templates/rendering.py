"""Writes a chat format as the Jinja template that a tokenizer keeps.

The template marks answers with `{% generation %}`, as TRL's `assistant_only_loss` and the command line's
`--train_on_responses_only` need it. It refuses tools, since dropping them would train on another task.
"""

import json
from collections.abc import Mapping

from unsloth_pack.chat_templates.formats import ChatFormat

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


def template_of(chat: ChatFormat, mapping: Mapping[str, str], end: str | None) -> str:
    """A Jinja template.

    Args:
        mapping: what the keys and roles of `PLAIN` are called in the conversations.
        end: the token that ends an answer; None for the tokenizer's end-of-sequence token.
    """
    names = {**PLAIN, **mapping}
    ends = _literal(end) if end is not None else "eos_token"

    def written(text: str) -> str:
        """An expression for text in which `{bos}` and `{end}` stand for tokens."""
        parts = text.replace("{bos}", "\0b\0").replace("{end}", "\0e\0").split("\0")
        tokens = {"b": "(bos_token or '')", "e": ends}
        made = [
            tokens[part] if place % 2 else _literal(part)
            for place, part in enumerate(parts)
            if place % 2 or part
        ]
        return " + ".join(made) or "''"

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


def _literal(text: str) -> str:
    """A string as Jinja writes it."""
    return json.dumps(text)
