"""`unsloth-pack export`: a run as the programs that serve models read it, checked against the run."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import FilePath

from unsloth_pack.checkpoints.atomic import atomic_dir
from unsloth_pack.checkpoints.names import ADAPTER_CONFIG, check_model_there, is_adapter
from unsloth_pack.checkpoints.vllm_compat import note_on_rank, why_not_served
from unsloth_pack.cli.generate import Conversation, parse_prompt
from unsloth_pack.cli.merge import load_to_merge
from unsloth_pack.config import Parser
from unsloth_pack.data.sources import load_rows
from unsloth_pack.errors import InputError, RunStopped, printable
from unsloth_pack.run.data_flags import options_of
from unsloth_pack.run.from_adapter import LOADED_IN, held_by_run, options_of_run
from unsloth_pack.run.machine import check_new_folder, check_space, device_type

if TYPE_CHECKING:
    import numpy as np

    from unsloth_pack.checkpoints.saving import SaveMethod
    from unsloth_pack.cli.answers import Answerer
    from unsloth_pack.verification.exported import TrainedAnswers

TARGETS = ("gguf", "ollama", "vllm", "hf")
_MOST_PROMPTS, _NEW_TOKENS, _LONGEST = 8, 32, 1024  # prompts, and tokens of an answer and of a prompt
_REMEDY = "give --prompts FILE with shorter ones"


def run(arguments: Sequence[str]) -> int:
    """Export a run or a model to `--to`, and compare its answers with those of the trained model."""
    flags = build_parser().parse(arguments)
    source, to, kind = flags.get("model_name", ""), flags.get("to"), flags.get("quantize")
    if not source or to not in TARGETS:
        said = f"--to is {to!r}" if source else "no run is named"
        raise InputError(f"{said}; write unsloth-pack export RUN --to {' | '.join(TARGETS)}")
    if kind and to not in ("gguf", "ollama"):
        raise InputError(f"quantize is {kind!r} with --to {to}; give --to gguf or ollama, or leave it out")
    check_model_there(source)
    target = Path(flags.get("save_path") or f"{source.rstrip('/')}-{to}")
    check_new_folder("save_path", target)

    from unsloth_pack.cli import quieten

    quieten()
    from unsloth_pack.checkpoints import gguf
    from unsloth_pack.run.documents import load_tokenizer
    from unsloth_pack.run.images import takes_images

    if takes_images(source):
        raise InputError(f"{source} takes images, which export does not check; use unsloth-pack merge")
    converter = gguf.find_converter(flags.get("converter")) if to in ("gguf", "ollama") else None
    tokenizer, file = load_tokenizer(source), f"{Path(source).name}{f'-{kind}' if kind else ''}.gguf"
    modelfile = gguf.modelfile(tokenizer, file) if to == "ollama" else None
    prompts = _read_prompts(flags.get("prompts"), source, bool(tokenizer.chat_template))
    answerer = _load_answerer(source, target, 2 if converter else 1)
    trained, failure = _answer(answerer, prompts, gguf.llama_template(tokenizer)), None
    with atomic_dir(target) as folder:
        try:
            if converter is None:
                found = _export_folder(source, folder, trained, target if to == "vllm" else None)
            else:
                found = _export_gguf(source, folder / file, converter, kind, trained)
            if modelfile:
                (folder / "Modelfile").write_text(modelfile, encoding="utf-8")
        except RunStopped as error:
            if not (folder / file).is_file():
                raise
            (folder / file).rename(folder / f"{file}.failed")
            failure = error
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
    prompts = "compare on these, a file as for generate (default: first rows of the run's data)"
    add("--prompts", metavar="FILE", help=prompts)
    kinds = Literal["q8_0", "q6_k", "q5_k_m", "q4_k_m"]
    bits = "bits of a GGUF file, such as q8_0 or q4_k_m (default: 16 bits)"
    add("--quantize", type=kinds, metavar="KIND", help=bits)
    add(
        "--converter",
        type=FilePath,
        metavar="FILE",
        help="llama.cpp's convert_hf_to_gguf.py (default: the installed one)",
    )
    return parser


def _read_prompts(file: str | None, source: str, is_chat: bool) -> list[Conversation]:
    """Read prompts from a file, or from the first rows that the run was trained on."""
    from unsloth_pack.data.formats import Conversion
    from unsloth_pack.run.documents import load_training_data

    if file is not None:
        return [parse_prompt(index, row) for index, row in enumerate(load_rows(file))]
    options, remedy = options_of_run(Path(source)), "give --prompts FILE, a text with one a line"
    if options.get("dataset") is None or options.get("streaming"):
        raise InputError(f"{source} names no data in files to take prompts from; {remedy}")
    try:
        loaded = load_training_data(options_of(options).data, 2 * _MOST_PROMPTS)
        read = (Conversion(each.rows, chat_template=is_chat).rows(0, len(each.rows), 99) for each in loaded)
        return [*map(_prompt_of, chain.from_iterable(read))]
    except InputError as error:
        raise InputError(f"no prompts can be read from the data of the run ({error}); {remedy}") from None


def _prompt_of(row: Mapping[str, Any]) -> Conversation:
    turns = row.get("messages") or row.get("prompt") or row.get("text", "")
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns[:200]}]
    elif turns[-1]["role"] == "assistant" and len(turns) > 1:
        turns = turns[:-1]
    tools = json.loads(row.get("tools") or "null")
    return Conversation(turns, [], {"tools": tools, **(row.get("chat_template_kwargs") or {})})


def _load_answerer(source: str, target: Path, copies: int) -> "Answerer":
    """Load the trained model; refuse it if the disk of `target` has no room for its weights `copies` times."""
    import torch

    from unsloth_pack.checkpoints.merging import expected_weights
    from unsloth_pack.cli.answers import Answerer
    from unsloth_pack.modules import base_of

    loading = held_by_run(Path(source)) | (
        {"dtype": "float32"} if device_type() == "cpu" else {}
    )  # is faster
    answerer = Answerer(source, {**loading, "max_new_tokens": _NEW_TOKENS}, _REMEDY)
    weights = expected_weights(base_of(answerer.model), torch.bfloat16).values()
    check_space(target, copies * sum(weight.nbytes for weight in weights))
    return answerer


def _answer(answerer: "Answerer", prompts: Sequence[Conversation], template: str | None) -> "TrainedAnswers":
    """Let the trained model answer the first prompts that fit; `template` is that of the export."""
    import torch

    from unsloth_pack.verification.exported import ALLOWED, ALLOWED_IN_16_BITS, Answer, TrainedAnswers

    allowed = ALLOWED if answerer.model.dtype == torch.float32 else ALLOWED_IN_16_BITS
    answers, why = [], InputError(f"all prompts are longer than {_LONGEST} tokens; {_REMEDY}")
    for asked in prompts:
        try:
            inputs = answerer.encode([asked])
        except InputError as error:
            why = error
            continue
        n_prompt = inputs["input_ids"].shape[1]
        if 0 < n_prompt <= _LONGEST and len(answers) < _MOST_PROMPTS:
            ids = answerer.generate(inputs)
            with torch.no_grad():
                logits = answerer.model(input_ids=ids).logits[0, n_prompt - 1 : -1].float().cpu().numpy()
            text = answerer.render(replace(asked, variables={**asked.variables, "chat_template": template}))
            answers.append(Answer(text, ids[0].tolist(), n_prompt, logits, allowed))
    if not answers:
        raise why
    return TrainedAnswers(answers, answerer.tokenizer)


def _save(
    source: str, folder: Path, method: "SaveMethod" = "merged_16bit", template: str | None = None
) -> None:
    """Save the model as `save_pretrained_merged` does, perhaps with another chat template."""
    from unsloth_pack.checkpoints.saving import save_pretrained_merged

    model, tokenizer = load_to_merge(source, held_by_run(Path(source)))
    tokenizer.chat_template = template or tokenizer.chat_template
    save_pretrained_merged(model, folder, tokenizer, method)


def _export_folder(source: str, folder: Path, trained: "TrainedAnswers", served: Path | None) -> str:
    """Save the merged model, or an adapter if vLLM can serve it from `served`; compare in transformers.

    An adapter on experts is merged, since transformers does not read it as vLLM does.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from unsloth_pack.checkpoints.loading import find_model

    command, config = f"; vllm serve {served}" if served else "", {}
    if served and is_adapter(source) and not any(map(held_by_run(Path(source)).get, LOADED_IN)):
        config = json.loads(Path(source, ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if not config or why_not_served(config) or config.get("target_parameters"):
        _save(source, folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        _save(source, folder, "lora_vllm")
        base, rank = find_model(source)[0], note_on_rank(config)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, str(folder))
        command = f"; vllm serve {base} --enable-lora --lora-modules NAME={served}"
        command += f"; {rank}" if rank else ""

    @torch.no_grad()
    def logits_of(ids: list[int]) -> "np.ndarray":
        logits: np.ndarray = model(input_ids=torch.tensor([ids])).logits[0].numpy()
        return logits

    return f"{trained.check_logits(logits_of)}{command}"


def _export_gguf(
    source: str, file: Path, converter: Path, kind: str | None, trained: "TrainedAnswers"
) -> str:
    """Merge, convert and perhaps quantize the model, and compare each file in llama.cpp."""
    from unsloth_pack.checkpoints import gguf

    whole, merged = file.with_name("in-16-bits.gguf") if kind else file, file.with_name("merged")
    _save(source, merged, template=gguf.llama_template(trained.tokenizer))
    gguf.convert(converter, merged, whole)
    shutil.rmtree(merged)
    found = _compare_file(whole, trained)
    if kind:
        gguf.quantize(whole, file, kind)
        whole.unlink()
        found += f"; in {kind} {_compare_file(file, trained, is_quantised=True)}"
    return found


def _compare_file(file: Path, trained: "TrainedAnswers", is_quantised: bool = False) -> str:
    from llama_cpp import Llama

    room = max(len(answer.ids) for answer in trained.answers)
    llama: Any = Llama(str(file), n_ctx=room, n_batch=room, n_gpu_layers=0, logits_all=True, verbose=False)
    adds_special = not trained.tokenizer.chat_template

    def logits_of(ids: list[int]) -> "np.ndarray":
        llama.reset()
        llama.eval(ids)
        logits: np.ndarray = llama.scores[: len(ids)]
        return logits

    with closing(llama):
        trained.check_tokens(lambda text: llama.tokenize(text.encode(), add_bos=adds_special, special=True))
        return trained.check_logits(logits_of, is_quantised)
