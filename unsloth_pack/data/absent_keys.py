"""Objects as Arrow's struct type holds them: with null for every key that only other rows have.

Parquet files and `datasets` use that type, which cannot tell a null from an absent key. Here null means an
absent key, as it does to transformers in a turn. Where users choose the keys, as in the arguments of a call,
either meaning could be wrong: such a null is refused.
"""

from __future__ import annotations

from typing import Any

from unsloth_pack.data.refusals import fail

_CHOSEN_KEYS = {"arguments", "parameters", "chat_template_kwargs"}  # the objects whose keys users choose


def holds_objects(feature: Any) -> bool:
    """Whether a column of this `datasets` type holds structs."""
    inner = getattr(feature, "feature", None)  # of a list
    return isinstance(feature, dict) or (inner is not None and holds_objects(inner))


def without_absent_keys(index: int, column: str, feature: Any, value: Any) -> Any:
    """The value of row `index` without the keys that are null.

    Args:
        feature: the `datasets` type of the column.

    Raises:
        InputError: a null that might have been meant.
    """

    def settled(feature: Any, inner: Any, path: tuple[str, ...]) -> Any:
        if isinstance(feature, dict) and isinstance(inner, dict):
            kept = {}
            for key, item in inner.items():
                if item is None and _CHOSEN_KEYS.intersection(path):
                    refuse((*path, key))
                if item is not None:
                    kept[key] = settled(feature[key], item, (*path, key))
            return kept
        if isinstance(inner, list):
            return [settled(getattr(feature, "feature", None), item, path) for item in inner]
        return inner

    def refuse(path: tuple[str, ...]) -> None:
        first = next(place for place, key in enumerate(path) if key in _CHOSEN_KEYS)
        problem = f"{'.'.join(path[first:])} is null, as a struct column also holds keys that are absent"
        fail(index, column, problem, value, "give the rows as a .jsonl file, which tells them apart")

    return settled(feature, value, (column,))
