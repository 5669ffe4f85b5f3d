"""`unsloth-pack generate`: what a model answers to a prompt, perhaps about images."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unsloth_pack.config import Parser
from unsloth_pack.config.values import Count, NotNegative
from unsloth_pack.errors import InputError
from unsloth_pack.run.data_flags import check_sources

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from unsloth_pack.images.tokens import ImageTokens


def run(arguments: Sequence[str]) -> int:
    """Print the answer to `--prompt`, or to every line of standard input, as it is generated.

    With `--image`, which may be given several times, every prompt is asked about these images.
    """
    flags = build_parser().parse(arguments)
    if not flags.get("prompt", "-").strip():
        raise InputError("prompt is empty; give some text")
    prompts = [flags["prompt"]] if "prompt" in flags else (line.rstrip("\n") for line in sys.stdin)
    check_sources(flags)

    from unsloth_pack.cli import quieten

    quieten()
    from unsloth_pack.api import FastLanguageModel

    name, files = flags.get("model_name", "demo"), flags.get("image", [])
    options: dict[str, Any] = {"max_seq_length": 1}  # no row will be packed
    options |= {option: flags[option] for option in ("dtype", "load_in_4bit") if option in flags}
    if files:
        model, tokenizer, encode_prompt = _load_with_images(name, files, options)
    else:
        model, tokenizer = FastLanguageModel.from_pretrained(name, **options)
        encode_prompt = partial(encode, tokenizer)
    if model.get_output_embeddings() is None:
        raise InputError(f"{name} classifies texts and writes none; call it in Python")
    model = FastLanguageModel.for_inference(model)
    _answer(model, tokenizer, map(encode_prompt, filter(str.strip, prompts)), flags)
    return 0


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    parser = Parser(prog="unsloth-pack generate", description="Generate text from a model or an adapter.")
    add = parser.add_argument
    parser.add_option("model_name", "demo, a folder of a model or an adapter, or a hub name (default: demo)")
    add("--prompt", metavar="TEXT", help="what to answer (default: every line of standard input)")
    about = "an image to ask about; several are given one by one. <image> in the prompt says where each"
    add("--image", action="append", metavar="FILE", help=f"{about} belongs (default: before the prompt)")
    add("--max_new_tokens", type=Count, metavar="TOKENS", help="length of the longest answer (default: 128)")
    add("--temperature", type=NotNegative, help="of sampling; 0 takes the most likely token (default: 0)")
    parser.add_option("dtype")
    parser.add_option("load_in_4bit")
    return parser


def _load_with_images(
    name: str, files: Sequence[str], options: dict[str, Any]
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, Callable[[str], BatchEncoding]]":
    """Return a model that takes images, its tokenizer, and a function that encodes a prompt about these."""
    from unsloth_pack.images.reading import parse_source, read_pixels
    from unsloth_pack.images.tokens import IMAGE_TOKENS
    from unsloth_pack.run.images import takes_images
    from unsloth_pack.vision_api import FastVisionModel

    if not takes_images(name):
        raise InputError(f"--image is {files[0]!r}, and {name} takes no images; leave it out")
    images = []
    for file in files:
        try:
            images.append(read_pixels(parse_source(0, "image", str(Path(file).absolute()), None)))
        except InputError:  # its words are of a row of data
            raise InputError(f"--image is {file!r}, which is no file with an image; correct it") from None
    model, processor = FastVisionModel.from_pretrained(name, **options)
    tokens = IMAGE_TOKENS[model.config.model_type]
    return model, processor.tokenizer, partial(encode_with_images, processor, tokens, images=images)


def encode(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> "BatchEncoding":
    """Encode a prompt without images."""
    if not tokenizer.chat_template:
        return cast("BatchEncoding", tokenizer(prompt, return_tensors="pt"))
    return _in_template(tokenizer, {"role": "user", "content": prompt})


def _in_template(owner: "PreTrainedTokenizerBase | ProcessorMixin", turn: Any) -> "BatchEncoding":
    inputs = owner.apply_chat_template(
        [turn], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    return cast("BatchEncoding", inputs)


def encode_with_images(
    processor: "ProcessorMixin", tokens: "ImageTokens", prompt: str, images: "Sequence[Image]"
) -> "BatchEncoding":
    """Encode a prompt about images; without `<image>` in it, they come before the text."""
    from unsloth_pack.images.rows import MARK, with_parts

    for token in tokens.texts:
        if token in prompt:
            raise InputError(f"the prompt holds {token}, a token of images; write {MARK}, and give --image")
    text = prompt if MARK in prompt else MARK * len(images) + prompt
    if (marks := text.count(MARK)) != len(images):
        problem = f"the prompt holds {marks} times {MARK}, and --image is given {len(images)} times"
        raise InputError(f"{problem}; give one for each")
    if not processor.chat_template:
        raise InputError("the model has no chat template, which puts images into a prompt; leave out --image")
    (turn,) = with_parts([{"role": "user", "content": text}])
    waiting = iter(images)
    turn["content"] = [
        part | {"image": next(waiting)} if part["type"] == "image" else part for part in turn["content"]
    ]
    return _in_template(processor, turn)


def _answer(
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    encoded: "Iterable[BatchEncoding]",
    flags: Mapping[str, Any],
) -> None:
    from transformers import TextStreamer

    n_positions = model.config.get_text_config().max_position_embeddings
    new_tokens, temperature = flags.get("max_new_tokens", 128), flags.get("temperature", 0.0)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    # A model's own generation config may ask for what cannot be streamed
    streamed = {"num_beams": 1, "num_return_sequences": 1, "output_attentions": False, "tokenizer": tokenizer}
    for each in encoded:
        inputs = each.to(model.device)
        n_tokens = inputs["input_ids"].shape[1]
        if n_tokens + new_tokens > n_positions:
            problem = f"the prompt has {n_tokens} tokens and --max_new_tokens is {new_tokens}"
            remedy = "shorten it, or lower --max_new_tokens"
            raise InputError(f"{problem}, but the model has {n_positions} positions; {remedy}")
        model.generate(
            **inputs,
            **sampling,
            **streamed,
            max_new_tokens=new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            pad_token_id=tokenizer.eos_token_id,
        )
