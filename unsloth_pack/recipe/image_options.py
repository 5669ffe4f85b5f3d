"""The options of rows with images: how images are prepared, and which parts of a model they train."""

from dataclasses import dataclass

from unsloth_pack.recipe.flags import option, switch
from unsloth_pack.recipe.kinds import path, real, whole


@dataclass(frozen=True)
class ImageOptions:
    """For models of vision and language: the images of the rows, and the parts that train."""

    image_folder: str | None = option(
        None,
        path,
        "folder in which the paths of images begin, and out of which none may lead",
        "FOLDER",
        unset="paths have to be absolute",
    )
    max_pixels: int | None = option(
        None, whole(1), "make larger images smaller, to so many pixels", "PIXELS", unset="the model's own"
    )
    min_pixels: int | None = option(
        None, whole(1), "make smaller images larger, to so many pixels", "PIXELS", unset="the model's own"
    )
    skip_broken_images: bool = switch(
        False, "leave out rows with an image that cannot be read, and count them, instead of refusing them"
    )
    shrink_images: bool = switch(
        False, "make the images of a document smaller that would be longer than max_seq_length with them"
    )
    dataloader_num_workers: int | None = option(
        None,
        whole(0),
        "processes (threads of a stream) beside each that trains, which decode images; text needs none",
        "PROCESSES",
        unset="on a GPU one for each core, at most 8; else 0",
    )
    freeze_vit: bool = switch(True, "do not train the vision tower; false puts an adapter on it")
    freeze_aligner: bool = switch(
        False, "do not train what carries images into the language model; else it trains as a whole"
    )
    freeze_llm: bool = switch(False, "do not train the language model, which gets no adapter then")
    vit_lr: float | None = option(
        None, real(above=0), "learning rate of the vision tower", "RATE", unset="learning_rate"
    )
    aligner_lr: float | None = option(
        None, real(above=0), "learning rate of the aligner", "RATE", unset="learning_rate"
    )
