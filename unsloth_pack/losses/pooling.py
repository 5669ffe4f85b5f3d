"""Pool the hidden states of a packed row: one embedding for each document."""

from typing import Literal

import torch
from torch import Tensor

from unsloth_pack.errors import InputError
from unsloth_pack.packed_row.describe import describe_row


def pool_documents(
    hidden_states: Tensor, packed_seq_lengths: object, how: Literal["last", "mean"] = "last"
) -> Tensor:
    """Make one embedding of each document from the hidden states of its tokens.

    ```python
    model = AutoModel.from_pretrained(name)
    unsloth_pack.patch_model(model)
    hidden = model(input_ids, packed_seq_lengths=lengths).last_hidden_state
    embeddings = unsloth_pack.pool_documents(hidden, lengths, "mean")
    ```

    Args:
        hidden_states: `[B, T, C]`, usually of one row `[1, T, C]`.
        packed_seq_lengths: the document lengths, as the model took them.
        how: "last" takes the last token's, for models that attend to the left alone; "mean" averages them.

    Returns:
        `[documents, C]` in the dtype of `hidden_states`, in the order of the documents; padding is not read.

    Raises:
        InputError: another `how`; hidden states of another shape; lengths that do not fit them.
    """
    if how not in ("last", "mean"):
        raise InputError(f"how is {how!r}; give 'last' or 'mean'")
    if hidden_states.dim() != 3:
        raise InputError(f"hidden_states have shape {list(hidden_states.shape)}; give [B, T, C]")
    n_rows, n_tokens, _ = hidden_states.shape
    row = describe_row((n_rows, n_tokens), hidden_states.device, packed_seq_lengths=packed_seq_lengths)
    if row is None:
        raise InputError("packed_seq_lengths is None; give the lengths that the model took")
    hidden_NC = hidden_states.flatten(0, 1)
    if how == "last":
        return hidden_NC.index_select(0, row.upload(row.last_tokens))
    segments = hidden_NC.split(row.lengths)
    return torch.stack([segments[number].mean(dim=0) for number in row.documents])
