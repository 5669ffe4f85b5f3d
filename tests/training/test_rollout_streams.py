"""Streams of rollouts: each prompt once a pass, each target whole, once, and with its weights."""

import json
from collections import Counter
from itertools import accumulate
from types import SimpleNamespace

import late_metrics_runs as runs
import pytest
import torch
from model_folder import byte_tokenizer
from tiny import DEVICE, error, tiny_model
from torch import nn

from unsloth_pack import patch_model
from unsloth_pack.config.options import RolloutOptions
from unsloth_pack.data.sources import open_stream
from unsloth_pack.data.streaming import Place, Share
from unsloth_pack.errors import InputError
from unsloth_pack.patching.deferred_logging import default_loss
from unsloth_pack.training.rollouts import RolloutStream
from unsloth_pack.training.streaming import RowStream

CAPACITY, N_PROMPTS, N_GENERATIONS = 96, 23, 3


class Guesses(nn.Module):
    """Generates random letters, and ends after a few."""

    device, generation_config = torch.device("cpu"), SimpleNamespace(eos_token_id=256)

    def generate(self, input_ids, attention_mask, max_new_tokens, num_return_sequences, **options):
        self.options = options
        shape = len(input_ids) * num_return_sequences, max_new_tokens
        return torch.cat(
            [input_ids.repeat_interleave(num_return_sequences, 0), torch.randint(64, 90, shape)], 1
        )


@pytest.fixture
def prompts(tmp_path):
    """A file that is read in several blocks."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}:", "n": n}) + "\n" for n in range(N_PROMPTS)))
    return str(path)


def open_rows(prompts, targets, process=0, processes=1):
    """A stream of packed rows, of which `targets` gets all targets; a seventh of the rollouts is dropped."""

    def target(rollout):
        rollout.counters["n"] += rollout.row["n"]
        if sum(rollout.ids) % 7 == 0:
            return None
        ids = rollout.ids[: 1 + rollout.ids[0] % 24]
        targets.append((rollout.row["n"], *rollout.prompt, *ids))
        return ids, [0.5] + [2.0] * (len(ids) - 1)

    how = {"max_new_tokens": 24, "num_generations": N_GENERATIONS, "generation_batch_size": 4 * N_GENERATIONS}
    of_run = (byte_tokenizer(), target, RolloutOptions(**how), CAPACITY, 7)
    stream = RolloutStream(open_stream(prompts, "train"), *of_run)
    stream.model = Guesses()
    share = Share(process, processes)
    return RowStream(stream, CAPACITY, seed=1, share=share, n_workers=0, ahead=1, buffer_tokens=3 * CAPACITY)


def documents(row):
    """The documents of a row: ids, and those of the target with their weights."""
    ends = [*accumulate(row["seq_lengths"])]
    for start, end in zip([0, *ends], ends, strict=False):
        labels, weights = row["labels"][start:end], row["loss_weights"][start:end]
        begin = int((labels == -100).sum())
        assert (labels[begin:] == row["input_ids"][start + begin : end]).all()
        assert weights.tolist() == [0.0] * begin + [0.5] + [2.0] * (len(labels) - begin - 1)
        yield tuple(row["input_ids"][start:end].tolist())


@pytest.mark.parametrize("processes", [1, 2])
def test_every_target_is_trained_on_once_over_passes_and_resumptions(
    processes, prompts, tmp_path, monkeypatch
):
    monkeypatch.setattr("unsloth_pack.data.streaming._BYTES", 200)
    rng = torch.Generator().manual_seed(0)
    for process in range(processes):
        targets, trained, whole = [], [], []
        rows = open_rows(prompts, targets, process, processes)
        given_out, n_rows = iter(rows), 0
        while rows._read.place.turn < 4:
            rows.fill(2)
            if torch.randint(3, (), generator=rng) == 0:
                rows.save(tmp_path, n_rows)
                rows = open_rows(prompts, targets, process, processes)
                rows.load(tmp_path)
                given_out = iter(rows)
            for row in (next(given_out), next(given_out)):
                trained += documents(row)
                assert 0.7 * CAPACITY <= len(row["input_ids"]) <= CAPACITY
                n_rows += 1
        waiting = [
            tuple(d["input_ids"]) for group in [*rows.packer._ready, rows.packer._buffer] for d in group
        ]
        assert Counter([*trained, *waiting]) == Counter(target[1:] for target in targets)
        assert len(trained) > 8 * len(waiting)
        again = iter(open_rows(prompts, whole, process, processes))
        assert trained == [each for _ in range(n_rows) for each in documents(next(again))]  # as uninterrupted
        of_prompts = Counter(number for number, *_ in targets)
        assert len(of_prompts) == N_PROMPTS if processes == 1 else len(of_prompts) >= N_PROMPTS // 2


def test_random_numbers_of_the_run_are_left_alone(prompts):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    rows = iter(open_rows(prompts, []))
    first = next(rows)["input_ids"]
    assert torch.equal(torch.rand(3), wanted)
    assert (next(iter(open_rows(prompts, [])))["input_ids"] == first).all()


@pytest.mark.parametrize("temperature", [0, 0.3])
def test_options_reach_what_generates(temperature, prompts):
    options = RolloutOptions(
        max_new_tokens=5,
        num_generations=2,
        rollout_temperature=temperature,
        generation_batch_size=6,
    )
    seen = []
    stream = RolloutStream(open_stream(prompts, "train"), byte_tokenizer(), seen.append, options, 64, 0)
    stream.model = Guesses()
    next(stream.blocks(Place(), Share()))
    assert [rollout.row["n"] for rollout in seen] == [0, 0, 1, 1, 2, 2]
    assert {len(rollout.ids) for rollout in seen} == {5}
    assert seen[0].group == seen[:2]
    sampling = {"do_sample": True, "temperature": 0.3, "top_k": 0, "top_p": 1.0}
    assert (sampling if temperature else {"do_sample": False}).items() <= stream.model.options.items()


def test_a_function_that_drops_all_of_the_first_prompts_is_refused_early(prompts, monkeypatch):
    monkeypatch.setattr("unsloth_pack.training.rollouts._PROMPTS_IN_VAIN", 8)
    options, seen = RolloutOptions(max_new_tokens=5, generation_batch_size=4), []
    stream = RolloutStream(open_stream(prompts, "train"), byte_tokenizer(), seen.append, options, 64, 0)
    stream.model = Guesses()
    with pytest.raises(InputError, match="made no target of 8 prompts"):
        list(stream.blocks(Place(), Share()))
    assert len(seen) == 8


def test_prompts_are_those_that_a_chat_template_makes(tmp_path):
    """Turns in a column prompt alone, and alpaca; what is too long is left out and counted."""
    turns = [[{"role": "user", "content": "ab" * n}] for n in (1, 4, 40)]
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in turns))
    alpaca = [{"instruction": each[0]["content"], "input": "", "output": "c"} for each in turns]
    (tmp_path / "alpaca.jsonl").write_text("".join(json.dumps(each) + "\n" for each in alpaca))
    tokenizer = byte_tokenizer()
    for name in ("turns", "alpaca"):
        seen, source = [], open_stream(str(tmp_path / f"{name}.jsonl"), "train")
        options = RolloutOptions(max_new_tokens=5, generation_batch_size=4)

        def target(rollout, seen=seen):
            seen.append(rollout.prompt)
            return rollout.ids * (1 if len(seen) == 1 else 20)

        stream = RolloutStream(source, tokenizer, target, options, 64, 0)
        stream.model = Guesses()
        (document,) = next(stream.blocks(Place(), Share())).documents()
        wanted = [tokenizer.apply_chat_template(x, add_generation_prompt=True)["input_ids"] for x in turns]
        assert seen == wanted[:2]
        assert document["input_ids"][:-5].tolist() == wanted[0]
        metrics = stream.take_metrics()
        counted = [metrics[f"rollouts/{name}"] for name in ("prompt_too_long", "target_too_long", "dropped")]
        assert counted == [[0.5], [0.5], [0.5]]


def test_counters_are_means_over_rollouts(prompts):
    rows = open_rows(prompts, [])
    rows.fill(1)
    seen = rows._read.place.done
    metrics = rows.documents.take_metrics()
    assert metrics["rollouts/n"] == [sum(range(seen)) / seen]
    assert 0 < metrics["rollouts/dropped"][0] < 1
    assert metrics["rollouts/truncated"] == [1]
    assert rows.documents.take_metrics() == {}


@pytest.mark.parametrize("num_items", [None, 40])
def test_weights_multiply_the_loss_of_their_tokens(num_items, tmp_path):
    """Loss and gradients in float64, against every document alone in an untouched model."""
    model, plain = tiny_model("llama", torch.float64), tiny_model("llama", torch.float64)
    patch_model(model)
    trainer = runs.sft_trainer(tmp_path, True, trained=model)
    lengths, generator = [7, 1, 12], torch.Generator().manual_seed(0)
    ids = torch.randint(3, 250, (1, sum(lengths)), generator=generator)
    weights = torch.randn(ids.shape, generator=generator, dtype=torch.float64)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    labels[0, torch.tensor([0, *lengths[:-1]]).cumsum(0)] = -100
    inputs = {"input_ids": ids, "labels": labels, "loss_weights": weights}
    inputs = {name: x.to(DEVICE) for name, x in inputs.items()}
    loss, _ = default_loss(trainer, model, inputs | {"packed_seq_lengths": lengths}, num_items)
    loss.backward()
    truth = 0.0
    for x, y, w in zip(*(each[0].split(lengths) for each in (ids, labels, weights)), strict=True):
        log_probs = plain(input_ids=x[None].to(DEVICE)).logits[0, :-1].log_softmax(-1).cpu()
        of_tokens = log_probs.gather(1, x[1:, None])[:, 0]
        truth = truth - (of_tokens * w[1:] * (y[1:] != -100)).sum()
    truth = truth / (num_items or (labels != -100).sum())
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6)  # scores are in float32
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if ours.requires_grad:
            assert error(ours.grad, theirs.grad) < 1e-6, name
