"""Notebooks that people have, with `unsloth_pack` in place of Unsloth: their calls, in their order."""

import os
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from model_folder import byte_tokenizer, save_model
from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, TrainingArguments
from trl import SFTConfig as TrlConfig
from trl import SFTTrainer as TrlTrainer

from unsloth_pack import (
    FastLanguageModel,
    FastModel,
    InputError,
    SFTConfig,
    SFTTrainer,
    UnslothTrainer,
    UnslothTrainingArguments,
    is_bfloat16_supported,
)
from unsloth_pack.chat_templates import (
    get_chat_template,
    standardize_sharegpt,
    train_on_responses_only,
)

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ARGUMENTS = dict(per_device_train_batch_size=2, gradient_accumulation_steps=1, warmup_steps=1, max_steps=2)
ARGUMENTS |= dict(
    learning_rate=2e-4, logging_steps=1, weight_decay=0.001, lr_scheduler_type="linear", seed=3407
)
ARGUMENTS |= dict(report_to="none", disable_tqdm=True, save_strategy="no")
SHAREGPT = [
    [
        {"from": "human", "value": f"question {number}"},
        {"from": "gpt", "value": f"answer {number}"},
        {"from": "human", "value": "and?"},
        {"from": "gpt", "value": "no more"},
    ]
    for number in range(12)
]
PARTS = {
    "llama-3.1": (
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma-3": ("<start_of_turn>user\n", "<start_of_turn>model\n"),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Notebooks write into the folder they run in."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024))


def loaded(folder, **options):
    return FastLanguageModel.from_pretrained(
        model_name=folder, max_seq_length=512, dtype=None, load_in_4bit=False, **options
    )


def adapted(model, **options):
    given = dict(r=8, target_modules=SEVEN, lora_alpha=16, lora_dropout=0, bias="none", random_state=3407)
    given |= dict(use_gradient_checkpointing="unsloth", use_rslora=False, loftq_config=None)
    return FastLanguageModel.get_peft_model(model, **given | options)


def learned(trainer, tokenizer, row=0):
    """As the notebooks show it."""
    labels = trainer.train_dataset[row]["labels"]
    blank = [tokenizer.pad_token_id if label == -100 else label for label in labels]
    return tokenizer.decode(blank).replace(tokenizer.pad_token, " ")


def trained(trainer):
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    stats = trainer.train()
    assert stats.metrics["train_runtime"] > 0
    assert trainer.state.global_step == 2
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(0 < loss < 20 for loss in losses)
    changed = [
        n for n, p in trainer.model.named_parameters() if n in before and not torch.equal(p, before[n])
    ]
    assert changed
    return stats


def test_llama_alpaca_completion(folder):
    model, tokenizer = loaded(folder)
    model = adapted(model)
    alpaca_prompt = "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n{}"

    def formatting_prompts_func(examples):
        rows = zip(examples["instruction"], examples["input"], examples["output"], strict=True)
        return {"text": [alpaca_prompt.format(*row) + tokenizer.eos_token for row in rows]}

    rows = {"instruction": ["add"] * 12, "input": ["1 2"] * 12, "output": ["3"] * 12}
    dataset = Dataset.from_dict(rows).map(formatting_prompts_func, batched=True)
    trainer = SFTTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=dataset,
        dataset_text_field="text",
        max_seq_length=256,
        dataset_num_proc=1,
        packing=False,
        args=TrainingArguments(
            **ARGUMENTS,
            fp16=False,
            bf16=is_bfloat16_supported(),
            optim="adamw_torch",
            output_dir="outputs",
            use_cpu=not torch.cuda.is_available(),
        ),
    )
    assert trainer.args.max_length == 256
    trained(trainer)
    FastLanguageModel.for_inference(model)
    inputs = tokenizer([alpaca_prompt.format("add", "3 4", "")], return_tensors="pt").to(model.device)
    assert tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=4, use_cache=True))
    model.save_pretrained("lora_model")
    tokenizer.save_pretrained("lora_model")
    again, _ = FastLanguageModel.from_pretrained(
        model_name="lora_model", max_seq_length=256, load_in_4bit=False
    )
    FastLanguageModel.for_inference(again)
    with torch.no_grad():
        assert torch.allclose(again(**inputs).logits, model(**inputs).logits, atol=1e-5)
    model.save_pretrained_merged("merged", tokenizer, save_method="merged_16bit")
    assert os.path.exists("merged/model.safetensors")
    model.save_pretrained_merged("lora", tokenizer, save_method="lora")
    assert os.path.exists("lora/adapter_model.safetensors")


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", PARTS)
def test_conversations(name, packing, folder):
    model, tokenizer = loaded(folder)
    model = adapted(model)
    tokenizer = get_chat_template(tokenizer, chat_template=name)
    dataset = standardize_sharegpt(Dataset.from_dict({"conversations": SHAREGPT}))

    def formatting_prompts_func(examples):
        render = tokenizer.apply_chat_template
        convos = examples["conversations"]
        return {"text": [render(convo, tokenize=False, add_generation_prompt=False) for convo in convos]}

    trainer = SFTTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=dataset.map(formatting_prompts_func, batched=True),
        eval_dataset=None,
        data_collator=None if packing else DataCollatorForSeq2Seq(tokenizer=tokenizer),
        args=SFTConfig(
            **ARGUMENTS, dataset_text_field="text", packing=packing, optim="adamw_8bit", output_dir="outputs"
        ),
    )
    instruction_part, response_part = PARTS[name]
    trainer = train_on_responses_only(trainer, instruction_part=instruction_part, response_part=response_part)
    shown = learned(trainer, tokenizer)
    assert "answer" in shown
    assert "no more" in shown
    assert "question" not in shown
    assert "and?" not in shown
    trained(trainer)


@pytest.mark.parametrize(
    ("left_out", "stays"), [("mlp", {*SEVEN[:4]}), ("attention", {*SEVEN[4:]})], ids=["attention", "mlp"]
)
def test_parts_of_a_model(left_out, stays, folder):
    model, _ = loaded(folder)
    model = FastModel.get_peft_model(model, **{f"finetune_{left_out}_modules": False})
    assert set(model.peft_config["default"].target_modules) == stays


def test_continued_pretraining(folder):
    """Embeddings are trained with a learning rate of their own, also by a second `train()`."""
    model, tokenizer = loaded(folder)
    model = adapted(model, target_modules=[*SEVEN, "embed_tokens", "lm_head"], use_rslora=True)
    rows = Dataset.from_dict({"text": [f"line {number} of a long text" for number in range(12)]})

    def trainer_of(**more):
        given = {**ARGUMENTS, "save_strategy": "steps", "save_steps": 2, "output_dir": "outputs", **more}
        return UnslothTrainer(
            model=model,
            tokenizer=tokenizer,
            train_dataset=rows,
            dataset_text_field="text",
            max_seq_length=256,
            dataset_num_proc=1,
            args=UnslothTrainingArguments(**given, embedding_learning_rate=1e-5),
        )

    trainer = trainer_of()
    trained(trainer)
    trained(trainer)
    trainer_of(max_steps=3).train(resume_from_checkpoint="outputs/checkpoint-2")
    named = {id(weight): name for name, weight in model.named_parameters()}
    rates = {}
    for group in trainer.optimizer.param_groups:
        for weight in group["params"]:
            rates.setdefault(group["initial_lr"], []).append(named[id(weight)])
    assert rates.keys() == {2e-4, 1e-5}
    assert all("embed_tokens" in name or "lm_head" in name for name in rates[1e-5])
    assert all("modules_to_save" in name for name in rates[1e-5])
    assert len(rates[1e-5]) == 2
    assert not any("embed_tokens" in name or "lm_head" in name for name in rates[2e-4])


def test_the_trainer_of_trl(folder):
    """Two lines changed in place of three: TRL's own trainer, with TRL's own names."""
    model, tokenizer = loaded(folder)
    tokenizer = get_chat_template(tokenizer, "chatml")
    rows = [[{"role": "user", "content": "Q"}, {"role": "assistant", "content": f"A{n}"}] for n in range(12)]
    on_cpu = dict(use_cpu=True, bf16=False) if not torch.cuda.is_available() else {}
    config = dict(max_length=512, gradient_checkpointing=False, output_dir="outputs")
    model = adapted(model)
    for packing in (False, True):
        trainer = TrlTrainer(
            model,
            TrlConfig(**ARGUMENTS, **config, **on_cpu, packing=packing, padding_free=packing),
            train_dataset=Dataset.from_dict({"messages": rows}),
            processing_class=tokenizer,
        )
        train_on_responses_only(trainer)
        assert "A0" in learned(trainer, tokenizer)
        assert "Q" not in learned(trainer, tokenizer)
        trained(trainer)


def fallback_tokenizer():
    """As sentencepiece has it: letters that the vocabulary lacks become tokens of single bytes."""
    pieces = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁#:ab\n"]
    bpe = Tokenizer(
        models.BPE({piece: n for n, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<eos>")


@pytest.mark.parametrize(
    "tokenizer", [byte_tokenizer(), fallback_tokenizer()], ids=["byte-level", "byte fallback"]
)
def test_markers_with_letters_of_several_tokens(tokenizer):
    question, answer = "### 질문:\n", "답변:"
    text = f"{question}é b\n{answer} aé질<eos>{question}문\n{answer}답"
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"]]}),
    )
    train_on_responses_only(trainer, question, answer)
    labels = trainer.train_dataset[0]["labels"]
    assert tokenizer.decode([label for label in labels if label != -100]) == " aé질<eos>답"


@pytest.fixture
def beginning():
    """A tokenizer that puts a token before every text."""
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<pad>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", tokenizer.bos_token_id)]
    )
    return tokenizer


MIXED = ["some text", "<pad>some text"]
TURNS = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
ONES = {"text": MIXED, "messages": [TURNS, TURNS]}
TEXTS = {
    "rows that differ": ({"text": MIXED}, None),
    "prompts": ({"prompt": ["some ", "<pad>some "], "completion": ["text", "text"]}, None),
    "a function": (ONES, lambda row: row["text"]),
    "another column": ({"given": MIXED, "prompt": ["1", "2"]}, lambda row: row["given"]),
}


@pytest.mark.parametrize("streams", [False, True], ids=["rows", "stream"])
@pytest.mark.parametrize("name", TEXTS)
def test_texts_begin_once(name, streams, folder, beginning):
    """A rendered chat has its begin-of-sequence token, and the tokenizer puts another before it."""
    columns, function = TEXTS[name]
    model, _ = loaded(folder)
    rows = Dataset.from_dict(columns)
    rows = rows.to_iterable_dataset() if streams else rows
    args = SFTConfig(**ARGUMENTS, output_dir="outputs")
    given = dict(tokenizer=beginning, train_dataset=rows, eval_dataset=rows, formatting_func=function)
    trainer = SFTTrainer(adapted(model), args, **given)
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        assert [beginning.decode(row["input_ids"]) for row in dataset] == ["<pad>some text<eos>"] * 2


@pytest.mark.parametrize(("config", "length"), [(SFTConfig, 512), (TrlConfig, 64)], ids=["left out", "given"])
def test_rows_joined_without_packing(config, length, folder):
    """TRL refuses a max_length beside padding_free, and ours is the model's where it is left out."""
    model, tokenizer = loaded(folder)
    on_cpu = dict(use_cpu=True, bf16=False) if not torch.cuda.is_available() else {}
    more = dict(max_length=64, gradient_checkpointing=False, **on_cpu) if config is TrlConfig else {}
    rows = Dataset.from_dict({"text": ["short", "long" * 200] * 2})
    args = config(**ARGUMENTS, **more, padding_free=True, output_dir="outputs")
    trainer = SFTTrainer(adapted(model), args, tokenizer=tokenizer, train_dataset=rows)
    assert trainer.args.max_length == length
    assert sorted(map(len, trainer.train_dataset["input_ids"])) == [6, 6, length, length]
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape[0] == 1
    trained(trainer)
    assert trainer.evaluate(rows)["eval_loss"] > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fast_inference": True}, "fast_inference is True, .*vLLM"),
        ({"max_lora_rank": 32}, "max_lora_rank is 32.*leave it out"),
        ({"float32_mixed_precision": True}, "give dtype='float32'"),
        ({"use_gradient_checkpointing": "unsloth"}, "give it to get_peft_model"),
    ],
)
def test_loading_arguments_that_ask_for_what_is_not_here(given, says, folder):
    with pytest.raises(InputError, match=says) as refused:
        loaded(folder, **given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        (
            "save_pretrained_gguf",
            {"quantization_method": "q4_k_m"},
            "unsloth-pack export adapter --to gguf",
        ),
        (
            "push_to_hub_gguf",
            {"quantization_type": "Q8_0", "token": "t"},
            "save model and tokenizer",
        ),
        ("push_to_hub_merged", {"token": "t"}, "cannot push to 'me/it/too': .*repo_name.*hf upload"),
        ("save_pretrained_merged", {"save_method": "merged_4bit"}, "save_method is 'merged_4bit'"),
    ],
)
def test_what_cannot_be_saved_here_says_what_to_do(method, options, says, folder):
    model, tokenizer = loaded(folder)
    with pytest.raises(InputError, match=says) as refused:
        getattr(adapted(model), method)("me/it/too", tokenizer, **options)
    assert "\n" not in str(refused.value)
    assert os.listdir() == []


# ---- data without a token to learn


def trainer_of(folder, rows, **options):
    model, tokenizer = loaded(folder)
    config = SFTConfig(**ARGUMENTS | {"max_steps": 1}, **options)
    return SFTTrainer(
        adapted(model), config, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer
    )


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"text": []}, "train_dataset has no rows; give at least one"),
        ({"text": ["", ""]}, "none of the 2 rows of train data has a token to learn; raise max_length"),
        ({"prompt": ["long" * 9], "completion": ["a"]}, "none of the 1 rows of train data"),
    ],
)
def test_data_without_a_token_to_learn(rows, says, folder):
    """Before, a bare StopIteration, a loss of 0, or an error of torch's sampler."""
    with pytest.raises(InputError, match=says):
        trainer_of(folder, rows, max_length=20)
