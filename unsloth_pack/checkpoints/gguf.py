"""GGUF files by llama.cpp's own converter and quantization, and Ollama's Modelfile."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from unsloth_pack.errors import InputError

_CONVERTER = "convert_hf_to_gguf"
# The converter knows a BPE tokenizer by its ids of one text, and so none with a vocabulary of its own
_CONVERT = """
import importlib, sys
place, module, splits, *arguments = sys.argv[1:]
sys.path.insert(0, place)
sys.argv[1:] = arguments
converter = importlib.import_module(module)
if splits:
    model = sys.modules.get("conversion.base", converter).TextModel
    model.get_vocab_base_pre = lambda self, tokenizer: splits
converter.main()
"""
# Marks of answers, which only transformers reads
_MARK, _END_MARK = re.compile(r"(\{%-?\s*)generation\b"), re.compile(r"(\{%-?\s*)endgeneration\b")
_SPACED = """
{%%- set text -%%}%s{%%- endset -%%}{%%- set marks = %s -%%}{%%- set spaced = namespace(text=text) -%%}
{%%- for mark in marks -%%}
{%%- set spaced.text = spaced.text | replace(mark, mark + ' ') | replace(mark + '  ', mark + ' ') -%%}
{%%- endfor -%%}
{%%- for one in marks -%%}{%%- for other in marks -%%}
{%%- set spaced.text = spaced.text | replace(one + ' ' + other, one + other) -%%}
{%%- endfor -%%}{%%- endfor -%%}
{{- spaced.text if text[-1:] == ' ' or spaced.text[-1:] != ' ' else spaced.text[:-1] -}}"""


def find_converter(given: Path | None) -> Path:
    """Find llama.cpp's converter, unless it is given.

    Raises:
        InputError: it is missing, or llama-cpp-python is.
    """
    if given is None and (spec := importlib.util.find_spec(_CONVERTER)) is not None and spec.origin:
        given = Path(spec.origin)
    if given is None or importlib.util.find_spec("llama_cpp") is None:
        missing = "llama-cpp-python" if given else f"{_CONVERTER}.py"
        raise InputError(f"{missing} is not installed; pip install 'unsloth-pack[gguf]'")
    return given.absolute()


def convert(converter: Path, folder: Path, file: Path) -> None:
    """Convert the model in `folder` to `file`, in the 16 bits that it has.

    Raises:
        InputError: the converter refuses the model.
    """
    splits = "gpt-2" if _splits_as_gpt2(folder / "tokenizer.json") else ""
    command = [sys.executable, "-c", _CONVERT, str(converter.parent), converter.stem, splits, str(folder)]
    command += [f"--outfile={file}", "--outtype=auto"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if not file.is_file():
        why = done.stderr.strip().rpartition("\n")[2]
        raise InputError(
            f"llama.cpp's converter refuses the model ({why}); use --to hf, or a newer --converter"
        )


def quantize(source: Path, target: Path, kind: str) -> None:
    """Write a file with weights in fewer bits, as llama-quantize does."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), parameters):
        raise InputError(f"llama.cpp cannot quantize the model to {kind}; leave out --quantize")


def _splits_as_gpt2(tokenizer: Path) -> bool:
    """Whether a BPE tokenizer splits texts as GPT-2's, or also at digits that no merge joins."""
    described = json.loads(tokenizer.read_text(encoding="utf-8")) if tokenizer.is_file() else {}
    splitter = described.get("pre_tokenizer") or {}
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
    template = _MARK.sub(r"\1if true", _END_MARK.sub(r"\1endif", tokenizer.chat_template))
    if tokenizer.is_fast and "ByteLevel(add_prefix_space=True" in str(
        tokenizer.backend_tokenizer.pre_tokenizer
    ):
        return _SPACED % (template, json.dumps(tokenizer.all_special_tokens))
    return template


def modelfile(tokenizer: PreTrainedTokenizerBase, file: str) -> str:
    """Write Ollama's Modelfile, with the chat template in Go's language, learned from a few conversations.

    Raises:
        InputError: the chat template does more than write the same around each turn of a role.
    """
    template, bos = llama_template(tokenizer), tokenizer.bos_token
    if template is None:
        return f"FROM ./{file}\n"

    def render(*roles: str, ask: bool = False) -> str:
        turns = [{"role": role, "content": f"{role}-TEXT"} for role in roles]
        text = str(tokenizer.apply_chat_template(turns, None, None, template, ask, tokenize=False))
        return text.removeprefix(bos) if bos and tokenizer("").input_ids else text  # llama.cpp adds it

    def split(*roles: str) -> list[str]:
        return re.split("(?:system|user|assistant)-TEXT", render(*roles))

    talk = ("user", "assistant", "user")
    try:
        opening, after_user = split("user")
        _, before_answer, after_answer = split(*talk[:2])
        before_user = split(*talk)[2].removeprefix(after_answer)
        before_system, after_system, _ = split("system", "user")
        around = {
            "system": (before_system, after_system.removesuffix(before_user)),
            "user": (before_user, after_user),
            "assistant": (before_answer.removeprefix(after_user), after_answer),
        }
        opening, asks = (
            opening.removesuffix(before_user),
            render("user", ask=True).removeprefix(render("user")),
        )
        for roles in (talk[:1], talk, ("system", *talk)):
            turns = [f"{around[role][0]}{role}-TEXT{around[role][1]}" for role in roles]
            if "".join(["" if "system" in roles else opening, *turns, asks]) != render(*roles, ask=True):
                raise ValueError
    except (ValueError, TemplateError) as error:
        why = "the chat template has no form in Ollama's language"
        raise InputError(f"{why}; use --to gguf, and write a Modelfile") from error
    text = "{{ if not .System }}" + opening + "{{ end }}{{ range .Messages }}"
    for role, (before, after) in around.items():
        text += '{{ if eq .Role "' + role + '" }}' + before + "{{ .Content }}" + after + "{{ end }}"
    text += "{{ end }}" + asks
    stops = dict.fromkeys(filter(None, (after_answer.strip(), tokenizer.eos_token)))
    lines = (f"PARAMETER stop {json.dumps(stop)}\n" for stop in stops)
    return f'FROM ./{file}\nTEMPLATE """{text}"""\n{"".join(lines)}'
