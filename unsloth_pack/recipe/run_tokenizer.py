"""The tokenizer of a run, and the tokens that the run adds to it."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from unsloth_pack.checkpoints.new_tokens import add_to_tokenizer
from unsloth_pack.checkpoints.token_file import read_new_tokens
from unsloth_pack.config import TrainOptions
from unsloth_pack.errors import InputError, about
from unsloth_pack.recipe.documents import load_tokenizer


def tokenizer_of_run(options: TrainOptions) -> PreTrainedTokenizerBase:
    """The tokenizer of the adapter that the run begins with, if it has one, else of the model.

    Raises:
        InputError: it cannot be loaded, or has neither a token to pad with nor one that ends a text.
    """
    model_name = options.adapter.init_adapter or options.model.model_name
    with about("init_adapter", "model_name"):
        tokenizer = load_tokenizer(model_name)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise InputError(
            f"the tokenizer of {model_name} has neither pad_token nor eos_token; name one of its tokens in "
            "tokenizer_config.json",
            about="model_name",
        )
    return tokenizer


def add_new_tokens(options: TrainOptions, tokenizer: Any) -> dict[int, list[int]]:
    """Add new tokens to the tokenizer; those that the adapter has which the run begins with are there.

    Returns:
        By the id of each new token, what it is made from; as `add_to_tokenizer`.

    Raises:
        InputError: the adapter that the run goes on with has other tokens.
    """
    adapter = options.adapter
    if adapter.add_tokens is None:
        return {}
    tokens = read_new_tokens(adapter.add_tokens)
    goes_on = adapter.init_adapter is not None and not adapter.merge_init_adapter
    if goes_on and tokens.keys() <= tokenizer.get_vocab().keys():
        return {}
    if goes_on:
        raise InputError(
            f"add_tokens is {adapter.add_tokens!r} and init_adapter {adapter.init_adapter!r} has other "
            "tokens; leave out --add_tokens, or give --merge_init_adapter to train a new adapter on top of "
            "it",
            about=("add_tokens", "init_adapter"),
        )
    return add_to_tokenizer(tokenizer, tokens)
