"""The tiers leave out no field of a spec and no tower, and name files that exist."""

from dataclasses import fields
from pathlib import Path

from tiers import (
    ARCHITECTURES,
    COVER,
    DESCRIPTIVE,
    QUICK,
    features_of,
    smallest_cover,
)

from unsloth_pack.models import arch_spec_for
from unsloth_pack.models.spec import ArchSpec


def test_quick_files_exist():
    assert all((Path(__file__).parent / path).is_file() for path in QUICK)


def test_the_cover_is_the_smallest_that_uses_every_field():
    """`axes` alone belongs to models with images. Taking the largest first would end with three."""
    features = {"large": {1, 2, 3, 4}, "left": {1, 2, 5}, "right": {3, 4, 6}}
    assert {*smallest_cover(features)} == {"left", "right"}
    used = set().union(*(features_of(arch_spec_for(name)) for name in COVER))
    assert used | {*DESCRIPTIVE, "axes"} == {field.name for field in fields(ArchSpec)}
    assert "axes" in features_of(arch_spec_for("qwen3_vl_text"))
    assert {*COVER} < {*ARCHITECTURES}
