"""GGUF files by llama.cpp: its own converter, its quantization, its answers, and Ollama's Modelfile."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

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
    path = given or (spec and spec.origin)
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
    """Whether a BPE tokenizer splits texts as GPT-2's does, or apart from that at digits that no merge joins."""
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

        options = {"n_ctx": room, "n_batch": room, "logits_all": True, "verbose": False}
        self._llama = Llama(str(file), n_gpu_layers=0, **options)

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


# Ollama reads templates in Go's language. Its texts are learned from conversations of these turns.
_TURNS = {"system": "SYSTEM-TEXT", "user": "USER-TEXT", "assistant": "ASSISTANT-TEXT"}


def modelfile(tokenizer: PreTrainedTokenizerBase, file: str) -> str:
    """Write Ollama's Modelfile, with what the chat template writes around turns.

    Raises:
        InputError: the chat template does more than write the same around each turn of a role.
    """
    template = llama_template(tokenizer)
    if template is None:
        return f"FROM ./{file}\n"

    def render(*roles: str, ask: bool = False) -> str:
        turns = [{"role": role, "content": _TURNS[role]} for role in roles]
        text: str = tokenizer.apply_chat_template(
            turns, chat_template=template, tokenize=False, add_generation_prompt=ask
        )
        return text

    user, system, assistant = _TURNS["user"], _TURNS["system"], _TURNS["assistant"]
    try:
        opening, after_user = render("user").split(user)
        before_assistant, after_assistant = render("user", "assistant").split(user)[1].split(assistant)
        before_assistant = before_assistant.removeprefix(after_user)
        asks = render("user", ask=True).split(user)[1].removeprefix(after_user)
        again = render("user", "assistant", "user").split(assistant)[1].split(user)[0]
        before_user = again.removeprefix(after_assistant)
        before_system, after_system = render("system", "user").split(user)[0].split(system)
        after_system = after_system.removesuffix(before_user)
    except (ValueError, TemplateError) as error:
        raise InputError(_NO_MODELFILE) from error
    opening = opening.removesuffix(before_user)
    around = {
        "system": (before_system, after_system),
        "user": (before_user, after_user),
        "assistant": (before_assistant, after_assistant),
    }

    def compose(*roles: str) -> str:
        begin = "" if roles[0] == "system" else opening
        turns = [f"{around[role][0]}{_TURNS[role]}{around[role][1]}" for role in roles]
        return "".join([begin, *turns, asks])

    talk = ("user", "assistant", "user")
    if any(compose(*roles) != render(*roles, ask=True) for roles in (talk[:1], talk, ("system", *talk))):
        raise InputError(_NO_MODELFILE)
    if tokenizer.bos_token and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]:  # llama.cpp adds it
        opening = opening.removeprefix(tokenizer.bos_token)
        around["system"] = (before_system.removeprefix(tokenizer.bos_token), after_system)
    turns = " else ".join(
        f'{{{{ if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}{{{{'
        for role, (before, after) in around.items()
    ).replace("{{ else {{ if", "{{ else if")
    text = f"{{{{ if not .System }}}}{opening}{{{{ end }}}}{{{{ range .Messages }}}}{turns} end }}}}{{{{ end }}}}{asks}"
    stops = dict.fromkeys(filter(None, (tokenizer.eos_token, after_assistant.strip())))
    lines = [
        f"FROM ./{file}",
        f'TEMPLATE """{text}"""',
        *(f"PARAMETER stop {json.dumps(stop)}" for stop in stops),
    ]
    return "\n".join(lines) + "\n"
