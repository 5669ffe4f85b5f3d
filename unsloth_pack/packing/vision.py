"""How many tokens an image will take: a forecast from its size, without reading the image."""

from unsloth_pack.packing.lengths import check_positive


def vision_tokens(height: int, width: int, patch: int = 16, merge: int = 2) -> int:
    """Merged vision tokens of an image of `height` by `width` pixels.

    One token stands for `merge` by `merge` patches of `patch` by `patch` pixels; a partial token at an edge
    counts as a whole one. Markers around the image and a resize before the encoder are not included.

    Raises:
        InputError: an argument is not a whole number of at least 1.
    """
    sizes = {"height": height, "width": width, "patch": patch, "merge": merge}
    height, width, patch, merge = (check_positive(name, size) for name, size in sizes.items())
    side = patch * merge
    return -(-height // side) * -(-width // side)
