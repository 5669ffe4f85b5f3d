"""How many tokens an image will take: a forecast from its size, with no image read."""

from unsloth_pack.packing.lengths import check_positive


def vision_tokens(height: int, width: int, patch: int = 16, merge: int = 2) -> int:
    """Merged vision tokens of an image of `height` by `width` pixels.

    One token stands for `merge` by `merge` patches of `patch` by `patch` pixels; a started one counts whole.
    Markers around the image and a resize before the encoder are not part of it.

    Raises:
        InputError: an argument is no whole number of at least 1.
    """
    sizes = {"height": height, "width": width, "patch": patch, "merge": merge}
    height, width, patch, merge = (check_positive(name, size) for name, size in sizes.items())
    side = patch * merge
    return -(-height // side) * -(-width // side)
