"""A model whose layers are in parts, one in each of two processes on the CPU, as `train --fsdp` has it.

Each process has a row of its own. Its step must be that of the whole model on this row, to the bit.
"""

from functools import lru_cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from model_folder import byte_tokenizer
from tiny import DEVICE, MIXED_LENGTHS, Outcome, random_documents, run_packed
from torch.distributed.tensor import DTensor
from warm import in_two_processes

from unsloth_pack import FastLanguageModel
from unsloth_pack.patching.patch import patch_of

from .cases import DTYPES
from .judge import NUMBERS_OF_DRAWS, Draw
from .models import NotApplicable, build, build_exact, copy_dequantised, enable_checkpointing
from .subjects import Text


class Sharded(Text):
    """A language model as `FastLanguageModel` loads it; documents of an even seed are of the first rank."""

    def build(self, dtype):
        if DEVICE == "cuda":
            raise NotApplicable("two ranks would share a GPU; they are measured on a CPU")
        if dtype != "nf4":
            return super().build(dtype)
        model = super().build("bfloat16")
        quantised = _load(_saved(self.arch, self.window).name, dtype, "sdpa", False)
        copy_dequantised(quantised, model)
        trained = dict(quantised.named_parameters())
        for name, weight in model.named_parameters():
            if weight.requires_grad and name not in trained:  # PEFT adapts no layers beside quantised experts
                weight.requires_grad_(False).zero_()
        return model

    def build_exact(self, quantised=None):
        model = build_exact(self.arch, self.window, self.variant)
        if quantised is not None:
            model.load_state_dict(quantised.state_dict())
            for weight, theirs in zip(model.parameters(), quantised.parameters(), strict=True):
                weight.requires_grad_(theirs.requires_grad)
        return model

    @staticmethod
    def documents(seed, turned=False):
        return random_documents(MIXED_LENGTHS[::-1] if seed % 2 else MIXED_LENGTHS, seed)


class TwoRanks:
    """The steps of a case in two processes.

    Args:
        draws: takes a seed, returns the `Draw` of its documents.
    """

    def __init__(self, case, draws):
        self._case, self._draws = case, draws
        self._outcomes = []  # of both ranks together, by draw
        self.different = {}  # names of what differs from a whole model's
        self.about = {}  # what reports say

    def run(self, seed):
        """What `judge_as_few` asks for: rows of both ranks are judged as one."""
        if seed == len(self._outcomes):  # all that are judged next, in one group
            self._run(range(seed, next(number for number in NUMBERS_OF_DRAWS if number > seed)))
        both = [self._draws(2 * seed + rank) for rank in (0, 1)]
        parts = ([getattr(draw, name) for draw in both] for name in ("truth", "alone", "same_row"))
        return self._outcomes[seed], Draw(*map(_joined, parts))

    def _run(self, seeds):
        with TemporaryDirectory() as folder:
            for rank in (0, 1):
                numbers = [2 * seed + rank for seed in seeds]
                rows = [(Sharded.documents(n), self._draws(n).truth.routes) for n in numbers]
                torch.save(rows, f"{folder}/rows-{rank}.pt")
            try:
                in_two_processes(_steps, _saved(self._case.arch, self._case.window).name, self._case, folder)
            except pytest.fail.Exception as failure:
                raise RuntimeError(str(failure).strip().splitlines()[-1]) from None
            by_rank = [torch.load(f"{folder}/steps-{rank}.pt", weights_only=False) for rank in (0, 1)]
        outcomes, different, (self.about, _) = zip(*by_rank, strict=True)
        self.different |= dict.fromkeys(chain(*different))
        self._outcomes += map(_joined, zip(*outcomes, strict=True))


def _joined(outcomes):
    logits, losses = (torch.cat([getattr(o, name).view(-1) for o in outcomes]) for name in ("logits", "loss"))
    grads = {name: torch.stack([o.grads[name] for o in outcomes]) for name in outcomes[0].grads}
    return Outcome(logits, losses.mean(), grads, {})


@lru_cache(maxsize=1)
def _saved(arch, window):
    """A folder with the model that `build` makes, and its adapter."""
    folder = TemporaryDirectory()
    model = build(arch, window, "sharded", "float32")
    adapter = {name: weight for name, weight in model.state_dict().items() if "lora_" in name}
    torch.save(adapter, Path(folder.name, "adapter.pt"))
    model.unload().save_pretrained(folder.name)
    byte_tokenizer().save_pretrained(folder.name)
    return folder


def _load(folder, dtype, backend, sharded):
    options = {"dtype": DTYPES[dtype], "load_in_4bit": dtype == "nf4", "attn_backend": backend}
    model = FastLanguageModel.from_pretrained(folder, sharded=sharded, **options)[0]
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)
    adapter = torch.load(Path(folder, "adapter.pt"))
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weight.data.copy_(adapter[name])
    return model


def _steps(rank, folder, case, exchange):
    """Leave the outcomes of this rank's rows, what differs from a whole model's, and what reports say."""
    rows, by_kind = torch.load(f"{exchange}/rows-{rank}.pt"), []
    for sharded in (False, True):
        model = _load(folder, case.dtype, case.backend, sharded)
        if not sharded:  # weights in a file lie at any byte, by which MKL rounds differently
            for weight in model.parameters():
                weight.data = weight.data.clone()
        about = enable_checkpointing(model, case.checkpointing, patch_of(model))
        # The second step gathers into the memory of the first
        by_kind.append([run_packed(model, *row) for row in (rows[0], *rows)][1:])
    layers = model.get_decoder().layers
    assert all(isinstance(w, DTensor) for w in layers.parameters() if w.dim() > 1 and not w.requires_grad)
    about["uncaptured"] = str(model.get_decoder().step_graphs)
    different = [name for pair in zip(*by_kind, strict=True) for name in _different(*pair)]
    torch.save((by_kind[1], different, about), f"{exchange}/steps-{rank}.pt")


def _different(whole, parts):
    whole, parts = ({"logits": o.logits, "loss": o.loss, **o.grads} for o in (whole, parts))
    missing = whole.keys() ^ parts.keys()
    return [*missing, *(name for name in whole if name in parts and not whole[name].equal(parts[name]))]
