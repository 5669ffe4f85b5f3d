"""New tokens: read the file that names them, and add them with embeddings that mean something.

Reading imports no torch, so that options are checked without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NewTokens = Mapping[str, str | None]  # token -> description, None where it has none


def read_new_tokens(path: str) -> dict[str, str | None]:
    """The tokens in a file: one a line, or as JSON or YAML a list, or a mapping of token to description."""
    import yaml

    kind = Path(path).suffix[1:]
    try:
        text = Path(path).read_text(encoding="utf-8")
        if kind in ("json", "yaml", "yml"):
            entries: object = json.loads(text) if kind == "json" else yaml.safe_load(text)
        else:
            entries = [line.strip() for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise _refusal(path, f"{error.strerror}; give a file of tokens") from None
    except (ValueError, yaml.YAMLError):
        raise _refusal(path, f"not {kind or 'text'}; correct it") from None
    pairs = [*entries.items()] if isinstance(entries, Mapping) else []
    if isinstance(entries, list):
        pairs = [(token, None) for token in entries]
    tokens: dict[str, str | None] = {}
    for token, description in pairs:
        if not isinstance(token, str) or not token.strip() or not isinstance(description, str | None):
            what = f"{token!r}: {description!r} is no token with a description"
            raise _refusal(path, f"{what}; put both in quotes")
        if token in tokens:
            raise _refusal(path, f"{token!r} is there twice; keep one")
        tokens[token] = description or None
    if not tokens:
        raise _refusal(path, "it holds no token; write one a line")
    return tokens


def _refusal(path: str, why: str) -> InputError:
    return InputError(f"add_tokens is {path!r}: {why}")


def add_to_tokenizer(tokenizer: PreTrainedTokenizerBase, tokens: NewTokens) -> dict[int, list[int]]:
    """Add tokens to a tokenizer; return the ids of their descriptions, which may be empty, by id.

    InputError for a token that it has, or a description that it cannot say.
    """
    vocabulary = tokenizer.get_vocab()
    of_description: list[list[int]] = []
    for token, description in tokens.items():
        if token in vocabulary:
            said = f"add_tokens names {token!r}, which is token {vocabulary[token]} already; leave it out"
            raise InputError(f"{said}, and give --trainable_token_indices {vocabulary[token]} to train it")
        ids = tokenizer.encode(description, add_special_tokens=False) if description else []
        if description and not {*ids} - {tokenizer.unk_token_id}:
            said = f"add_tokens describes {token!r} as {description!r}, of which the tokenizer makes no token"
            raise InputError(f"{said}; describe it in other words")
        of_description.append(ids)
    tokenizer.add_tokens([*tokens])
    new_ids: list[Any] = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    return dict(zip(new_ids, of_description, strict=True))


def add_to_model(model: nn.Module, descriptions: Mapping[int, list[int]]) -> None:
    """Give a model embeddings for new tokens, and outputs where the head is not tied.

    A row begins as the mean of the rows of its description, or of all the tokens that were there before.
    """
    import torch

    from unsloth_pack.modules import base_of

    base = base_of(model)
    n_before, n_needed = min(descriptions), max(descriptions) + 1
    if n_needed > base.get_input_embeddings().num_embeddings:
        base.resize_token_embeddings(n_needed, mean_resizing=False)
    ends = [end for end in (base.get_input_embeddings(), base.get_output_embeddings()) if end is not None]
    with torch.no_grad():
        for weight in {id(end.weight): end.weight for end in ends}.values():
            mean = weight[:n_before].float().mean(dim=0)
            for token, ids in descriptions.items():
                weight[token] = weight[ids].float().mean(dim=0) if ids else mean
        bias = getattr(ends[-1], "bias", None)
        if isinstance(bias, torch.Tensor):
            bias[n_before:n_needed] = bias[:n_before].float().mean()


def rows_to_train(model: PreTrainedModel, ids: list[int]) -> list[int] | dict[str, list[int]]:
    """PEFT's `trainable_token_indices`: rows of the embedding, and of a head that is not tied."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding.weight is head.weight:
        return ids
    names = {id(module): path.rpartition(".")[2] for path, module in model.named_modules()}
    return {names[id(end)]: ids for end in (embedding, head)}
