"""Token ids and labels of a batch of rows, as TRL's SFTTrainer would make them; a text begins once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.data.rows import fail, offer
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100  # the label of a token without loss, as in torch's cross entropy
_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A template is a program, so any of these may come from it; jinja2's own are added where it is imported
TEMPLATE_REFUSALS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
_TRIED = {"tried_name": "tried_value"}  # arguments of a call

Columns = Mapping[str, list[Any]]
Conversation = list[dict[str, Any]]
Variables = dict[str, Any]  # what a template reads beside the turns: tools and variables of a row
Ids = list[list[int]]
# The ids of each row, how many tokens at its begin carry no loss, marks of the tokens that do (None: all the
# others), and whether its prompt was rendered otherwise
Parts = tuple[Ids, np.ndarray, Ids | None, np.ndarray]


@dataclass(frozen=True, eq=False)
class Encoded:
    """The documents of a batch, one after another."""

    ids: np.ndarray  # `[tokens]` int32
    labels: np.ndarray  # `[tokens]` int32
    read: np.ndarray  # `[rows]`: tokens of each row before it was cut
    kept: np.ndarray  # `[rows]`: tokens of each row in `ids`
    masked: np.ndarray  # `[rows]`: how many of these carry no loss
    counted: np.ndarray  # `[rows]`: how many carry loss and are not the first of their document
    rerendered: np.ndarray  # `[rows]`: whether the row does not begin with the tokens of its prompt alone

    @classmethod
    def from_labels(
        cls, ids: np.ndarray, labels: np.ndarray, read: np.ndarray, kept: np.ndarray, rerendered: np.ndarray
    ) -> Encoded:
        """Count the labels."""
        is_masked, ends = labels == IGNORE_INDEX, np.cumsum(kept)
        masked = np.diff(np.concatenate([[0], np.cumsum(is_masked)])[np.concatenate([[0], ends])])
        begins_counting = np.zeros(len(kept), bool)
        has_tokens = kept > 0
        begins_counting[has_tokens] = ~is_masked[(ends - kept)[has_tokens]]
        return cls(ids, labels, read, kept, masked, kept - masked - begins_counting, rerendered)


class Encoder:
    """Encodes batches of rows, see `documents_of`.

    Args:
        columns: TRL's, see `Conversion`.
        is_chat: whether they hold conversations.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        columns: Sequence[str],
        is_chat: bool,
        *,
        max_length: int,
        responses_only: bool,
        chat_template: str | None,
    ):
        self.tokenizer, self.max_length, self.chat_template = tokenizer, max_length, chat_template
        self._is_chat = is_chat
        self._reads_objects: dict[str, bool | None] = {}  # by template
        if not is_chat and tokenizer.eos_token is None:
            raise InputError(
                "the tokenizer has no eos_token, so no answer would ever end; set tokenizer.eos_token"
            )
        if responses_only and "text" in columns:
            raise InputError(
                "train_on_responses_only is set but the rows are plain text; give conversations, or drop it"
            )
        self._has_plain_backend = _has_plain_backend(tokenizer)
        self._marks_assistant = responses_only and is_chat
        self._is_marked = self._marks_assistant and marks_answers(tokenizer.get_chat_template(chat_template))

    def __call__(self, batch: Columns, numbers: range) -> Encoded:
        """The documents of a batch; `numbers` are those of its rows, by which errors name them."""
        rows, starts, marks, rerendered = self.encode(batch, numbers)
        read = _lengths(rows)
        if read.max(initial=0) > self.max_length:
            rows = [row[: self.max_length] for row in rows]
            marks = marks and [row[: self.max_length] for row in marks]
        kept = np.minimum(read, self.max_length)
        ends = np.cumsum(kept)
        ids = _flat(rows, kept, np.int32)
        places = np.arange(len(ids)) - np.repeat(ends - kept, kept)  # of every token in its own row
        is_masked = places < np.repeat(starts, kept)
        if marks:
            is_masked |= _flat(marks, kept, np.int8) == 0
        labels = np.where(is_masked, np.int32(IGNORE_INDEX), ids)
        return Encoded.from_labels(ids, labels, read, kept, rerendered)

    def encode(self, batch: Columns, numbers: range) -> Parts:
        """Encode a batch without cutting its rows."""
        nowhere = np.zeros(len(numbers), np.int64)
        if "text" in batch:
            # Nothing is learned from a blank text, so that its row is dropped and counted
            texts = [self._ended(text) if text.strip() else "" for text in batch["text"]]
            return self._plain(texts), nowhere, None, nowhere
        if "messages" in batch:
            ids, marks = self._chat(batch["messages"], batch, numbers, self._marks_assistant)
            return ids, nowhere, marks, nowhere
        pairs, marks = list(zip(batch["prompt"], batch["completion"], strict=True)), None
        prompts = self.prompts(batch, numbers)
        if self._is_chat:
            one_turn = all(len(turns) == 1 for turns in batch["completion"])  # then it is the response
            marked = self._marks_assistant and (self._is_marked or not one_turn)
            ids, marks = self._chat([p + c for p, c in pairs], batch, numbers, marked)
        else:
            ids = self._plain([prompt + self._ended(completion) for prompt, completion in pairs])
        starts = np.fromiter(map(common_prefix, prompts, ids), np.int64, len(ids))
        return ids, starts, marks, starts < _lengths(prompts)

    def prompts(self, batch: Columns, numbers: range) -> Ids:
        """Ids of the prompts of a batch, up to where the answer begins."""
        if not self._is_chat:
            return self._plain(batch["prompt"])
        return self._chat(batch["prompt"], batch, numbers, False, add_generation_prompt=True)[0]

    def _ended(self, text: str) -> str:
        end = self.tokenizer.eos_token
        return text if text.endswith(end) else text + end

    def _plain(self, texts: list[str]) -> Ids:
        """Ids of texts; one begin token where a text has it already and the tokenizer puts it before all."""
        twice = [self.tokenizer.bos_token_id] * 2
        if self._has_plain_backend:
            backend = self.tokenizer.backend_tokenizer  # as a call would use it, without places and masks
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = self.tokenizer.split_special_tokens
            rows = [encoding.ids for encoding in backend.encode_batch_fast(texts)]
        else:
            rows = self.tokenizer(texts, verbose=False)["input_ids"]
        return [ids[1:] if ids[:2] == twice else ids for ids in rows]

    def _chat(
        self,
        conversations: list[Conversation],
        batch: Columns,
        numbers: range,
        marked: bool,
        **options: bool,
    ) -> tuple[Ids, Ids | None]:
        """Ids of every conversation; if `marked`, also marks that are 1 on the tokens of assistant turns."""
        kwargs = batch.get("chat_template_kwargs") or [{}] * len(conversations)
        tools = batch.get("tools") or [None] * len(conversations)
        # a slow tokenizer tells no offsets, and transformers refuses to mark its tokens
        by_template = marked and (self._is_marked or not self.tokenizer.is_fast)
        ids, marks = [], []
        for number, turns, tools_text, variables in zip(numbers, conversations, tools, kwargs, strict=True):
            beside = {"tools": json.loads(tools_text) if tools_text else None} | variables
            turns = self._read(number, turns, beside)
            if not options:  # a prompt alone is a part of what is checked
                self._check_shown(number, turns, beside)
            encoded = self._apply_template(number, turns, by_template, options | beside)
            ids.append(encoded["input_ids"])
            if by_template:
                marks.append(encoded["assistant_masks"])
            elif marked:
                marks.append(self._mask(number, turns, beside, encoded.encodings[0].offsets))
        return ids, marks if marked else None

    def _mask(
        self, number: int, turns: Conversation, beside: Variables, offsets: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        """1 on the tokens of answers: what each adds to earlier turns and the generation prompt."""
        begins, ends = np.asarray(offsets).reshape(-1, 2).T
        whole, mask = self._text(turns, beside) or "", np.zeros(len(ends), np.int8)
        for n in (n for n, turn in enumerate(turns) if turn.get("role") == "assistant"):
            answered = self._text(turns[: n + 1], beside) or ""
            asked = self._text(turns[:n], beside | {"add_generation_prompt": True})
            is_exact = asked is not None and whole.startswith(answered) and answered.startswith(asked)
            if is_exact and asked == self._text(turns[:n], beside):  # the template ignores the option
                said = str(turns[n].get("content")).strip()
                is_exact = answered[len(asked or "") :].lstrip().startswith(said)
            if asked is None or not is_exact:
                raise InputError(
                    f"row {number}: the chat template does not mark answers; put {{% generation %}} around "
                    "them, or drop train_on_responses_only"
                )
            mask[(ends > len(asked)) & (begins < len(answered))] = 1
        return mask

    def _read(self, number: int, conversation: Conversation, beside: Variables) -> Conversation:
        """The conversation with the arguments of calls as the template reads them: objects, or JSON text."""
        if not _calls_in(conversation):
            return conversation
        template = self.tokenizer.get_chat_template(self.chat_template, tools=beside["tools"])
        if template not in self._reads_objects:
            text = json.dumps(_TRIED)
            of_text = self._text(_with_arguments(conversation, lambda _: text), beside)
            of_object = self._text(_with_arguments(conversation, lambda _: _TRIED), beside)
            reads_text = text in (of_text or "")
            reads_objects = of_object is not None and str(_TRIED) not in of_object
            # None where it reads both or neither: arguments stay as they are
            self._reads_objects[template] = reads_objects if reads_objects is not reads_text else None
        convert = partial(_convert_arguments, number, to_objects=self._reads_objects[template])
        return _with_arguments(conversation, convert)

    def _text(self, conversation: Conversation, beside: Variables) -> str | None:
        """What the template makes of a conversation; None where it refuses it."""
        from jinja2 import TemplateError

        with suppress(TemplateError, *TEMPLATE_REFUSALS):
            template = self.chat_template
            text = self.tokenizer.apply_chat_template(
                conversation, chat_template=template, tokenize=False, **beside
            )
            return str(text)
        return None

    def _check_shown(self, number: int, conversation: Conversation, beside: Variables) -> None:
        """Refuse what the template does not show: tools, as the model would learn calls of unknown ones, and
        calls, in whose place it would learn an empty answer."""
        tools, calls = beside["tools"], _calls_in(conversation)
        if not tools and not calls:
            return
        shown = self._text(conversation, beside)
        if shown is None:  # as templates without calls refuse an answer without text
            conversation = [turn | {"content": turn.get("content") or ""} for turn in conversation]
            shown = self._text(conversation, beside)
        problem, remedy = "the chat template does not show them", "use another model, or"
        if tools and shown is not None and shown == self._text(conversation, beside | {"tools": None}):
            fail(number, "tools", problem, tools, f"{remedy} give {offer({'tools': None})}")
        without = [{key: turn[key] for key in turn if key != "tool_calls"} for turn in conversation]
        if calls and shown is not None and shown == self._text(without, beside):
            fail(number, "tool_calls", problem, calls[0], f"{remedy} remove the row")

    def _apply_template(
        self, number: int, conversation: Conversation, marked: bool, options: Variables
    ) -> Any:
        """`input_ids` of a conversation, and if `marked` `assistant_masks`, 1 on the tokens of answers."""
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                conversation,
                chat_template=self.chat_template,
                return_dict=True,
                return_assistant_tokens_mask=marked,
                tokenizer_kwargs={"verbose": False},
                **options,
            )
        except (TemplateError, *TEMPLATE_REFUSALS) as error:
            raise InputError(
                f"row {number}: the chat template refuses it ({error}); correct or remove it"
            ) from None


class LabelEncoder(Encoder):
    """Encodes texts that have one class each, which stands at their last token.

    A text is encoded as the tokenizer alone does it, without an EOS: so it is when the model classifies.
    """

    def __init__(self, *args: Any, classes: np.ndarray, **options: Any):
        super().__init__(*args, **options)
        self._classes = classes  # `[rows]` of the data set

    def _ended(self, text: str) -> str:
        return text

    def __call__(self, batch: Columns, numbers: range) -> Encoded:
        encoded = super().__call__(batch, numbers)
        has_tokens = encoded.kept > 0
        labels = np.full_like(encoded.ids, IGNORE_INDEX)
        last = np.cumsum(encoded.kept)[has_tokens] - 1
        labels[last] = self._classes[numbers.start : numbers.stop][has_tokens]
        counted = has_tokens.astype(np.int64)
        return replace(encoded, labels=labels, masked=encoded.kept - counted, counted=counted)


def marks_answers(chat_template: str) -> bool:
    """Whether a chat template says which of its tokens are answers."""
    return _GENERATION_MARKER.search(chat_template) is not None


def _has_plain_backend(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether calling the tokenizer does nothing but encode with its backend."""
    from transformers import PreTrainedTokenizerFast

    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    names = ("__call__", "_encode_plus")
    return issubclass(kind, plain) and all(getattr(kind, name) is getattr(plain, name) for name in names)


def _calls_in(conversation: Conversation) -> list[Any]:
    return [turn["tool_calls"] for turn in conversation if turn.get("tool_calls")]


def _with_arguments(conversation: Conversation, change: Callable[[Any], Any]) -> Conversation:
    def changed(call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else {**call}

    return [
        turn | {"tool_calls": [*map(changed, turn["tool_calls"])]} if turn.get("tool_calls") else turn
        for turn in conversation
    ]


def _convert_arguments(number: int, arguments: object, to_objects: bool | None) -> Any:
    if isinstance(arguments, dict) and to_objects is False:
        return json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str) or not to_objects:
        return arguments
    with suppress(ValueError, RecursionError):
        if isinstance(decoded := json.loads(arguments or "{}"), dict):
            return decoded
    fail(number, "tool_calls", "arguments that are no JSON object", arguments, "correct or remove the row")


def common_prefix(some: Sequence[Any], others: Sequence[Any]) -> int:
    """Count the leading items that two sequences share."""
    if others[: len(some)] == some:
        return len(some)
    pairs = enumerate(zip(some, others, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(some), len(others)))


def _lengths(rows: Ids) -> np.ndarray:
    return np.fromiter(map(len, rows), np.int64, len(rows))


def _flat(rows: Ids, lengths: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """`[numbers]`: the numbers of all rows, whose lengths are known."""
    return np.fromiter(chain.from_iterable(rows), dtype, int(lengths.sum()))
