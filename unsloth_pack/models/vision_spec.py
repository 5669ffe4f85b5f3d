"""What may differ between models of vision and language around a text model, as data."""

from dataclasses import dataclass
from typing import Literal

TOKEN_TYPES = "token_type_ids"  # 1 at the tokens of images
MODALITIES = "mm_token_type_ids"  # likewise, as all processors but Gemma's call it
DEEPSTACK = "deepstack_visual_embeds"  # what a decoder adds to tokens of images behind its first layers


@dataclass(frozen=True)
class VisionSpec:
    """How one model of vision and language puts images into the rows of its text model.

    Args:
        model_type: `config.model_type` of the whole model.
        tower: where its base model holds the tower, which turns pixels into features.
        aligner: modules that turn the tower's features into the text model's, by their paths below the base
            model.
        attends: how the tower's layers attend. Within the `grids` of images, whose patches lie in one row;
            within `sizes` of images, which it cuts into patches and lays in one row; or within each entry of
            a `batch` of images or tiles of one size.
        token: config field of the token that stands for each token of an image.
        grid: the argument of a call that holds `[images, 3]`, the patches of every image in time, height and
            width. By these the tokens of images have positions on three axes, see `row.images`. None: they
            have ordinary positions, and how many an image has is known once the tower has seen it.
        sizes: the argument of a call that holds `[images, 2]`, height and width of every image in pixels.
        options: other arguments of a call that reach the tower.
        of_documents: the one of these that holds how many images every document has. The tower reads it as
            one image a document where it is not given.
        dimensions: how many dimensions `pixel_values` may have.
        side: config field of the tower: height and width of every image in pixels; None where they are free.
        alike: every entry of the tower's batch becomes the same number of tokens.
        drops_zeros: an image of zeros is padding, which the model leaves out.
        merge: config field of the tower, or with `sizes` of the whole model: patches a side that become one
            token. Only where images have a size of their own.
        deepstack: config field of the tower that lists its layers whose features join the first layers of the
            text model; None where only its last ones come in.
        windows: most layers of the tower attend within windows of an image.
        both_ways: the tokens of images that stand side by side in a document see each other in both
            directions, which a call marks by 1 in `TOKEN_TYPES`.
        interpolates: the tower resamples a table of learned positions to the grid of every image.
        rms_norms: the names of the tower's RMS norms.
        gated_mlp: the name of a gated MLP in the layers of the tower; None where they have none.
    """

    model_type: str
    tower: str = "visual"
    aligner: tuple[str, ...] = ("visual.merger",)
    attends: Literal["grids", "sizes", "batch"] = "grids"
    token: str = "image_token_id"
    grid: str | None = "image_grid_thw"
    sizes: str | None = None
    options: tuple[str, ...] = ()
    of_documents: str | None = None
    dimensions: tuple[int, ...] = (2,)
    side: str | None = None
    alike: bool = False
    drops_zeros: bool = False
    merge: str = "spatial_merge_size"
    deepstack: str | None = None
    windows: bool = False
    both_ways: bool = False
    interpolates: bool = False
    rms_norms: tuple[str, ...] = ()
    gated_mlp: str | None = None

    @property
    def needed(self) -> tuple[str, ...]:
        """The arguments without which pixels mean nothing."""
        return tuple(name for name in (self.grid, self.sizes) if name is not None)

    @property
    def arguments(self) -> tuple[str, ...]:
        """All arguments of a call that describe its pixels."""
        return (*self.needed, *self.options)
