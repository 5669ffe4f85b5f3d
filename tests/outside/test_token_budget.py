"""`limit_tokens`: micro-batches of GRPO are cut by tokens, and train as TRL trains them whole."""

import os
from pathlib import Path

import pytest
import torch
from outside_models import assert_close
from transformers import AutoTokenizer, TrainerCallback
from trl_runs import adapted, logged, trainer_of
from warm import two_ranks

from unsloth_pack import InputError, patch_model
from unsloth_pack.training.token_budget import limit_tokens

BUDGET = 40
CASES = {
    "grpo": {"beta": 0.1},
    "bnpo": {"num_iterations": 2},
    "dapo": {"steps_per_generation": 2, "gradient_accumulation_steps": 2},
    "dr_grpo": {"importance_sampling_level": "sequence"},
    "luspo": {"importance_sampling_level": "sequence"},
    "cispo": {}, "sapo": {}, "vespo": {},
}  # fmt: skip


class Watch(TrainerCallback):
    """The gradients of the first update, and the real tokens of every training call."""

    def __init__(self, model):
        self.gradients, self.tokens = {}, []
        model.get_base_model().register_forward_pre_hook(self._count, with_kwargs=True)

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if not self.gradients:
            self.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def _count(self, module, args, kwargs):
        if "past_key_values" not in kwargs and torch.is_grad_enabled():
            self.tokens.append((len(kwargs["input_ids"]), int(kwargs["attention_mask"].sum())))


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


def ragged(generate):
    """Answers of 1 to 8 tokens, which a random model never ends by itself."""

    def generate_and_cut(inputs):
        outputs = generate(inputs)
        mask = outputs["completion_mask"]
        lengths = 1 + 3 * torch.arange(len(mask), device=mask.device) % mask.shape[1]
        outputs["completion_mask"] = mask * (
            torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
        )
        return outputs

    return generate_and_cut


def runs(loss_type, folder, tokenizer, output):
    """The logs and watches of two runs, whole and cut."""
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "loss_type": loss_type}
    for budget in (None, BUDGET):
        model = adapted(folder, "GRPO", torch.float64)
        patch_model(model)
        watch = Watch(model)
        trainer = trainer_of("GRPO", model, tokenizer, output, options | CASES[loss_type], callbacks=[watch])
        trainer._generate_and_score_completions = ragged(trainer._generate_and_score_completions)
        if budget is not None:
            limit_tokens(trainer, budget)
        yield logged(trainer), watch


def assert_equal(logs, watches):
    theirs, ours = watches
    for truth, line in zip(*logs, strict=True):
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(truth[name], rel=2e-6, abs=2e-6), name
    for name, truth in theirs.gradients.items():
        assert_close(ours.gradients[name], truth, name, slack=2e-6)


@pytest.mark.parametrize("loss_type", CASES)
def test_losses_and_gradients_are_those_of_the_whole(loss_type, model_folder, tokenizer, tmp_path):
    """In float64, over two updates."""
    logs, watches = zip(*runs(loss_type, model_folder, tokenizer, tmp_path), strict=True)
    theirs, ours = watches
    assert max(n for _, n in theirs.tokens) > 2 * BUDGET
    assert all(n <= BUDGET or rows == 1 for rows, n in ours.tokens)
    assert sum(n for _, n in ours.tokens) == sum(n for _, n in theirs.tokens)
    assert_equal(logs, watches)


def on_rank(rank, folder, output):
    """Train with rows of another length on each of two processes."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for loss_type in ("grpo", "bnpo"):
        logs, watches = zip(
            *runs(loss_type, folder, AutoTokenizer.from_pretrained(folder), output), strict=True
        )
        Path(output, f"{loss_type}-{rank}").write_text(str(len(watches[1].tokens)))
        assert_equal(logs, watches)


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes, and perhaps one GPU")
def test_two_processes_cut_into_as_many_parts(model_folder, tmp_path):
    two_ranks(on_rank, str(model_folder), str(tmp_path))
    for loss_type in ("grpo", "bnpo"):
        parts = [int((tmp_path / f"{loss_type}-{rank}").read_text()) for rank in (0, 1)]
        assert parts[0] == parts[1] > 2


@pytest.mark.parametrize("options", [{"top_entropy_quantile": 0.5}, {"entropy_coef": 0.1}])
def test_a_loss_of_all_rows_together_is_refused(options, model_folder, tokenizer, tmp_path):
    trainer = trainer_of("GRPO", adapted(model_folder, "GRPO"), tokenizer, tmp_path, options)
    with pytest.raises(InputError, match="needs all rows of a micro-batch together"):
        limit_tokens(trainer, BUDGET)
