"""A patched model generates what the untouched one does, in all of the ways that transformers has."""

import json
import shutil

import pytest
import torch
from outside_models import ARCHITECTURES, DEVICE, plain_and_patched
from tables import table
from transformers import GenerationConfig

from unsloth_pack import InputError
from unsloth_pack.cli import main

WAYS = {
    "greedy": {"do_sample": False},
    "without a cache": {"do_sample": False, "use_cache": False},
    "static cache": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    "sampled": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.7},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "prefill in chunks": {"do_sample": False, "prefill_chunk_size": 4},
}
BATCHED = [way for way in WAYS if way not in ("prompt lookup", "prefill in chunks")]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request):
    return plain_and_patched(request.param)


def prompt(rows=1, length=11):
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(3, 256, (rows, length), generator=generator).to(DEVICE)


def generated(model, ids, **options):
    torch.manual_seed(7)
    given = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
    out = model.generate(ids, **{**given, **options})
    return out.sequences, out.logits


def assert_same(pair, ids, **options):
    (plain, logits), (ours, our_logits) = (generated(model, ids, **options) for model in pair)
    assert torch.equal(ours, plain)
    for step, truth in enumerate(logits):
        torch.testing.assert_close(our_logits[step], truth, rtol=1e-3, atol=1e-4)


@table("way", WAYS)
def test_one_prompt(way, pair):
    if way == "prompt lookup" and pair[0]._is_stateful:  # a state cannot be taken back
        for model in pair:
            with pytest.raises(ValueError, match="not supported with stateful models"):
                generated(model, prompt(), **WAYS[way])
        return
    assert_same(pair, prompt(), **WAYS[way])


@table("way", BATCHED)
def test_prompts_of_several_lengths(way, pair):
    ids, mask = prompt(rows=3), torch.ones(3, 11, dtype=torch.int64, device=DEVICE)
    mask[0, :4] = mask[2, :7] = 0  # padded on the left
    assert_same(pair, ids, attention_mask=mask, **WAYS[way])


def test_a_conversation_goes_on_with_its_cache(pair):
    answers = []
    for model in pair:
        first = model.generate(prompt(), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, prompt(length=6)], 1)
        cache = first.past_key_values
        answers.append(model.generate(longer, past_key_values=cache, max_new_tokens=5, do_sample=False))
    assert torch.equal(*answers)


def test_continuous_batching_is_refused():
    """Its thread would log an error, and answer nothing."""
    from transformers import ContinuousBatchingConfig

    plain, patched = plain_and_patched()
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    few = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)  # its default fills the memory
    asked = {"inputs": prompt().tolist(), "generation_config": config, "continuous_batching_config": few}
    assert [len(answer.generated_tokens) for answer in plain.generate_batch(**asked).values()] == [4]
    with pytest.raises(InputError, match="does not run generate_batch; call generate"):
        patched.generate_batch(**asked)


@table(
    "own",
    [
        {"num_beams": 3, "early_stopping": True},
        {"num_return_sequences": 2, "do_sample": True},
        {"stop_strings": ["x"]},
        {"output_attentions": True, "return_dict_in_generate": True},
    ],
    ids=lambda own: next(iter(own)),
)
def test_the_command_streams_whatever_the_models_own_config_asks_for(own, model_folder, tmp_path, capsys):
    folder = tmp_path / next(iter(own))
    shutil.copytree(model_folder, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    answers = []
    for model in (model_folder, folder):
        capsys.readouterr()
        assert main(["generate", f"--model_name={model}", "--prompt=hi", "--max_new_tokens=3"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
