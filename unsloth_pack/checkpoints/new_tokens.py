"""Add new tokens to a tokenizer and a model, with embeddings that mean something."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unsloth_pack.checkpoints.token_file import NewTokens
from unsloth_pack.errors import InputError


def add_to_tokenizer(tokenizer: Any, tokens: NewTokens) -> dict[int, list[int]]:
    """Add tokens to a tokenizer.

    Returns:
        By the id of each token, the ids of its description; an empty list where it has none.

    Raises:
        InputError: the tokenizer has a token already, or cannot say a description.
    """
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token in vocabulary:
            raise InputError(
                f"add_tokens names {token!r}, which is token {vocabulary[token]} already; leave it out, and "
                f"give --trainable_token_indices {vocabulary[token]} to train it",
                about="add_tokens",
            )
    of_description: list[list[int]] = []
    for token, description in tokens.items():
        ids = tokenizer.encode(description, add_special_tokens=False) if description else []
        if description and not [one for one in ids if one != tokenizer.unk_token_id]:
            raise InputError(
                f"add_tokens describes {token!r} as {description!r}, of which the tokenizer makes no token; "
                "describe it in other words, or leave the description out",
                about="add_tokens",
            )
        of_description.append(ids)
    tokenizer.add_tokens([*tokens])
    return dict(zip(tokenizer.convert_tokens_to_ids([*tokens]), of_description, strict=True))


def add_to_model(model: Any, descriptions: Mapping[int, list[int]]) -> None:
    """Give a model embeddings for new tokens, and outputs where the head is not tied.

    A row begins as the mean of the rows of its description, or of all the tokens that were there before.

    Args:
        model: a transformers model, or a PEFT model of one.
        descriptions: of `add_to_tokenizer`.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    n_before, n_needed = min(descriptions), max(descriptions) + 1
    if n_needed > base.get_input_embeddings().num_embeddings:
        base.resize_token_embeddings(n_needed, mean_resizing=False)
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    weights: dict[int, Tensor] = {id(end.weight): end.weight for end in ends if end is not None}
    with torch.no_grad():
        for weight in weights.values():
            mean = weight[:n_before].float().mean(dim=0)
            for token, ids in descriptions.items():
                weight[token] = weight[ids].float().mean(dim=0) if ids else mean
    bias = getattr(ends[1], "bias", None)
    if isinstance(bias, Tensor):
        with torch.no_grad():
            bias[n_before:n_needed] = bias[:n_before].float().mean()


def rows_to_train(model: Any, ids: list[int]) -> list[int] | dict[str, list[int]]:
    """PEFT's `trainable_token_indices`: rows of the embedding, and of a head that is not tied."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if ends[1] is None or ends[0].weight is ends[1].weight:
        return ids
    return {_name_of(model, end): ids for end in ends}


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(path for path, one in model.named_modules() if one is module).rpartition(".")[2]
