"""Features of a tower's middle layers, added to the image tokens behind the first layers of the decoder.

Shapes: B rows of T tokens, V of all tokens stand for images, C features.

Source: DeepStack (Meng et al. 2024).
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unsloth_pack.errors import InputError
from unsloth_pack.models.vision_spec import DEEPSTACK
from unsloth_pack.row.packed_row import PackedRow


def visual_by_layer(row: PackedRow, kwargs: dict[str, Any]) -> Sequence[Tensor]:
    """`[V, C]` for each of the first layers, taken out of the keywords of a decoder's call.

    Raises:
        InputError: there are some, and the row does not say where its images stand.
    """
    kwargs.pop("visual_pos_masks", None)
    by_layer = kwargs.pop(DEEPSTACK, None) or []
    if len(by_layer) and row.visual is None:
        raise InputError(
            f"{DEEPSTACK} came with a packed row that does not say where its images stand; call "
            "the model with the head, with pixel_values"
        )
    return by_layer


def add_visual(hidden_BTC: Tensor, row: PackedRow, features_VC: Tensor) -> Tensor:
    """The hidden states with these features on the tokens of images."""
    features_VC = features_VC.to(hidden_BTC.dtype)
    if len(features_VC) == row.n_tokens:  # of every token, as in a captured step
        return hidden_BTC + features_VC.view(hidden_BTC.shape)
    return hidden_BTC.flatten(0, 1).index_add(0, row.visual_ids, features_VC).view(hidden_BTC.shape)
