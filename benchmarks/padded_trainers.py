"""DPO, GRPO and GKD on padded batches: updates of TRL's trainers over this package, plain TRL and Unsloth.

    python benchmarks/padded_trainers.py [--case dpo-0.5b,dpo-8b] [--peers ours,trl,unsloth] [--json PATH]
    python benchmarks/padded_trainers.py --case grpo-0.5b,grpo-8b --peers ours,whole,trl
    python benchmarks/padded_trainers.py --case gkd-0.5b,gkd-8b --peers ours,whole,trl
    python benchmarks/padded_trainers.py --case tiny,tiny-grpo,tiny-gkd --peers ours,whole,trl    on a CPU

Lengths are drawn as those of UltraFeedback's binarized preferences: log-normal, with a long tail that
`max_length` cuts. GRPO trains on one prompt and its answers of full length, random tokens in place of
generated ones, so that a step is the update alone. All peers train on the same rows, padded by TRL, with LoRA
on a model of random weights, built once under --work. Prompts of pairs and of answers are shared by ours, not
by "whole". Unsloth shares those of GRPO, unless its variable UNSLOTH_GRPO_PREFIX_GROUPER is 0.

GKD learns from the base model by the forward KL of every token, without generation. TRL's GKDTrainer runs the
base as a second model over padded batches. Ours is DistillTrainer over packed rows of about as many tokens,
with the adapter off; "whole" with a second model. TRL's DistillationTrainer trains on nothing but what it
generates.

Each peer runs in a process of its own, with a time limit. --rounds interleaves them, so that a drift of the
machine hits all.

Tokens are counted where the trainer hands a batch over, padding not counted. Milliseconds are the median of
the updates after the warm-up, tokens/s are over all of them. Most kernels are compiled and most graphs are
captured in the warm-up; the results file has the seconds of every update. Exit code 1 if a run failed; what
it said is printed.
"""

import argparse
import importlib.util
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_runs import parser_of, run_peers
from shapes import build
from watched import Watched

PEERS = ("ours", "whole", "trl", "unsloth")
# Median and sigma of the logarithm, in tokens
LENGTHS = {"prompt": (85, 1.0), "chosen": (250, 0.75), "rejected": (210, 0.85)}
SHORTEST = 4
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        shape: of the model, by its name in `shapes`.
        pairs: of a chosen and a rejected reply in a batch; of GRPO answers, of GKD documents.
        max_length: tokens of a prompt and its reply at most.
        prompt: tokens of the prompt of GRPO; 0 for the others.
        distils: whether it is GKD.
        checkpointing: whether every layer is recomputed.
        steps: updates of a run.
        warm: of them, the first that do not count.
    """

    shape: str
    pairs: int
    max_length: int
    checkpointing: bool
    steps: int
    warm: int
    prompt: int = 0
    distils: bool = False


CASES = {
    "dpo-0.5b": Case("qwen0.5b", pairs=8, max_length=1024, checkpointing=False, steps=120, warm=40),
    "dpo-8b": Case("llama8b", pairs=4, max_length=1024, checkpointing=True, steps=80, warm=40),
    "grpo-0.5b": Case("qwen0.5b", 8, 1500, checkpointing=False, steps=40, warm=15, prompt=1000),
    "grpo-8b": Case("llama8b", 8, 1500, checkpointing=True, steps=14, warm=6, prompt=1000),
    "gkd-0.5b": Case("qwen0.5b", 8, 1024, checkpointing=False, steps=40, warm=15, distils=True),
    "gkd-8b": Case("llama8b", 4, 1024, checkpointing=True, steps=20, warm=8, distils=True),
    "tiny": Case("tiny", pairs=4, max_length=128, checkpointing=False, steps=8, warm=3),
    "tiny-grpo": Case("tiny", 8, 150, checkpointing=False, steps=8, warm=3, prompt=100),
    "tiny-gkd": Case("tiny", 4, 128, checkpointing=False, steps=8, warm=3, distils=True),
}


def main() -> int:
    parser = parser_of(__doc__, CASES, "dpo-0.5b,dpo-8b", PEERS)
    return run_peers(__file__, parser, CASES, PEERS, child, line_of, lengths=LENGTHS)


def line_of(run: dict[str, Any]) -> str:
    return (
        f"{run['ms']:.1f} ms an update, {run['tokens_s']:,.0f} tokens/s, {run['peak_GiB']:.2f} GiB, "
        f"{run['tokens']:,.0f} of {run['places']:,.0f} places hold a token, loss {run['losses'][-1]:.4f}"
    )


# In a process of its own


def child(what: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    folder = build(CASES[name].shape, args.work)
    return {} if what == "build" else train(what, CASES[name], folder, args.work)


def preferences(case: Case) -> list[dict[str, str]]:
    """Rows of random letters, one token each: the tokenizer knows single bytes."""
    draw = random.Random(0)

    def text(kind: str) -> str:
        median, sigma = LENGTHS[kind]
        length = int(median * draw.lognormvariate(0.0, sigma) * case.max_length / 1024)
        return "".join(draw.choices(LETTERS, k=min(max(length, SHORTEST), case.max_length)))

    # A prompt that leaves no room for a reply is left out
    rows = ({kind: text(kind) for kind in LENGTHS} for _ in iter(int, 1))
    kept = (row for row in rows if len(row["prompt"]) < case.max_length // 2)
    return [next(kept) for _ in range(case.steps * case.pairs)]


def documents(case: Case, tokenizer: Any) -> list[dict[str, list[int]]]:
    """Prompts and their chosen replies, every token of which has a label."""
    texts = [row["prompt"] + row["chosen"] for row in preferences(case)]
    ids = [tokenizer(text)["input_ids"][: case.max_length] for text in texts]
    return [{"input_ids": row, "labels": row} for row in ids]


class Rollouts:
    """Random answers to a random prompt, in place of generation."""

    def __init__(self, case: Case):
        self.case, self.draw = case, random.Random(0)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[list[Any]]]:
        n_answer = self.case.max_length - self.case.prompt
        prompt = self._ids(self.case.prompt)
        answers = [self._ids(n_answer) for _ in prompts]
        logprobs = [[-1.0] * n_answer for _ in prompts]
        return {"prompt_ids": [prompt] * len(prompts), "completion_ids": answers, "logprobs": logprobs}

    def _ids(self, n: int) -> list[int]:
        return [self.draw.randrange(10, 200) for _ in range(n)]


def train(peer: str, case: Case, folder: str, work: Path) -> dict[str, Any]:
    """The figures of one run."""
    if peer == "unsloth":  # before TRL is imported
        from unsloth import FastLanguageModel, PatchDPOTrainer

        PatchDPOTrainer()
    elif peer in ("ours", "whole"):
        from unsloth_pack import FastLanguageModel
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig

    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    lora: dict[str, Any] = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": TARGETS}
    more: dict[str, Any] = {}

    def load() -> tuple[Any, Any]:
        if peer != "trl":
            own = {"share_prefixes": False} if peer == "whole" else {}
            return FastLanguageModel.from_pretrained(
                folder, max_seq_length=case.max_length, dtype=dtype, load_in_4bit=False, **own
            )
        has_flash = on_gpu and importlib.util.find_spec("flash_attn") is not None
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="flash_attention_2" if has_flash else "sdpa"
        )
        return loaded.to("cuda" if on_gpu else "cpu"), AutoTokenizer.from_pretrained(folder)

    model, tokenizer = load()
    if peer == "trl":
        more["peft_config"] = LoraConfig(**lora, task_type="CAUSAL_LM")
    else:
        asked = {"ours": True, "whole": True, "unsloth": "unsloth"}[peer] if case.checkpointing else False
        model = FastLanguageModel.get_peft_model(model, **lora, use_gradient_checkpointing=asked)
    make, kind = (DPOTrainer, DPOConfig)
    rows: list[dict[str, Any]] = []
    own: dict[str, Any] = {"max_length": case.max_length, "beta": 0.1}
    if case.distils:
        rows = documents(case, tokenizer)
        if peer == "trl":
            from trl.experimental.gkd import GKDConfig, GKDTrainer

            make, kind = GKDTrainer, GKDConfig
            own |= {"lmbda": 0.0, "beta": 0.0}  # nothing is generated; the forward KL
            more |= {"teacher_model": load()[0], "data_collator": DataCollatorForSeq2Seq(tokenizer)}
        else:
            from unsloth_pack.training.distill import DistillTrainer

            make, kind = DistillTrainer, SFTConfig
            n_tokens = sum(len(row["input_ids"]) for row in rows) // case.steps
            own = {"max_length": max(n_tokens, case.max_length), "packing": True, "padding_free": True}
            more |= {"kl_weight": 1.0, "ce_weight": 0.0}
            more |= {"teacher": load()[0]} if peer == "whole" else {}
    elif case.prompt:
        make, kind = GRPOTrainer, GRPOConfig
        rows = [{"prompt": "a"}] * case.steps
        answer = case.max_length - case.prompt
        own = {"num_generations": case.pairs, "max_completion_length": answer, "beta": 0.0}
        more |= {"reward_funcs": lambda completions, **_: [hash(text) % 7 / 7 for text in completions]}
        more |= {"rollout_func": Rollouts(case)}
    else:
        rows = preferences(case)
    config = kind(
        output_dir=str(work / f"padded-{peer}"),
        per_device_train_batch_size=1 if own.get("packing") else case.pairs,
        gradient_accumulation_steps=1,
        max_steps=case.steps,
        learning_rate=5e-6,
        warmup_steps=5,  # as all that follows, said to every peer: Unsloth's defaults are others
        lr_scheduler_type="linear",
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_steps=5,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        gradient_checkpointing=case.checkpointing and peer == "trl",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
        save_strategy="no",
        seed=3407,
        **own,
    )
    more |= {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    trainer = make(model=model, args=config, **more)
    if case.distils:  # a student that differs from its teacher
        for name, weight in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.01)
    watched = Watched()
    watched.follow(trainer)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    if case.prompt:  # TRL makes the batch inside of a step
        watched.tokens = watched.places = [case.pairs * case.max_length] * case.steps
    warm, tokens = watched.seconds(case.warm), watched.tokens[case.warm :]
    return {
        "ms": 1000 * statistics.median(warm),
        "tokens_s": sum(tokens) / sum(warm),
        "tokens": statistics.mean(watched.tokens),
        "places": statistics.mean(watched.places),
        "seconds": [round(seconds, 4) for seconds in watched.seconds(1)],
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }


if __name__ == "__main__":
    sys.exit(main())
