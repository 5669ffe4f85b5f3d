"""Sizes rounded up, so that rows of about one size replay the same CUDA graphs."""


def rounded_up(n: int, least: int = 1) -> int:
    """n in steps of a sixteenth of the power of 2 above, or of `least` where that is more."""
    step = max(least, power_of_2(n) // 16)
    return -(-n // step) * step


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is not below n."""
    return 1 << max(0, n - 1).bit_length()
