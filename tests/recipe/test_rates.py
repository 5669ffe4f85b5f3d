"""Rates by name are held against what will train, before the weights are loaded."""

import pytest
from model_folder import save_model

from unsloth_pack.config import TrainOptions, changed, read_record
from unsloth_pack.errors import InputError, mistakes_of
from unsloth_pack.run.model import load_run_model
from unsloth_pack.run.parameters import rates_of
from unsloth_pack.run.trained import check_names_of_modules
from unsloth_pack.training.optimizers import check_rates

CASES = {
    "usual": {},
    "all-linear": {"target_modules": "all-linear"},
    "DoRA": {"target_modules": "q_proj,v_proj", "use_dora": "true"},
    "embeddings": {"target_modules": "embed_tokens,lm_head,q_proj"},
    "whole": {"modules_to_save": "lm_head,norm", "layers_to_transform": "1"},
    "tokens": {"trainable_token_indices": "3,4"},
    "patterns": {"train_modules": "layers.0.mlp", "freeze_modules": "layers.1"},
    "biases": {"bias": "all"},
    "biases of LoRA": {"bias": "lora_only", "target_modules": "q_proj"},
    "full": {"tuning": "full", "train_modules": "norm"},
}
WORDS = [
    *("lora_A", "lora_B", "q_proj", "mlp", "norm", "lm_head", "embed_tokens", "bias", "layers.0", "layers.1"),
    *("lora_magnitude_vector", "experts", "self_attn", "no_such_module", "weight", ".*proj"),
]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3_moe"])
def folder(request, tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp(request.param), request.param, tie_word_embeddings=False))


def options(folder, **given):
    of_model = {"model_name": folder, "max_seq_length": 64, "dtype": "float32"}
    return changed(TrainOptions(), read_record({**of_model, **given}, "given"))


def refusal(check, *given):
    try:
        check(*given)
    except InputError as error:
        return str(error).partition(" (the model has")[0]  # some of its names
    return ""


@pytest.mark.parametrize("case", CASES)
def test_it_is_known_without_the_weights(case, folder):
    """As of the loaded model, but for endings that the kinds of layers decide."""
    model = load_run_model(options(folder, **CASES[case]), {})
    rates = [{"learning_rates": {word: 1e-5}} for word in WORDS] + [{"embedding_learning_rate": 1e-5}]
    for rate in rates:
        asked = options(folder, **CASES[case], **rate)
        early = refusal(check_names_of_modules, asked, folder)
        late = refusal(check_rates, model, rates_of(asked))
        if rate == {"learning_rates": {"lora_magnitude_vector": 1e-5}}:
            assert early in ("", late)
        else:
            assert early == late


def test_all_is_told_at_once(folder):
    wrong = {"learning_rates": {"no_such": 1}, "embedding_learning_rate": 1, "freeze_modules": "x"}
    with pytest.raises(InputError) as told:
        check_names_of_modules(options(folder, **wrong, modules_to_save="gone"), folder)
    said = [error.about for error in mistakes_of(told.value)]
    assert said == [
        ("freeze_modules",),
        ("modules_to_save",),
        ("learning_rates",),
        ("embedding_learning_rate",),
    ]
