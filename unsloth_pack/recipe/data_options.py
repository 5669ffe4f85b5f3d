"""The options of the data: what `train` reads, and what the other subcommands take of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unsloth_pack.recipe.data_kinds import column_names, data_sets, data_sets_read_whole
from unsloth_pack.recipe.flags import choice, option, switch
from unsloth_pack.recipe.kinds import real, whole
from unsloth_pack.recipe.kinds import split as split_name

_DATA_HELP = (
    "demo or vision-demo (bundled), a json, jsonl, csv, parquet or txt file (text may be compressed: gz, "
    "zst, xz, bz2), a folder, or a name on the Hugging Face hub; several between commas, or a JSON list of "
    "objects with path, weight, split, limit and columns"
)
_MIXTURES = ("concatenate", "interleave_under", "interleave_over")
_MIXTURE_HELP = (
    "how several data sets become one. concatenate: one after the other, each as often as its weight says. "
    "interleave_under, interleave_over: each document from a data set drawn by the weights, until the first, "
    "or each, has been used up"
)
_COLUMNS_HELP = (
    "what the columns of the data are called here, such as question=prompt,answer=completion; a name without "
    "a second one (id=) is left out"
)
_SPLIT_HELP = "which split of a folder or hub data set is read: train, validation, test, or another name"
_LIMIT_HELP = "use the first documents alone, for a smoke run"


@dataclass(frozen=True)
class DataOptions:
    """The documents that the model learns from, and how they become rows."""

    dataset: str | Sequence[Mapping[str, Any]] = option(
        "demo", data_sets, f"{_DATA_HELP}. A folder may hold what `pack` wrote", "DATA"
    )
    mixture: str = choice("concatenate", _MIXTURES, _MIXTURE_HELP)
    columns: Mapping[str, str | None] | None = option(
        None, column_names, _COLUMNS_HELP, "THEIRS=OURS,...", unset="the names that the data has"
    )
    split: str | None = option(None, split_name, _SPLIT_HELP, "NAME", unset="train")
    sample_limit: int | None = option(None, whole(1), _LIMIT_HELP, "DOCUMENTS", unset="all")
    eval_dataset: str | Sequence[Mapping[str, Any]] | None = option(
        None,
        data_sets_read_whole,
        "data to evaluate on, ten times during the run; takes what --dataset takes, of folders and hub data "
        "sets the split test",
        "DATA",
    )
    eval_fraction: float | None = option(
        None,
        real(above=0, below=1),
        "hold out this share of the documents, and evaluate on them; equal documents stay together",
        "SHARE",
    )
    streaming: bool = switch(
        False,
        "read, tokenise and pack the data while training, never as a whole; needs max_steps. A pattern such "
        "as 'data/*.jsonl.gz' names several files",
    )
    sample_packing: bool = switch(
        False, "put several documents into a row; no document sees another", alias="packing"
    )
    keep_examples_per_update: bool = switch(
        False,
        "accumulate over fewer packed rows, so that an update sees as many documents as without packing",
    )
    padding_free: bool = switch(False, "join the documents of a batch into one row instead of padding them")
    eval_packing: bool | None = switch(None, "pack the evaluation data", unset="as the training data")
    max_token_loss: float = option(
        0.01,
        real(0),
        "refuse to train if truncation and dropping discard a greater share of the tokens",
        "SHARE",
    )
    num_proc: int | None = option(
        None,
        whole(1),
        "processes that read and tokenise the data",
        "PROCESSES",
        unset="one for each core; with streaming, one beside each process that trains",
    )
    train_on_responses_only: bool = switch(
        False, "in conversations, train on what the assistant says only, not on what the user says"
    )

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.eval_dataset is not None or self.eval_fraction is not None
