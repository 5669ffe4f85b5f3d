"""`unsloth-pack export`: a run as the programs that serve models read it, checked against the run."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    from unsloth_pack.checkpoints.saving import SaveMethod
    from unsloth_pack.verification.exported import TrainedAnswers

TARGETS = ("gguf", "ollama", "vllm", "hf")
_MOST_PROMPTS, _NEW_TOKENS, _LONGEST = 8, 32, 1024  # prompts, and tokens of an answer and of a prompt


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
    trained = _answer(source, prompts, gguf.llama_template(tokenizer), target, 2 if converter else 1)
    with atomic_dir(target) as folder:
        try:
            if converter is None:
                found = _export_folder(source, folder, trained, target if to == "vllm" else None)
            else:
                found = _export_gguf(source, folder / file, converter, kind, trained)
        except RunStopped as error:
            if not (folder / file).is_file():
                raise
            target.mkdir(exist_ok=True)
            failed = (folder / file).rename(target / f"{file}.failed")
            raise RunStopped(f"{error}; see {failed}") from None
        if modelfile:
            (folder / "Modelfile").write_text(modelfile, encoding="utf-8")
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


def _answer(
    source: str, prompts: Sequence[Conversation], template: str | None, target: Path, copies: int
) -> "TrainedAnswers":
    """Let the trained model answer prompts, if the disk of `target` holds its weights `copies` times."""
    import torch

    from unsloth_pack.checkpoints.merging import expected_weights
    from unsloth_pack.cli.answers import Answerer
    from unsloth_pack.modules import base_of
    from unsloth_pack.verification.exported import Answer, TrainedAnswers

    loading = {**held_by_run(Path(source)), "max_new_tokens": _NEW_TOKENS}
    if device_type() == "cpu":
        loading["dtype"] = "float32"  # is faster
    answerer = Answerer(source, loading, "shorten it")
    weights = expected_weights(base_of(answerer.model), torch.bfloat16).values()
    check_space(target, copies * sum(weight.nbytes for weight in weights))
    answers: list[Answer] = []
    for asked in prompts:
        with suppress(InputError), torch.no_grad():  # one that is too long
            inputs = answerer.encode([asked])
            n_prompt = inputs["input_ids"].shape[1]
            if 0 < n_prompt <= _LONGEST and len(answers) < _MOST_PROMPTS:
                ids = answerer.generate(inputs)
                logits = answerer.model(input_ids=ids).logits[0, n_prompt - 1 : -1].float().cpu().numpy()
                asked = replace(asked, variables={**asked.variables, "chat_template": template})
                answers.append(Answer(answerer.render(asked), ids[0].tolist(), n_prompt, logits))
    if not answers:
        raise InputError(f"no prompt fits into {_LONGEST} tokens; give --prompts FILE with shorter ones")
    return TrainedAnswers(answers, answerer.tokenizer, answerer.model.dtype)


def _save(source: str, folder: Path, method: "SaveMethod", template: str | None = None) -> None:
    """Save the model as `save_pretrained_merged` does, perhaps with another chat template."""
    from unsloth_pack.checkpoints.saving import save_pretrained_merged

    model, tokenizer = load_to_merge(source, held_by_run(Path(source)))
    tokenizer.chat_template = template or tokenizer.chat_template
    save_pretrained_merged(model, folder, tokenizer, method)


def _export_folder(source: str, folder: Path, trained: "TrainedAnswers", served: Path | None) -> str:
    """Save the merged model, or an adapter if vLLM can serve it from `served`; compare in transformers.

    An adapter on experts is merged, since transformers does not read it as vLLM does.
    """
    from unsloth_pack.checkpoints.loading import find_model

    config: dict[str, Any] = {}
    if served and is_adapter(source) and not any(map(held_by_run(Path(source)).get, LOADED_IN)):
        config = json.loads(Path(source, ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if not config or why_not_served(config) or config.get("target_parameters"):
        _save(source, folder, "merged_16bit")
        return trained.check_folder(folder) + (f"; vllm serve {served}" if served else "")
    _save(source, folder, "lora_vllm")
    base, rank = find_model(source)[0], note_on_rank(config)
    command = f"; vllm serve {base} --enable-lora --lora-modules NAME={served}"
    return f"{trained.check_folder(base, folder)}{command}{f'; {rank}' if rank else ''}"


def _export_gguf(
    source: str, file: Path, converter: Path, kind: str | None, trained: "TrainedAnswers"
) -> str:
    """Merge, convert and perhaps quantize the model, and compare each file in llama.cpp."""
    from unsloth_pack.checkpoints import gguf

    whole, merged = file.with_name("in-16-bits.gguf") if kind else file, file.with_name("merged")
    _save(source, merged, "merged_16bit", gguf.llama_template(trained.tokenizer))
    gguf.convert(converter, merged, whole)
    shutil.rmtree(merged)
    found = trained.check_file(whole)
    if kind:
        gguf.quantize(whole, file, kind)
        whole.unlink()
        found += f"; in {kind} {trained.check_file(file, is_quantised=True)}"
    return found
