"""From the start of Python to the first update, and on to the twentieth: this package, Unsloth and plain TRL.

    python benchmarks/start_up.py [--case 0.5b,8b] [--peers ours,unsloth,trl] [--rounds 3] [--flash FOLDER]
                                  [--json PATH]
    python benchmarks/start_up.py --case tiny --peers ours,trl         on a CPU

Every run is a process of its own that imports its peer, loads the model, puts an adapter on it, packs the
documents and trains, through TRL's SFTTrainer. In a peer's first round no kernel has been compiled before.
Later rounds find what it has compiled, and the table shows their medians. Seconds count from the moment in
which the system has started the process. The first update ends when the device has done it.

Documents are random letters, as many for all peers. Exit code 1 if a run failed; what it said is printed.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import full
from peer_runs import finished, in_a_process, parsed, parser_of

PEERS = ("ours", "unsloth", "trl")
CASES = {
    "0.5b": full.Case("qwen2.5-0.5b", row_tokens=2048, steps=20),
    "8b": full.Case("llama3.1-8b", row_tokens=8192, steps=20),
    "tiny": full.Case("tiny", row_tokens=256, steps=20),
}
STAGES = ("import", "load", "trainer", "first update", "all updates")  # each from the start of the process
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "UNSLOTH_COMPILE_LOCATION")


def main() -> int:
    parser = parser_of(__doc__, CASES, "0.5b", PEERS)
    parser.set_defaults(rounds=3)
    parser.add_argument(
        "--flash", type=Path, help="a folder with the package flash_attn, for trl and unsloth"
    )
    args = parsed(parser, CASES, PEERS, child)
    if args is None:
        return 0
    runs = {name: measured(name, args) for name in args.case.split(",")}
    for name, by_peer in runs.items():
        print("\n".join(["", *table(name, by_peer)]), flush=True)
    return finished(runs, args.json, stages=STAGES)


def measured(name: str, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The rounds of every peer, the first of each with empty caches."""
    built = in_a_process(__file__, "build", name, args)
    if "failed" in built:
        return {"build": [built]}
    runs: dict[str, list[dict[str, Any]]] = {peer: [] for peer in args.peers.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for peer, rounds in runs.items():
                caches = {cache: os.path.join(folder, peer, cache.lower()) for cache in CACHES}
                rounds.append(run := in_a_process(__file__, peer, name, args, caches))
                said = run.get("failed") or ", ".join(f"{stage} {run[stage]:.1f}" for stage in STAGES)
                print(f"{name} {peer}, round {number + 1}: {said}", flush=True)
    return runs


def table(case: str, by_peer: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Seconds from the start to each stage: of a peer's first round, and medians of the later ones."""
    lines = [f"{case:<24}" + "".join(f"{stage:>14}" for stage in STAGES)]
    for peer, rounds in by_peer.items():
        finished = [run for run in rounds[1:] if "failed" not in run]
        shown = {"nothing compiled": rounds[:1], "compiled before": finished}
        for name, some in shown.items():
            if some and "failed" not in some[0]:
                medians = [statistics.median(run[stage] for run in some) for stage in STAGES]
                lines.append(f"  {peer + ', ' + name:<22}" + "".join(f"{s:>14.1f}" for s in medians))
    return lines


# In a process of its own


def child(what: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    if what == "build":
        return {"folder": full.build(case.shape, args.work)}
    if args.flash is not None and what != "ours":  # before transformers looks for it
        sys.path.insert(0, str(args.flash.resolve()))
    return train(what, case, str(args.work / case.shape), args.work)


def train(peer: str, case: full.Case, folder: str, work: Path) -> dict[str, Any]:
    """When each of `STAGES` was over, in seconds from the start of the process, and the losses."""
    import psutil

    started, seconds = psutil.Process().create_time(), {}

    def over(stage: str) -> None:
        seconds[stage] = time.time() - started

    if peer == "unsloth":
        from unsloth import FastLanguageModel
    elif peer == "ours":
        from unsloth_pack import FastLanguageModel
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    over("import")
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    lora: Any = None
    if peer == "trl":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        attention = "flash_attention_2" if on_gpu else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, device_map={"": 0} if on_gpu else None
        )
        lora = LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
    else:
        model, tokenizer = FastLanguageModel.from_pretrained(
            folder, max_seq_length=case.row_tokens, dtype=dtype, load_in_4bit=False
        )
        model = FastLanguageModel.get_peft_model(
            model, r=16, lora_alpha=16, target_modules=TARGETS, use_gradient_checkpointing=False
        )
    over("load")

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (1, case.steps):
                if on_gpu:
                    torch.cuda.synchronize()
                over("first update" if state.global_step == 1 else "all updates")

    config = SFTConfig(
        output_dir=str(work / f"start-up-{peer}"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        packing=True,
        max_length=case.row_tokens,
        max_steps=case.steps,
        logging_steps=5,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
        save_strategy="no",
        dataset_num_proc=1,
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict({"text": full.texts(case)}),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[Watch()],
    )
    over("trainer")
    trainer.train()
    return seconds | {"losses": [line["loss"] for line in trainer.state.log_history if "loss" in line]}


if __name__ == "__main__":
    sys.exit(main())
