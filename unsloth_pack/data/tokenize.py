"""Turns rows into token ids and labels, with a ledger that accounts for every token that was read.

The ids and labels are the ones that TRL's SFTTrainer would make, and it takes them as they are. TRL's own
preparation truncates silently when it packs, and keeps rows without a label that counts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from unsloth_pack.data.ledger import TokenLedger
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100  # the label of a token without loss, as in torch's cross entropy
_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


def tokenize(
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    train_on_responses_only: bool = False,
    chat_template: str | None = None,
) -> tuple[datasets.Dataset, TokenLedger]:
    """Token ids and labels of every row, as TRL's SFTTrainer would make them.

    Conversations go through the chat template. Text and string completions end with the end-of-sequence
    token. The loss is on the completion where there is a prompt, else on all tokens.

    Args:
        dataset: columns as `to_trl` gives them: prompt and completion, or messages, with what
            the template reads beside them (tools, chat_template_kwargs); or text.
        max_length: tokens at which a row is cut; its end is lost.
        train_on_responses_only: in conversations, only assistant turns count in the loss.
        chat_template: used instead of the tokenizer's own.

    Returns:
        A dataset of `input_ids` and `labels`, int32 lists of the same length, without the rows in which no
        label counts; and the ledger.

    Raises:
        InputError: no row is left; only responses are to be trained on, and the rows are plain text or the
            template does not mark responses; the template refuses a row; or the tokenizer has no
            end-of-sequence token.
    """
    import numpy as np
    from datasets import Features, List, Value
    from datasets.fingerprint import generate_random_fingerprint

    encoder = _Encoder(dataset, tokenizer, max_length, train_on_responses_only, chat_template)
    tokens, number = List(Value("int32")), Value("int64")
    counts = ("read", "kept", "masked", "counted", "rerendered")
    encoded = dataset.map(
        encoder,
        batched=True,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=Features({"input_ids": tokens, "labels": tokens, **dict.fromkeys(counts, number)}),
        new_fingerprint=generate_random_fingerprint(),  # hashing the tokenizer would take longer
        desc="Tokenizing",
    )
    read, kept, masked, counted, rerendered = (
        np.array(encoded.with_format("numpy")[name]) for name in counts
    )
    stays = counted > 0
    ledger = TokenLedger(
        rows_read=len(read),
        tokens_read=int(read.sum()),
        rows_truncated=int((kept < read).sum()),
        tokens_truncated=int((read - kept).sum()),
        rows_fully_masked=int((~stays).sum()),
        tokens_dropped=int(kept[~stays].sum()),
        tokens_masked_by_template=int(masked[stays].sum()),
        tokens_masked_at_boundaries=int((kept - masked - counted)[stays].sum()),
        tokens_counted=int(counted.sum()),
        prompts_rerendered=int(rerendered[stays].sum()),
        longest=int(read.max(initial=0)),
        p99=int(np.quantile(read, 0.99, method="higher")) if len(read) else 0,
    )
    if not ledger.tokens_counted:
        raise InputError(
            f"none of the {ledger.tokens_read} tokens in {ledger.rows_read} rows would count in the loss "
            f"({ledger.tokens_truncated} lie beyond max_seq_length {max_length}); raise max_seq_length, "
            "or give data with responses"
        )
    encoded = encoded.select_columns(["input_ids", "labels"])
    return encoded if stays.all() else encoded.select(np.flatnonzero(stays)), ledger


def rows_hash(rows: datasets.Dataset) -> str:
    """SHA-256 of the rows in their order: every id and label, and where each row ends."""
    hashes = [hashlib.sha256() for _ in range(4)]
    for table in rows.select_columns(["input_ids", "labels"]).with_format("arrow").iter(batch_size=1000):
        columns = [table[name].combine_chunks() for name in ("input_ids", "labels")]
        parts = [array for column in columns for array in (column.value_lengths(), column.flatten())]
        for one, part in zip(hashes, parts, strict=True):
            one.update(part.to_numpy())
    return hashlib.sha256(b"".join(one.digest() for one in hashes)).hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all that turns rows into ids, the same on every machine and after saving and loading.

    It covers the vocabulary, the rules, the special tokens and the chat template. It leaves out padding and
    truncation, which a tokenizer remembers from its last call, and the padding token, which trainers set.
    """
    if tokenizer.is_fast:
        model = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    else:
        model = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    special = {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"
    }
    whole = json.dumps([model, special, tokenizer.chat_template], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


class _Encoder:
    """Encodes a batch of rows at a time, because fast tokenizers are fast on batches only."""

    def __init__(
        self,
        dataset: datasets.Dataset,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        responses_only: bool,
        chat_template: str | None,
    ):
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.chat_template = chat_template
        column = next(name for name in ("prompt", "messages", "text") if name in dataset.column_names)
        self.encode = getattr(self, f"_encode_{column}")
        self.is_chat = not isinstance(dataset[0][column], str)
        if not self.is_chat and tokenizer.eos_token is None:
            raise InputError(
                "the tokenizer has no eos_token, so no answer would ever end; set tokenizer.eos_token"
            )
        if responses_only and column == "text":
            raise InputError(
                "train_on_responses_only is set but the rows are plain text; give conversations, or drop it"
            )
        self.mark_assistant = responses_only and self.is_chat and self._marks_assistant(dataset)

    def _marks_assistant(self, dataset: datasets.Dataset) -> bool:
        template = self.tokenizer.get_chat_template(self.chat_template)
        if _GENERATION_MARKER.search(template):
            return True
        if "completion" in dataset.column_names and all(len(turns) == 1 for turns in dataset["completion"]):
            return False  # one assistant turn after the prompt: the completion is the response
        raise InputError(
            "train_on_responses_only is set but the chat template does not mark assistant turns with "
            "{% generation %}; mark them in tokenizer.chat_template, or leave the flag out"
        )

    def __call__(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        ids, masks, rerendered = self.encode(batch, indices)
        out: dict[str, list[Any]] = {"input_ids": [], "labels": [], "masked": [], "counted": []}
        for row_ids, mask in zip(ids, masks, strict=True):
            row_ids = row_ids[: self.max_length]
            labels = (
                row_ids
                if mask is None
                else [t if m else IGNORE_INDEX for t, m in zip(row_ids, mask, strict=False)]
            )
            out["input_ids"].append(row_ids)
            out["labels"].append(labels)
            out["masked"].append(labels.count(IGNORE_INDEX))
            out["counted"].append(len(labels) - 1 - labels[1:].count(IGNORE_INDEX) if labels else 0)
        kept = [len(row_ids) for row_ids in out["input_ids"]]
        return out | {"read": [len(row_ids) for row_ids in ids], "kept": kept, "rerendered": rerendered}

    def _encode_text(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> tuple[list, list, list]:
        ids = self._plain([self._ended(text) for text in batch["text"]])
        return ids, [None] * len(ids), [0] * len(ids)

    def _encode_messages(
        self, batch: dict[str, list[Any]], indices: Sequence[int]
    ) -> tuple[list, list, list]:
        ids, masks = self._chat(batch["messages"], batch, indices, self.mark_assistant)
        return ids, masks, [0] * len(ids)

    def _encode_prompt(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> tuple[list, list, list]:
        pairs = list(zip(batch["prompt"], batch["completion"], strict=True))
        if self.is_chat:
            prompts, _ = self._chat(batch["prompt"], batch, indices, False, add_generation_prompt=True)
            ids, masks = self._chat([p + c for p, c in pairs], batch, indices, self.mark_assistant)
        else:
            prompts = self._plain(batch["prompt"])
            ids = self._plain([prompt + self._ended(completion) for prompt, completion in pairs])
            masks = [None] * len(ids)
        starts = [_common_prefix(prompt, row_ids) for prompt, row_ids in zip(prompts, ids, strict=True)]
        masks = [
            [0] * start + ([1] * (len(row_ids) - start) if mask is None else mask[start:])
            for start, row_ids, mask in zip(starts, ids, masks, strict=True)
        ]
        return ids, masks, [int(start < len(prompt)) for start, prompt in zip(starts, prompts, strict=True)]

    def _ended(self, text: str) -> str:
        end = self.tokenizer.eos_token
        return text if text.endswith(end) else text + end

    def _plain(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, verbose=False)["input_ids"]

    def _chat(
        self,
        conversations: list[Any],
        batch: dict[str, list[Any]],
        indices: Sequence[int],
        marked: bool,
        **options: Any,
    ) -> tuple[list[list[int]], list[list[int] | None]]:
        """Ids of every conversation; if `marked`, also masks that are 1 on the tokens of assistant turns."""
        together: dict[tuple[str | None, str], list[int]] = {}  # rows with equal tools and variables
        for place, given in enumerate(self._beside(batch, len(conversations))):
            together.setdefault(given, []).append(place)
        ids: list[Any] = [None] * len(conversations)
        masks: list[Any] = [None] * len(conversations)
        for (tools, kwargs), members in together.items():
            encoded = self._apply_template(
                [conversations[i] for i in members],
                members,
                indices,
                marked,
                options | {"tools": json.loads(tools) if tools else None} | json.loads(kwargs),
            )
            for place, number in enumerate(members):
                ids[number] = encoded["input_ids"][place]
                masks[number] = encoded["assistant_masks"][place] if marked else None
        return ids, masks

    def _beside(self, batch: dict[str, list[Any]], n_rows: int) -> Iterator[tuple[str | None, str]]:
        """What the template reads beside each conversation, as JSON text: its tools and its variables."""
        kwargs = batch.get("chat_template_kwargs") or [{}] * n_rows
        tools = batch.get("tools") or [None] * n_rows
        return zip(tools, map(json.dumps, kwargs), strict=True)

    def _apply_template(
        self, conversations: list[Any], members: list[int], indices: Sequence[int], marked: bool, options: Any
    ) -> Any:
        from jinja2 import TemplateError

        def apply(some: list[Any]) -> Any:
            return self.tokenizer.apply_chat_template(
                some,
                chat_template=self.chat_template,
                return_dict=True,
                return_assistant_tokens_mask=marked,
                tokenizer_kwargs={"verbose": False},
                **options,
            )

        # a template is a program, so any of these may come from it
        refusals = (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        )
        try:
            return apply(conversations)
        except refusals:
            for member, conversation in zip(members, conversations, strict=True):
                try:
                    apply([conversation])
                except refusals as error:
                    raise InputError(
                        f"row {indices[member]}: the chat template refuses it ({error}); correct or remove it"
                    ) from None
            raise


def _common_prefix(some: Sequence[int], others: Sequence[int]) -> int:
    length = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        length += 1
    return length
