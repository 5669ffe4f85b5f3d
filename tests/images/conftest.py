import pytest
from tiny_vision import vision_model, vision_processor

from unsloth_pack import VisionDataCollator


@pytest.fixture(scope="session")
def processor():
    return vision_processor()


@pytest.fixture(scope="session")
def collate():
    """A collator for a tiny Qwen3-VL."""
    model = vision_model()
    return lambda **options: VisionDataCollator(model, vision_processor(), **options)
