"""TRL's trainers hand over padded batches. A patched model computes no padding, and a prompt of several
answers once. It trains as the untouched.

Losses and gradients are compared in float64, where TRL's own head still computes in float32.
"""

import copy

import pytest
import torch
from outside_models import assert_close
from transformers import AutoTokenizer, TrainerCallback
from trl_runs import TRAINERS, WITH_TEACHER, adapted, logged, perturbed, trainer_of

from unsloth_pack import patch_model

BOUND = 2e-6  # float32 has rounding of 1e-7; a token more or less moves a loss by 1e-2
GENERATING = ("GKD on-policy", "Distillation", "SDFT", "OnlineDPO", "GRPO", "GSPO", "DAPO", "GMPO", "RLOO")
OWN_SIDE = ("GKD", "GOLD", *GENERATING)  # padding in front; or prompts in front, completions behind
WHOLE = {"gradient_accumulation_steps": 1}  # micro-batches then hold all answers to a prompt
OPTIONS = {"GRPO": {"beta": 0.1, **WHOLE}, "RLOO": WHOLE}
# Means over the logits of all places, padding too; and what a clock says
NOT_COMPARED = ("logits/", "runtime", "per_second", "time")
# Equal rewards of both answers, which rounding tells apart; TRL's sums over padding too
NOT_COMPARED_EITHER = {
    "DPO precomputed": ("accuracies",),
    "OnlineDPO": ("accuracies", "objective/", "rlhf_reward"),
}
# Rows with one prompt: in each half or third of a batch one, or two anywhere
PARTS = {"DPO": 2, "DPO and SFT": 2, "DPO precomputed": 2, "ORPO": 2, "CPO": 2, "SimPO": 2, "TPO": 3}
IN_GROUPS = ("GRPO", "GSPO", "DAPO", "GMPO", "RLOO")


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


class PaddedInFront:
    """A collator's batches with the padding moved from the end of every row to its beginning."""

    def __init__(self, collate):
        self.collate = collate

    def __call__(self, examples):
        batch = self.collate(examples)
        for name in [name for name in batch if name.endswith("attention_mask")]:
            mask = batch[name].clone()
            fellows = [key for key, x in batch.items() if torch.is_tensor(x) and x.shape == mask.shape]
            own = [key for key in fellows if key.startswith("KL_") == name.startswith("KL_")]
            for key in own:
                rows = zip(batch[key], mask, strict=True)
                batch[key] = torch.stack([row.roll(int((m == 0).sum())) for row, m in rows])
        return batch


class Watch(TrainerCallback):
    """The gradients of the first update; the tokens of all calls that make no cache, and those computed."""

    def __init__(self, model, kind):
        self.gradients, self.given, self.real, self.computed, self.repeated = {}, 0, 0, 0, 0
        self.kind = kind
        base = model.get_base_model()
        base.register_forward_pre_hook(self._count, with_kwargs=True)
        base.model.layers[0].register_forward_pre_hook(self._count_computed, with_kwargs=True)

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if not self.gradients:
            trained = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
            self.gradients = {name: grad.clone() for name, grad in trained}

    def _count(self, module, args, kwargs):
        self.counts = "past_key_values" not in kwargs
        if self.counts:
            self.given += kwargs["attention_mask"].numel()
            self.real += int(kwargs["attention_mask"].sum())
            self.repeated += count_repeated(self.kind, kwargs["input_ids"], kwargs["attention_mask"])

    def _count_computed(self, module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        self.computed += hidden.shape[0] * hidden.shape[1] if self.counts else 0


def count_repeated(kind, ids, mask):
    """The tokens of prompts that come in several rows of a batch, but for the first; 0 where that is few."""
    n_rows, parts = len(ids), PARTS.get(kind, 1)
    ways = [[range(row, n_rows, n_rows // parts) for row in range(n_rows // parts)]]
    if kind in IN_GROUPS:  # TRL shuffles the rows
        ways = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    tokens = torch.where(mask == 1, ids, -1)

    def count(rows):
        differ = (tokens[rows[0]] != tokens[rows]).any(dim=0).tolist()
        alike = [*differ, True].index(True) - int(mask[rows[0]].argmax())
        return (len(rows) - 1) * max(0, min(alike, int(mask[rows].sum(dim=1).min()) - 1))

    repeated = max(sum(count([*rows]) for rows in way) for way in ways)
    return repeated if 16 * repeated >= int(mask.sum()) else 0


def run(kind, model, tokenizer, folder, side, output):
    watch, more = Watch(model, kind), {}
    if TRAINERS[kind][1] in WITH_TEACHER:
        more["teacher_model"] = perturbed(folder, torch.float64)
    trainer = trainer_of(kind, model, tokenizer, output, OPTIONS.get(kind, {}), callbacks=[watch], **more)
    if side == "left":
        trainer.data_collator = PaddedInFront(trainer.data_collator)
    return logged(trainer), watch


@pytest.mark.parametrize(
    ("kind", "side"),
    [
        *((kind, side) for kind in TRAINERS if kind not in OWN_SIDE for side in ("right", "left")),
        *((kind, "both") for kind in OWN_SIDE),
    ],
)
def test_trains_as_the_untouched_model_without_the_padding(kind, side, model_folder, tokenizer, tmp_path):
    plain = adapted(model_folder, TRAINERS[kind][1], torch.float64)
    patched = copy.deepcopy(plain)
    patch = patch_model(patched)
    expected, theirs = run(kind, plain, tokenizer, model_folder, side, tmp_path / "plain")
    logs, ours = run(kind, patched, tokenizer, model_folder, side, tmp_path / "patched")
    for got, truth in zip(logs, expected, strict=True):
        assert got.keys() == truth.keys()
        # Rewards and KL are differences of log-probabilities, which TRL sums in float32
        size = max(abs(value) for key, value in truth.items() if key == "loss" or "logps" in key)
        rounding = max(BOUND, torch.finfo(torch.float32).eps * size)
        for key in truth:
            if not any(part in key for part in (*NOT_COMPARED, *NOT_COMPARED_EITHER.get(kind, ()))):
                within = rounding if key == "kl" or "reward" in key else BOUND
                assert got[key] == pytest.approx(truth[key], rel=BOUND, abs=within), key
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, truth in theirs.gradients.items():
        assert_close(ours.gradients[name], truth, name, slack=BOUND)
    if kind != "Distillation":  # whose calls pass the model's hooks by
        assert (ours.given, ours.real) == (theirs.given, theirs.real)
        assert ours.computed <= ours.real - ours.repeated < theirs.computed == theirs.given
        if kind in ("GRPO", "RLOO") or (kind in PARTS and side == "right"):
            assert ours.repeated > 0
    assert not patch.report.not_fused.keys() & {"padding", "prefixes"}
