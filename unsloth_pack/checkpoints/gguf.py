"""GGUF files by llama.cpp: its own converter, its quantization, its answers, and Ollama's Modelfile."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from unsloth_pack.errors import InputError

QUANTIZATIONS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m")
_CONVERTER = "convert_hf_to_gguf"
_NO_MODELFILE = "the chat template has no form in Ollama's language; use --to gguf, and write a Modelfile"
# The converter knows a BPE tokenizer by its ids of one text, and so none with a vocabulary of its own
_CONVERT = """
import importlib, sys
place, module, splits, *arguments = sys.argv[1:]
sys.path.insert(0, place)
sys.argv[1:] = arguments
converter = importlib.import_module(module)
model = sys.modules.get("conversion.base", converter).TextModel
name_of = model.get_vocab_base_pre

def get_vocab_base_pre(self, tokenizer):
    try:
        return name_of(self, tokenizer)
    except NotImplementedError:
        if not splits:
            raise
        return splits

model.get_vocab_base_pre = get_vocab_base_pre
converter.main()
"""
_QUANTIZE = """
import sys, llama_cpp
source, target, kind = sys.argv[1:]
parameters = llama_cpp.llama_model_quantize_default_params()
parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), parameters))
"""
_MARKS = re.compile(r"(\{%-?\s*)(end)?generation(\s*-?%\})")  # of answers, which only transformers reads
_SPACED = """
{%%- set text -%%}%s{%%- endset -%%}{%%- set marks = %s -%%}{%%- set spaced = namespace(text=text) -%%}
{%%- for mark in marks -%%}
{%%- set spaced.text = spaced.text | replace(mark, mark + ' ') | replace(mark + '  ', mark + ' ') -%%}
{%%- endfor -%%}
{%%- for one in marks -%%}{%%- for other in marks -%%}
{%%- set spaced.text = spaced.text | replace(one + ' ' + other, one + other) -%%}
{%%- endfor -%%}{%%- endfor -%%}
{{- spaced.text if text[-1:] == ' ' or spaced.text[-1:] != ' ' else spaced.text[:-1] -}}"""


def find_converter(given: str | None) -> Path:
    """Find llama.cpp's converter, and llama-cpp-python beside it.

    Raises:
        InputError: one of them is missing.
    """
    if given is not None and not Path(given).is_file():
        raise InputError(f"converter is {given!r}, which is no file; give llama.cpp/{_CONVERTER}.py")
    spec = importlib.util.find_spec(_CONVERTER)
    path = given or (spec.origin if spec else None)
    if path is None or importlib.util.find_spec("llama_cpp") is None:
        missing = "llama-cpp-python" if path else f"{_CONVERTER}.py"
        raise InputError(f"{missing} is not installed; pip install 'unsloth-pack[gguf]'")
    return Path(path).absolute()


def convert(converter: Path, folder: Path, file: Path) -> None:
    """Convert the model in `folder` to `file`, in the 16 bits that it has.

    Raises:
        InputError: the converter refuses the model.
    """
    splits = "gpt-2" if _splits_as_gpt2(folder / "tokenizer.json") else ""
    place = [str(converter.parent), converter.stem]
    why = _run(_CONVERT, *place, splits, str(folder), f"--outfile={file}", "--outtype=auto")
    if not file.is_file():
        raise InputError(
            f"llama.cpp's converter refuses the model ({why}); use --to hf, or a newer --converter"
        )


def quantize(source: Path, target: Path, kind: str) -> None:
    """Write a file with weights in fewer bits, as llama-quantize does."""
    why = _run(_QUANTIZE, str(source), str(target), kind.upper())
    if not target.is_file():
        raise InputError(f"llama.cpp cannot quantize the model to {kind} ({why}); leave out --quantize")


def _run(code: str, *arguments: str) -> str:
    """Run code in a process of its own, for llama.cpp writes to stderr; returns the last line there."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    return done.stderr.strip().rpartition("\n")[2]


def _splits_as_gpt2(tokenizer: Path) -> bool:
    """Whether a BPE tokenizer splits texts as GPT-2's, or also at digits that no merge joins."""
    if not tokenizer.is_file():
        return False
    described = json.loads(tokenizer.read_text(encoding="utf-8"))
    splitter = described["pre_tokenizer"] or {}
    first, *others = splitter.get("pretokenizers", [splitter])
    if first.get("type") != "ByteLevel" or not first["use_regex"]:
        return False
    joins_digits = re.search(r"\d", str(described["model"].get("merges")))
    return not others or ([each["type"] for each in others] == ["Digits"] and not joins_digits)


def llama_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template as llama.cpp reads it: without marks of answers.

    llama.cpp puts no space before a text, so the template writes one where the tokenizer puts it.
    """
    if not isinstance(tokenizer.chat_template, str):
        return None
    template = _MARKS.sub(
        lambda mark: f"{mark[1]}{'endif' if mark[2] else 'if true'}{mark[3]}", tokenizer.chat_template
    )
    if tokenizer.is_fast and "ByteLevel(add_prefix_space=True" in str(
        tokenizer.backend_tokenizer.pre_tokenizer
    ):
        return _SPACED % (template, json.dumps(tokenizer.all_special_tokens))
    return template


class LlamaFile:
    """A model in a GGUF file, run by llama.cpp on the CPU; `room` is the longest text, in tokens."""

    def __init__(self, file: Path, room: int):
        from llama_cpp import Llama

        self._llama: Any = Llama(
            str(file), n_ctx=room, n_batch=room, n_gpu_layers=0, logits_all=True, verbose=False
        )

    def tokens(self, text: str, adds_special: bool) -> list[int]:
        """Encode a text, with what the tokenizer puts around it if `adds_special`."""
        ids: list[int] = self._llama.tokenize(text.encode(), add_bos=adds_special, special=True)
        return ids

    def logits(self, ids: list[int]) -> np.ndarray:
        """Compute logits `[tokens, vocabulary]`."""
        self._llama.reset()
        self._llama.eval(ids)
        return np.array(self._llama.scores[: len(ids)])

    def close(self) -> None:
        """Free its memory."""
        self._llama.close()


_SAID = {"system": "SYSTEM-TEXT", "user": "USER-TEXT", "assistant": "ASSISTANT-TEXT"}


def modelfile(tokenizer: PreTrainedTokenizerBase, file: str) -> str:
    """Write Ollama's Modelfile, with the chat template in Go's language, learned from a few conversations.

    Raises:
        InputError: the chat template does more than write the same around each turn of a role.
    """
    template, bos = llama_template(tokenizer), tokenizer.bos_token
    if template is None:
        return f"FROM ./{file}\n"

    def render(*roles: str, ask: bool = False) -> str:
        turns = [{"role": role, "content": _SAID[role]} for role in roles]
        text = str(tokenizer.apply_chat_template(turns, None, None, template, ask, tokenize=False))
        return text.removeprefix(bos) if bos and tokenizer("").input_ids else text  # llama.cpp adds it

    try:
        opening, after_user = render("user").split(_SAID["user"])
        asked, after_answer = render("user", "assistant").split(_SAID["assistant"])
        again = render("user", "assistant", "user").split(_SAID["assistant"])[1].split(_SAID["user"])[0]
        before_user = again.removeprefix(after_answer)
        before_system, after_system = render("system", "user").split(_SAID["user"])[0].split(_SAID["system"])
    except (ValueError, TemplateError) as error:
        raise InputError(_NO_MODELFILE) from error
    opening = opening.removesuffix(before_user)
    asks = render("user", ask=True).removeprefix(render("user"))
    around = {
        "system": (before_system, after_system.removesuffix(before_user)),
        "user": (before_user, after_user),
        "assistant": (asked.removeprefix(render("user")), after_answer),
    }
    talk = ("user", "assistant", "user")
    for roles in (talk[:1], talk, ("system", *talk)):
        turns = [f"{around[role][0]}{_SAID[role]}{around[role][1]}" for role in roles]
        begin = "" if roles[0] == "system" else opening
        if "".join([begin, *turns, asks]) != render(*roles, ask=True):
            raise InputError(_NO_MODELFILE)
    text = "{{ if not .System }}" + opening + "{{ end }}{{ range .Messages }}"
    for role, (before, after) in around.items():
        text += '{{ if eq .Role "' + role + '" }}' + before + "{{ .Content }}" + after + "{{ end }}"
    text += "{{ end }}" + asks
    stops = dict.fromkeys(filter(None, (after_answer.strip(), tokenizer.eos_token)))
    lines = (f"PARAMETER stop {json.dumps(stop)}\n" for stop in stops)
    return f'FROM ./{file}\nTEMPLATE """{text}"""\n{"".join(lines)}'
