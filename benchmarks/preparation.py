"""From a file to the first step: documents a second, memory and seconds, beside TRL and `datasets.map`.

    python benchmarks/preparation.py --documents 50000 200000 2000000 --num_proc 1 2 --json

The documents are synthetic instructions and answers of about 200 tokens; the tokenizer is a BPE of 24,000
tokens, trained on some of them. Each case runs in a process of its own, with an empty cache:

    tokenizer   the bare tokenizer over batches of 1,000 rows that are held, in one process and one thread
    ours        `load_rows`, tokens and labels, rows packed to 2,048 tokens
    again       the same once more, with what the cache holds
    trl         SFTTrainer's own preparation, with packing
    map         prompt and answer tokenised row by row in `datasets.map`, as axolotl does; not packed
    pack        `unsloth-pack pack`, all of it, into a folder
    stats       `unsloth-pack stats`, all of it

"cpu" is the time of all processes together, which other work on the machine changes less than "seconds".
Memory is the largest sum over all processes, in which shared pages count once (PSS), and the largest process
with all that it maps (RSS). "first step" is the time from the start of Python to the end of one update of a
tiny model; `--no_step` leaves it out.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import date
from itertools import islice
from pathlib import Path

CAPACITY = 2048
CASES = ("tokenizer", "ours", "again", "trl", "map", "pack", "stats")
PROMPT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"


def main() -> None:
    args = _arguments()
    if args.case:
        print(json.dumps(_one(args)))
        return
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        results = []
        for documents in args.documents:
            data = Path(work, f"{documents}.jsonl")
            _write(data, documents)
            _build_model(Path(work, "model"), data)
            for num_proc in args.num_proc:
                cache = Path(work, f"cache-{documents}-{num_proc}")
                for case in args.cases:
                    if case == "tokenizer" and num_proc != args.num_proc[0]:
                        continue
                    results.append(_measured(case, data, documents, num_proc, cache, args))
                    print(_line(results[-1]), flush=True)
                subprocess.run(["rm", "-rf", str(cache)], check=True)
            data.unlink()
    if args.json is not None:
        path = Path(args.json or f"benchmarks/results/preparation-cpu-{date.today()}.json")
        about = {
            "date": str(date.today()),
            "versions": _versions(),
            "cores": os.cpu_count(),
            "capacity": CAPACITY,
        }
        path.write_text(json.dumps(about | {"results": results}, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=int, nargs="+", default=[50_000])
    parser.add_argument("--num_proc", type=int, nargs="+", default=[os.cpu_count() or 1])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--no_step", action="store_true")
    parser.add_argument("--work", help="folder for the data and the caches (default: a temporary one)")
    parser.add_argument(
        "--json", nargs="?", const="", help="write the results to benchmarks/results/, or to a file"
    )
    for name in ("case", "data", "model"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser.parse_args()


def _write(path: Path, documents: int) -> None:
    """Instructions and answers of words that are the rarer the longer the list goes on."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(1, 10))) for _ in range(20_000)]
    ranks = [1 / (rank + 3) for rank in range(len(words))]
    pool = rng.choices(words, ranks, k=2_000_000)

    def text(mean: int) -> str:
        at, n = rng.randrange(len(pool) - 2000), min(1500, 1 + int(rng.expovariate(1 / mean)))
        return " ".join(pool[at : at + n])

    with path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            asked = text(15) if number % 3 == 0 else ""
            row = {"instruction": f"{text(12)} ({number})?", "input": asked, "output": f"{text(120)}."}
            file.write(json.dumps(row) + "\n")


def _build_model(folder: Path, data: Path) -> None:
    if folder.exists():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=24_000,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with data.open(encoding="utf-8") as file:
        bpe.train_from_iterator((json.loads(line)["output"] for line in islice(file, 20_000)), trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=24_000, **sizes)).save_pretrained(folder)


def _measured(
    case: str, data: Path, documents: int, num_proc: int, cache: Path, args: argparse.Namespace
) -> dict:
    """Run one case in a process of its own, and watch its memory."""
    import psutil

    environment = os.environ | {"HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    environment |= {
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    if case in ("trl", "map", "pack", "stats"):  # nothing that another case has left
        environment["HF_DATASETS_CACHE"] = f"{cache}-{case}"
    command = [sys.executable, __file__, "--case", case, "--data", str(data), "--num_proc", str(num_proc)]
    command += ["--model", str(data.parent / "model"), *(["--no_step"] if args.no_step else [])]
    run = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    whole, largest = 0, 0
    process = psutil.Process(run.pid)
    while run.poll() is None:
        held = []
        for one in (process, *_children(process)):
            with suppress(psutil.Error):  # it has ended
                held.append(one.memory_full_info())
        whole = max(whole, sum(memory.pss for memory in held))
        largest = max([largest, *(memory.rss for memory in held)])
        time.sleep(0.2)
    said = run.stdout.read() if run.stdout else ""
    about = {"case": case, "documents": documents, "num_proc": 1 if case == "tokenizer" else num_proc}
    if run.returncode:
        return about | {"failed": run.returncode}
    found = json.loads(said.strip().splitlines()[-1])
    found["documents_per_second"] = documents / found["seconds"]
    return about | found | {"peak_bytes": whole, "largest_process_bytes": largest}


def _children(process):
    import psutil

    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _one(args: argparse.Namespace) -> dict:
    """Prepare the data in this process, and train one step."""
    import datasets

    datasets.disable_progress_bars()
    prepare = {"tokenizer": _tokenizer, "ours": _ours, "again": _ours, "trl": _trl, "map": _map}
    prepare |= {"pack": _pack, "stats": _stats}
    return prepare[args.case](args)


def _clock():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)


def _since(began) -> dict:
    return {name: now - then for name, now, then in zip(("seconds", "cpu"), _clock(), began, strict=True)}


def _first_step(trainer) -> dict:
    import psutil

    trainer.train()
    return {"first_step": time.time() - psutil.Process().create_time()}


def _trainer(args, rows, **options):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as out:
        config = SFTConfig(
            out,
            max_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            per_device_train_batch_size=1,
            **options,
        )
        model = AutoModelForCausalLM.from_pretrained(args.model)
        return SFTTrainer(
            model, config, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(args.model)
        )


def _tokenizer(args) -> dict:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    seconds = cpu = 0.0
    texts = []
    with open(args.data, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            texts.append(PROMPT.format(**row) + row["output"])
            if len(texts) == 1000:
                began = _clock()
                tokenizer(texts)
                taken = _since(began)
                seconds, cpu, texts = seconds + taken["seconds"], cpu + taken["cpu"], []
    return {"seconds": seconds, "cpu": cpu}


def _ours(args) -> dict:
    from transformers import AutoTokenizer

    from unsloth_pack.data import load_rows
    from unsloth_pack.packing.dataset import pack_documents
    from unsloth_pack.run.documents import DocumentPreparation

    tokenizer, num_proc = AutoTokenizer.from_pretrained(args.model), args.num_proc[0]
    began = _clock()
    rows = load_rows(args.data, num_proc=num_proc)
    documents = DocumentPreparation(tokenizer, CAPACITY, False, num_proc).documents(rows)
    packed = pack_documents(documents, CAPACITY, num_proc)
    found = _since(began)
    if args.no_step:
        return found
    options = {"packing": False, "padding_free": True, "max_length": None}
    return found | _first_step(_trainer(args, packed, **options))


def _trl(args) -> dict:
    import datasets

    num_proc = args.num_proc[0] if args.num_proc[0] > 1 else None
    began = _clock()
    rows = datasets.load_dataset("json", data_files=args.data, split="train", num_proc=num_proc)
    rows = rows.map(
        lambda row: {"prompt": PROMPT.format(**row), "completion": row["output"]},
        remove_columns=rows.column_names,
        num_proc=num_proc,
    )
    trainer = _trainer(args, rows, packing=True, max_length=CAPACITY, dataset_num_proc=num_proc)
    found = _since(began)
    return found if args.no_step else found | _first_step(trainer)


def _map(args) -> dict:
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    num_proc = args.num_proc[0] if args.num_proc[0] > 1 else None

    def encode(row):
        prompt = tokenizer(PROMPT.format(**row))["input_ids"]
        ids = tokenizer(PROMPT.format(**row) + row["output"] + tokenizer.eos_token)["input_ids"][:CAPACITY]
        return {"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]}

    began = _clock()
    rows = datasets.load_dataset("json", data_files=args.data, split="train", num_proc=num_proc)
    rows.map(encode, remove_columns=rows.column_names, num_proc=num_proc)
    return _since(began)


def _pack(args) -> dict:
    with tempfile.TemporaryDirectory(dir=Path(args.data).parent) as out:
        return _command(args, "pack", f"--max_seq_length={CAPACITY}", f"--out={out}/packed")


def _stats(args) -> dict:
    return _command(args, "stats")


def _command(args, name, *more) -> dict:
    from unsloth_pack.cli import main as run

    flags = [f"--dataset={args.data}", f"--model_name={args.model}", f"--num_proc={args.num_proc[0]}"]
    began = _clock()
    code = run([name, *flags, *more])
    return _since(began) | ({"failed": code} if code else {})


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("unsloth-pack", "datasets", "tokenizers", "transformers", "trl", "pyarrow", "torch")
    return {"python": sys.version.split()[0]} | {name: version(name) for name in names}


def _line(found: dict) -> str:
    head = f"{found['documents']:>9,}  {found['case']:<9} {found['num_proc']} processes  "
    if "failed" in found:
        return head + f"failed with exit code {found['failed']}"
    step = f"  first step after {found['first_step']:.1f} s" if "first_step" in found else ""
    return head + (
        f"{found['seconds']:7.1f} s  {found['cpu']:7.1f} s cpu  "
        f"{found['documents_per_second']:8,.0f} docs/s  "
        f"{found['peak_bytes'] / 2**30:.2f} GiB in all, "
        f"{found['largest_process_bytes'] / 2**30:.2f} the largest{step}"
    )


if __name__ == "__main__":
    main()
