"""`unsloth-pack generate`: what a model answers."""

import reprlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from unsloth_pack.errors import InputError
from unsloth_pack.recipe.kinds import path, real, whole
from unsloth_pack.recipe.options import DTYPE_HELP, DTYPE_UNSET, DTYPES
from unsloth_pack.recipe.parser import Parser


def run(arguments: Sequence[str]) -> int:
    """Print the answer to `--prompt`, or to every line of standard input, as it is generated.

    Raises:
        InputError: a bad argument, a prompt that is empty, too long or no text, or a model that cannot be
            loaded.
    """
    given = _parser().parse(arguments)
    prompts = [given["prompt"]] if "prompt" in given else _lines(sys.stdin)
    if given.get("prompt", "-").strip() == "":
        raise InputError(f"prompt is {given['prompt']!r}; give some text")

    from unsloth_pack.cli.quiet import quieten

    quieten()
    from unsloth_pack.api import FastLanguageModel

    new_tokens = given.get("max_new_tokens", 128)
    names = ("dtype", "load_in_4bit")
    model, tokenizer = FastLanguageModel.from_pretrained(
        given.get("model_name", "demo"),
        max_seq_length=1,  # no row will be packed
        **{name: given[name] for name in names if name in given},
    )
    _answer(
        FastLanguageModel.for_inference(model), tokenizer, prompts, new_tokens, given.get("temperature", 0.0)
    )
    return 0


def _parser() -> Parser:
    parser = Parser(prog="unsloth-pack generate", description="Generate text from a model or an adapter.")
    parser.add_argument(
        "--model_name",
        type=path,
        help="demo, a folder of a model or an adapter, or a hub name (default: demo)",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="what to answer (default: every line of standard input)"
    )
    parser.add_argument(
        "--max_new_tokens",
        type=whole(1),
        metavar="TOKENS",
        help="length of the longest answer (default: 128)",
    )
    parser.add_argument(
        "--temperature", type=real(0), help="of sampling; 0 takes the most likely token (default: 0)"
    )
    parser.add_choice("--dtype", DTYPES, f"{DTYPE_HELP} (default: {DTYPE_UNSET})")
    parser.add_switch("--load_in_4bit", "hold the weights in NF4")
    return parser


def _answer(model: Any, tokenizer: Any, prompts: Iterable[str], new_tokens: int, temperature: float) -> None:
    from transformers import TextStreamer

    n_positions = model.config.get_text_config().max_position_embeddings
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    for prompt in filter(str.strip, prompts):
        inputs = _encode(tokenizer, prompt).to(model.device)
        n_tokens = inputs["input_ids"].shape[1]
        if n_tokens + new_tokens > n_positions:
            raise InputError(
                f"the prompt has {n_tokens} tokens and --max_new_tokens is {new_tokens}, but the model has "
                f"{n_positions} positions; shorten it, or lower --max_new_tokens"
            )
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        model.generate(
            **inputs,
            **sampling,
            max_new_tokens=new_tokens,
            streamer=streamer,
            pad_token_id=tokenizer.pad_token_id
            if tokenizer.pad_token_id is not None
            else tokenizer.eos_token_id,
        )


def _lines(stream: TextIO) -> Iterator[str]:
    try:
        for line in stream:
            yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not {error.encoding} ({error.reason}); convert it") from None


def _encode(tokenizer: Any, prompt: str) -> Any:
    try:
        prompt.encode()
    except UnicodeEncodeError:  # Python's way to hold bytes of another encoding
        raise InputError(f"the prompt {reprlib.repr(prompt)} is not UTF-8; convert it") from None
    if not tokenizer.chat_template:
        return tokenizer(prompt, return_tensors="pt")
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
