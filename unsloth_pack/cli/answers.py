"""A model that answers conversations, loaded and decoded alike for `generate` and `chat`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from torch import Tensor
from transformers import BatchFeature, TextStreamer

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.checkpoints.loading import find_model, load_config
from unsloth_pack.cli.generate import Conversation
from unsloth_pack.data.encoding import TEMPLATE_REFUSALS
from unsloth_pack.errors import InputError, first_line
from unsloth_pack.images.encoding import renders_strings
from unsloth_pack.images.reading import parse_source, read_pixels
from unsloth_pack.images.rows import MARK, with_parts
from unsloth_pack.images.tokens import IMAGE_TOKENS
from unsloth_pack.run.from_adapter import LOADED_IN
from unsloth_pack.vision_api import FastVisionModel

if TYPE_CHECKING:
    from PIL.Image import Image

_LOADING = {name: name for name in ("dtype", *LOADED_IN)} | {"seed": "random_state"}
_SAMPLING = ("temperature", "top_p", "top_k")


class Streamer(TextStreamer):
    """Prints an answer as it is generated, or shows all of it so far, and keeps its ids."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None] | None = None):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._ids: list[int] = []
        self._show = show

    def put(self, value: Any) -> None:
        if not self.next_tokens_are_prompt:
            self._ids += value.tolist()
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._show is None:
            super().on_finalized_text(text, stream_end)
        else:
            self._show(self.text)

    @property
    def text(self) -> str:
        """The answer so far."""
        return str(self.tokenizer.decode(self._ids, skip_special_tokens=True)).strip()


class Answerer:
    """A model, or one with an adapter, ready to answer.

    Args:
        flags: `max_new_tokens`, and those of loading, sampling and images that are given.
        too_long: what to do about a prompt that leaves no place for an answer.
    """

    def __init__(self, name: str, flags: Mapping[str, Any], too_long: str):
        self._name, self._too_long, self._new_tokens = name, too_long, flags["max_new_tokens"]
        self._image_tokens = IMAGE_TOKENS.get(load_config(find_model(name)[0]).model_type)
        for file in flags.get("image", ()):
            self.read_image(file)
        loading = {option: flags[flag] for flag, option in _LOADING.items() if flag in flags}
        loader: Any = FastLanguageModel if self._image_tokens is None else FastVisionModel
        model, self._processor = loader.from_pretrained(name, max_seq_length=1, **loading)  # packs no row
        if model.get_output_embeddings() is None:
            raise InputError(f"{name} classifies texts and writes none; call it in Python, or merge it")
        self.model = FastLanguageModel.for_inference(model)
        self.tokenizer = own = getattr(self._processor, "tokenizer", self._processor)
        own.pad_token = own.pad_token or own.eos_token or own.convert_ids_to_tokens(0)
        own.padding_side, self.has_template = "left", bool(self._processor.chat_template)
        self._in_parts = self._image_tokens is not None and not renders_strings(own)
        sampling = {option: flags[option] for option in _SAMPLING if flags.get(option)}
        self._options = {"do_sample": bool(sampling), "max_new_tokens": self._new_tokens, **sampling}
        # A model's own generation config may ask for what cannot be streamed
        self._options |= {"num_beams": 1, "num_return_sequences": 1, "tokenizer": own}
        self._options |= dict.fromkeys(("output_attentions", "return_dict_in_generate"), False)
        self._options["pad_token_id"] = own.pad_token_id

    def answer(self, conversations: Sequence[Conversation], streamer: Streamer | None = None) -> list[str]:
        """Answer conversations together; a streamer takes one."""
        inputs = self.encode(conversations)
        ids = self.generate(inputs, streamer)
        new = ids[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self.tokenizer.batch_decode(new, skip_special_tokens=True)]

    def generate(self, inputs: BatchFeature, streamer: Streamer | None = None) -> Tensor:
        """Generate token ids `[n, tokens]`, those of the prompts and behind them those of the answers."""
        ids: Tensor = self.model.generate(**inputs, **self._options, streamer=streamer)
        return ids

    def encode(self, conversations: Sequence[Conversation]) -> BatchFeature:
        """Encode conversations: `input_ids` and `attention_mask` `[n, tokens]`, padded on the left.

        Raises:
            InputError: an image or a turn is refused, or the answer would not fit into the positions.
        """
        images = [[self.read_image(file) for file in each.images] for each in conversations]
        beside: dict[str, Any] = {"images": images} if any(images) else {}
        try:
            texts = [self.render(each) for each in conversations]
            begins = self._image_tokens is None or texts[0].startswith(self.tokenizer.bos_token or "")
            beside |= {"add_special_tokens": not (self.has_template and begins)}
            inputs: BatchFeature = self._processor(text=texts, padding=True, return_tensors="pt", **beside)
        except InputError:
            raise
        except (TemplateError, *TEMPLATE_REFUSALS) as error:
            raise InputError(f"the chat template refuses it ({first_line(error)[:60]}); correct it") from None
        n_positions = self.model.config.get_text_config().max_position_embeddings
        if (n_tokens := inputs["input_ids"].shape[1]) + self._new_tokens > n_positions:
            problem = f"the prompt has {n_tokens} tokens and --max_new_tokens is {self._new_tokens}"
            raise InputError(f"{problem}, but the model has {n_positions} positions; {self._too_long}")
        return inputs.to(self.model.device)

    def render(self, asked: Conversation) -> str:
        """The text of a conversation, in the chat template if the tokenizer has one."""
        turns, n_images = [*asked.turns], len(asked.images)
        texts = [turn.get("content") or "" for turn in turns]
        if self._image_tokens is not None:
            if n_images and MARK not in "".join(texts):
                texts[-1] = MARK * n_images + texts[-1]
                turns[-1] = turns[-1] | {"content": texts[-1]}
            whole = "\n".join(texts)
            if token := next((token for token in self._image_tokens.texts if token in whole), None):
                raise InputError(f"the prompt holds {token}, a token of images; write {MARK} for an image")
            if (marks := whole.count(MARK)) != n_images:
                problem = f"the prompt holds {marks} times {MARK}, and there are {n_images} images"
                raise InputError(f"{problem}; give one for each")
            turns = with_parts(turns, self._in_parts)
        if not self.has_template:
            return "\n".join(texts)
        render = self._processor.apply_chat_template
        return str(render(turns, add_generation_prompt=True, tokenize=False, **asked.variables))

    def read_image(self, file: str) -> "Image":
        """Read an image; InputError if the model takes none, or it cannot be read."""
        if self._image_tokens is None:
            raise InputError(f"{self._name} takes no images; leave out {file!r}")
        try:
            return read_pixels(parse_source(0, "image", str(Path(file).absolute()), None))
        except InputError:  # its words are of a row of data
            raise InputError(f"{file!r} is no file with an image; correct it") from None
