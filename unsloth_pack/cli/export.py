"""`unsloth-pack export`: a run as the programs that serve models read it, checked against the run."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.checkpoints.atomic import atomic_dir
from unsloth_pack.checkpoints.names import ADAPTER_CONFIG, check_model_there, is_adapter
from unsloth_pack.checkpoints.vllm_compat import note_on_rank, why_not_served
from unsloth_pack.cli.merge import load_to_merge
from unsloth_pack.config import Parser
from unsloth_pack.errors import InputError, RunStopped, printable
from unsloth_pack.run.data_flags import options_of
from unsloth_pack.run.from_adapter import LOADED_IN, held_by_run, options_of_run
from unsloth_pack.run.machine import check_new_folder, check_space, device_type

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from unsloth_pack.verification.exported import Answer, Prompt

TARGETS = ("gguf", "ollama", "vllm", "hf")


def run(arguments: Sequence[str]) -> int:
    """Export a run or a model to `--to`, and compare its answers with those of the trained model."""
    flags = build_parser().parse(arguments)
    source, to = flags.get("model_name", ""), flags.get("to")
    if not source or to not in TARGETS:
        said = f"--to is {to!r}" if source else "no run is named"
        raise InputError(f"{said}; write unsloth-pack export RUN --to {' | '.join(TARGETS)}")
    check_model_there(source)
    target = Path(flags.get("save_path") or f"{source.rstrip('/')}-{to}")
    check_new_folder("save_path", target)

    from unsloth_pack.cli import quieten

    quieten()
    from unsloth_pack.checkpoints import gguf
    from unsloth_pack.run.documents import load_tokenizer
    from unsloth_pack.run.images import takes_images

    writes_gguf, kind = to in ("gguf", "ollama"), flags.get("quantize")
    if kind is not None and (kind not in gguf.QUANTIZATIONS or not writes_gguf):
        kinds = ", ".join(gguf.QUANTIZATIONS)
        raise InputError(f"quantize is {kind!r} with --to {to}; give one of {kinds} with --to gguf or ollama")
    if takes_images(source):
        raise InputError(f"{source} takes images, which export does not check; use unsloth-pack merge")
    converter = gguf.find_converter(flags.get("converter")) if writes_gguf else None
    tokenizer, file = load_tokenizer(source), f"{Path(source).name}{f'-{kind}' if kind else ''}.gguf"
    modelfile = gguf.modelfile(tokenizer, file) if to == "ollama" else None
    answers = _answer(
        source, tokenizer, _read_prompts(flags, source, tokenizer), target, 2 if writes_gguf else 1
    )
    failure = None
    with atomic_dir(target) as folder:
        try:
            if converter is None:
                found = _export_folder(source, folder, tokenizer, answers, target if to == "vllm" else None)
            else:
                found = _export_gguf(source, folder / file, converter, kind, tokenizer, answers)
        except RunStopped as error:
            if not (folder / file).is_file():
                raise
            failure = error
            (folder / file).rename(folder / f"{file}.failed")
        else:
            if modelfile is not None:
                (folder / "Modelfile").write_text(modelfile, encoding="utf-8")
    if failure is not None:
        raise RunStopped(f"{failure}; see {target / file}.failed") from failure
    print(printable(f"exported {source} to {target}: {found}"))
    return 0


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    usage = f"unsloth-pack export RUN --to {'|'.join(TARGETS)} [flags]"
    about = "Export a run for other programs, and check that its export answers as the run does."
    parser = Parser(prog="unsloth-pack export", usage=usage, description=about)
    add = parser.add_argument
    add("model_name", nargs="?", metavar="RUN", help="folder of a run, an adapter or a model")
    add("--to", help=f"one of {', '.join(TARGETS)}; has to be given")
    parser.add_option("save_path", "folder to save in; new, or empty (default: RUN-gguf, by --to)")
    add(
        "--prompts",
        metavar="FILE",
        help="compare on these, one a line (default: first rows of the run's data)",
    )
    add("--quantize", metavar="KIND", help="bits of a GGUF file, such as q8_0 or q4_k_m (default: 16 bits)")
    add("--converter", metavar="FILE", help="llama.cpp's convert_hf_to_gguf.py (default: the installed one)")
    return parser


def _read_prompts(
    flags: Mapping[str, Any], source: str, tokenizer: "PreTrainedTokenizerBase"
) -> "list[Prompt]":
    """Read prompts from the file that the flags name, or from the data that the run was trained on."""
    from unsloth_pack.data.formats import Conversion
    from unsloth_pack.run.documents import load_training_data
    from unsloth_pack.verification.exported import MOST_PROMPTS

    is_chat, remedy = bool(tokenizer.chat_template), "give --prompts FILE, a text with one a line"
    if (file := flags.get("prompts")) is not None:
        try:
            lines = list(filter(str.strip, Path(file).read_text(encoding="utf-8").splitlines()))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"prompts {file!r} cannot be read ({error}); {remedy}") from None
        if not lines:
            raise InputError(f"prompts {file!r} is empty; {remedy}")
        return [{"turns": [{"role": "user", "content": x}]} if is_chat else {"text": x} for x in lines]
    options = options_of_run(Path(source))
    if options.get("dataset") is None or options.get("streaming"):
        raise InputError(f"{source} names no data in files to take prompts from; {remedy}")
    try:
        prompts: list[Prompt] = []
        for each in load_training_data(options_of(options).data, 2 * MOST_PROMPTS):
            conversion = Conversion(each.rows, chat_template=is_chat)
            prompts += map(_prompt_of, conversion.rows(0, len(each.rows), len(each.rows)))
    except InputError as error:
        raise InputError(f"no prompts can be read from the data of the run ({error}); {remedy}") from None
    return prompts


def _prompt_of(row: Mapping[str, Any]) -> "Prompt":
    if isinstance(text := row.get("text", row.get("prompt")), str):
        return {"text": text[:200]}
    turns = row.get("prompt") or row["messages"]
    if turns[-1]["role"] == "assistant" and len(turns) > 1:
        turns = turns[:-1]
    tools = json.loads(row["tools"]) if row.get("tools") else None
    return {"turns": turns, "tools": tools, **(row.get("chat_template_kwargs") or {})}


def _answer(
    source: str,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: "Sequence[Prompt]",
    target: Path,
    copies: int,
) -> "list[Answer]":
    """Let the trained model answer, once it is known that the disk holds its weights `copies` times."""
    import torch

    from unsloth_pack.api import FastLanguageModel
    from unsloth_pack.checkpoints.merging import expected_weights
    from unsloth_pack.modules import base_of
    from unsloth_pack.verification.exported import answer_greedily

    loading = held_by_run(Path(source))
    if device_type() == "cpu":  # which is slow in 16 bits
        loading["dtype"] = "float32"
    model, _ = FastLanguageModel.from_pretrained(source, max_seq_length=1, **loading)
    if model.get_output_embeddings() is None:
        raise InputError(f"{source} classifies texts and writes none; use unsloth-pack merge")
    weights = expected_weights(base_of(model), torch.bfloat16).values()
    check_space(target, copies * sum(weight.nbytes for weight in weights))
    return answer_greedily(FastLanguageModel.for_inference(model), tokenizer, prompts)


def _export_folder(
    source: str,
    folder: Path,
    tokenizer: "PreTrainedTokenizerBase",
    answers: "Sequence[Answer]",
    served: Path | None,
) -> str:
    """Save the merged model, or an adapter if vLLM can serve it from `served`; compare in transformers."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from unsloth_pack.checkpoints.loading import find_model
    from unsloth_pack.checkpoints.saving import save_pretrained_merged
    from unsloth_pack.verification.exported import check_logits

    loading, config = held_by_run(Path(source)), {}
    if served and is_adapter(source) and not any(map(loading.get, LOADED_IN)):
        config = json.loads(Path(source, ADAPTER_CONFIG).read_text(encoding="utf-8"))
    is_served = bool(config) and not why_not_served(config)
    model, _ = load_to_merge(source, loading)
    save_pretrained_merged(model, folder, tokenizer, "lora_vllm" if is_served else "merged_16bit")
    del model
    command = f"; vllm serve {served}" if served else ""
    if is_served:
        command = f"; vllm serve {find_model(source)[0]} --enable-lora --lora-modules NAME={served}"
        command += f"; {rank}" if (rank := note_on_rank(config)) else ""
        if config.get("target_parameters"):
            return f"an adapter by expert, not compared, since transformers stacks experts{command}"
    base = find_model(source)[0] if is_served else str(folder)
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if is_served:
        plain = PeftModel.from_pretrained(plain, str(folder))

    @torch.no_grad()
    def logits_of(ids: list[int]) -> "np.ndarray":
        logits: np.ndarray = plain(input_ids=torch.tensor([ids])).logits[0].numpy()
        return logits

    return f"{check_logits(answers, tokenizer, logits_of)}{command}"


def _export_gguf(
    source: str,
    file: Path,
    converter: Path,
    quantization: str | None,
    tokenizer: "PreTrainedTokenizerBase",
    answers: "Sequence[Answer]",
) -> str:
    """Merge, convert and perhaps quantize the model, and compare each file in llama.cpp."""
    from unsloth_pack.checkpoints import gguf
    from unsloth_pack.checkpoints.saving import save_pretrained_merged
    from unsloth_pack.verification.exported import check_logits, check_tokens

    whole = file if quantization is None else file.with_name("in-16-bits.gguf")
    merged, room = file.with_name("merged"), max(len(answer.ids) for answer in answers)
    template = gguf.llama_template(tokenizer)
    model, for_llama = load_to_merge(source, held_by_run(Path(source)))
    for_llama.chat_template = template
    save_pretrained_merged(model, merged, for_llama)
    del model
    try:
        gguf.convert(converter, merged, whole)
    finally:
        shutil.rmtree(merged)
    with closing(gguf.LlamaFile(whole, room)) as llama:
        check_tokens(answers, tokenizer, llama.tokens, template)
        found = check_logits(answers, tokenizer, llama.logits)
    if quantization is None:
        return found
    gguf.quantize(whole, file, quantization)
    whole.unlink()
    with closing(gguf.LlamaFile(file, room)) as llama:
        return (
            f"{found}; in {quantization} {check_logits(answers, tokenizer, llama.logits, is_quantised=True)}"
        )
