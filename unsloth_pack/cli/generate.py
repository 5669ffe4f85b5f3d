"""`unsloth-pack generate`: what a model answers."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TextIO

from unsloth_pack.config import Parser
from unsloth_pack.config.values import Count, FilePath, NotNegative
from unsloth_pack.errors import InputError
from unsloth_pack.run.data_flags import check_sources


def run(arguments: Sequence[str]) -> int:
    """Print the answer to `--prompt`, or to every line of standard input, as it is generated.

    With `--image`, which may be given several times, every prompt is asked about these images.

    Raises:
        InputError: a bad argument, a prompt that is empty, too long or no text, or a model that cannot be
            loaded.
    """
    given = _parser().parse(arguments)
    prompts = [given["prompt"]] if "prompt" in given else _lines(sys.stdin)
    if given.get("prompt", "-").strip() == "":
        raise InputError(f"prompt is {given['prompt']!r}; give some text")
    check_sources(given)

    from unsloth_pack.cli.quiet import quieten

    quieten()
    from unsloth_pack.api import FastLanguageModel
    from unsloth_pack.cli.prompts import encode

    name, files = given.get("model_name", "demo"), given.get("image", [])
    options: dict[str, Any] = {"max_seq_length": 1}  # no row will be packed
    options |= {option: given[option] for option in ("dtype", "load_in_4bit") if option in given}
    if files:
        model, tokenizer, encoded = _load_with_images(name, files, options)
    else:
        model, tokenizer = FastLanguageModel.from_pretrained(name, **options)
        encoded = partial(encode, tokenizer, model_type=model.config.model_type)
    model = FastLanguageModel.for_inference(model)
    _answer(model, tokenizer, map(encoded, filter(str.strip, prompts)), given)
    return 0


def _load_with_images(
    name: str, files: Sequence[str], options: dict[str, Any]
) -> tuple[Any, Any, Callable[[str], Any]]:
    """A model of vision and language, its tokenizer, and what makes its inputs of a prompt.

    Raises:
        InputError: the model takes no images, refuses one of these, or they are not prepared here.
    """
    from unsloth_pack.cli.prompts import encode_with_images, open_images, refuse_sizes
    from unsloth_pack.images.families import make_image_family
    from unsloth_pack.images.tokens import IMAGE_TOKENS
    from unsloth_pack.run.images import takes_images
    from unsloth_pack.vision_api import FastVisionModel

    if not takes_images(name):
        raise InputError(f"--image is {files[0]!r}, and {name} takes no images; leave it out")
    images = open_images(files)
    model, processor = FastVisionModel.from_pretrained(name, **options)
    refuse_sizes(files, images, make_image_family(model.config, processor.image_processor))
    tokens = IMAGE_TOKENS[model.config.model_type]
    return model, processor.tokenizer, partial(encode_with_images, processor, tokens, images=images)


def _parser() -> Parser:
    parser = Parser(prog="unsloth-pack generate", description="Generate text from a model or an adapter.")
    parser.add_argument(
        "--model_name",
        type=FilePath,
        help="demo, a folder of a model or an adapter, or a hub name (default: demo)",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="what to answer (default: every line of standard input)"
    )
    parser.add_argument(
        "--image",
        action="append",
        metavar="FILE",
        help="an image to ask about; several are given one by one. <image> in the prompt says where each "
        "belongs (default: before the prompt)",
    )
    parser.add_argument(
        "--max_new_tokens",
        type=Count,
        metavar="TOKENS",
        help="length of the longest answer (default: 128)",
    )
    parser.add_argument(
        "--temperature", type=NotNegative, help="of sampling; 0 takes the most likely token (default: 0)"
    )
    parser.add_option("dtype")
    parser.add_option("load_in_4bit")
    return parser


def _answer(model: Any, tokenizer: Any, encoded: Iterable[Any], given: dict[str, Any]) -> None:
    """Print what the model answers to every prompt.

    Args:
        given: the arguments of the command line.
    """
    from transformers import TextStreamer

    n_positions = model.config.get_text_config().max_position_embeddings
    new_tokens, temperature = given.get("max_new_tokens", 128), given.get("temperature", 0.0)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    # A model's own generation config may ask for what cannot be streamed
    streamed = {"num_beams": 1, "num_return_sequences": 1, "output_attentions": False, "tokenizer": tokenizer}
    pads = tokenizer.pad_token_id is not None
    for each in encoded:
        inputs = each.to(model.device)
        n_tokens = inputs["input_ids"].shape[1]
        if n_tokens + new_tokens > n_positions:
            raise InputError(
                f"the prompt has {n_tokens} tokens and --max_new_tokens is {new_tokens}, but the model has "
                f"{n_positions} positions; shorten it, or lower --max_new_tokens"
            )
        model.generate(
            **inputs,
            **sampling,
            **streamed,
            max_new_tokens=new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            pad_token_id=tokenizer.pad_token_id if pads else tokenizer.eos_token_id,
        )


def _lines(stream: TextIO) -> Iterator[str]:
    try:
        for line in stream:
            yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not {error.encoding} ({error.reason}); convert it") from None
