"""Labels on answers alone: found among token ids whatever the tokenizer joins, in packed rows and streams."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from chat_tokenizers import TURNS, tokenizer_of
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tables import table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from unsloth_pack import InputError
from unsloth_pack.chat_templates import CHAT_FORMATS, get_chat_template, train_on_responses_only
from unsloth_pack.chat_templates.answers import TokenTexts

PARTS = {"instruction_part": "<|im_start|>user\n", "response_part": "<|im_start|>assistant\n"}


def tokenised(tokenizer, conversations):
    return [tokenizer.apply_chat_template(turns)["input_ids"] for turns in conversations]


def joined(lists):
    return [*chain.from_iterable(lists)]


def trainer_of(tokenizer, dataset, **more):
    return SimpleNamespace(processing_class=tokenizer, train_dataset=dataset, **more)


def dataset_of(documents, packed=False, streamed=False):
    columns = {"input_ids": documents}
    if packed:
        rows = [documents[at : at + 3] for at in range(0, len(documents), 3)]
        columns = {
            "input_ids": [joined(row) for row in rows],
            "seq_lengths": [[len(document) for document in row] for row in rows],
        }
    data = Dataset.from_dict(columns)
    return data.to_iterable_dataset() if streamed else data


def learned(tokenizer, labels):
    """The text of each run of labels."""
    runs, run = [], []
    for label in [*labels, -100]:
        if label == -100 and run:
            runs.append(tokenizer.decode(run))
            run = []
        elif label != -100:
            run.append(label)
    return runs


def answers(name, tokenizer, turns):
    """What is learned of a conversation: its answers, each to the next question or the end."""
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    chat = CHAT_FORMATS[name]
    behind = [part.split(chat.instruction_part)[0] for part in text.split(chat.response_part)[1:]]
    bos = tokenizer.bos_token
    return [part.removesuffix(bos) if name == "llama" else part for part in behind]


@table("streamed", [False, True], ids=["rows", "stream"])
@table("packed", [False, True], ids=["apart", "packed"])
@table("special", [True, False], ids=["special", "text"])
@table("name", ["alpaca", "chatml", "llama-3.1", "mistral", "qwen-3"])
def test_answers_are_what_is_learned(name, special, packed, streamed):
    tokenizer = get_chat_template(tokenizer_of(name, special), name)
    plain = [[{**turn, "content": f"{turn['role']} {n}"} for turn in TURNS] for n in range(7)]
    documents = tokenised(tokenizer, plain)
    trainer = trainer_of(tokenizer, dataset_of(documents, packed, streamed))
    assert train_on_responses_only(trainer) is trainer
    rows = list(trainer.train_dataset)
    ids, labels = (joined(row[key] for row in rows) for key in ("input_ids", "labels"))
    assert ids == joined(documents)
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    wanted = [text for turns in plain for text in answers(name, tokenizer, turns)]
    assert [text.strip() for text in learned(tokenizer, labels)] == [text.strip() for text in wanted]
    assert set(rows[0]) == {"input_ids", "labels", *(["seq_lengths"] if packed else [])}


@pytest.fixture(scope="module")
def joining_tokenizer():
    """A BPE tokenizer that learned to join the ends of markers with the text beside them."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [f"e\n\n### Q:\n{word}\n\n### A:\n{word}e\n" for word in ("abc", "a", " b", "\nc", "#", "e")] * 50
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="!", pad_token="!")


@given(st.lists(st.text("abc #\ne", min_size=1, max_size=9), min_size=1, max_size=6))
def test_markers_that_are_joined_with_their_surroundings(joining_tokenizer, contents):
    """Every marker is found, and nothing else: as many as there are in the text."""
    text = "".join(f"{content}\n\n### A:\n" for content in contents) + "end"
    ids = np.asarray(joining_tokenizer(text)["input_ids"], np.int64)
    spans = TokenTexts(joining_tokenizer).find(ids, "### A:\n")[0]
    assert len(spans) == text.count("### A:\n")
    behind = [joining_tokenizer.decode(ids[end:]) for _, end in spans]
    at = [place + len("### A:\n") for place in range(len(text)) if text.startswith("### A:\n", place)]
    for found, place in zip(behind, at, strict=True):
        assert found.endswith(text[place:])
        assert len(found) - len(text[place:]) < 12  # no more than the token that holds both


def test_a_marker_spans_no_two_documents():
    tokenizer = tokenizer_of("chatml", special=False)
    whole = tokenizer("<|im_start|>user\nq<|im_start|>assistant\nab")["input_ids"]
    cut = len(whole) - 5  # within the marker of the answer
    data = Dataset.from_dict(
        {"input_ids": [whole, whole], "seq_lengths": [[len(whole)], [cut, len(whole) - cut]]}
    )
    trainer = train_on_responses_only(trainer_of(tokenizer, data), **PARTS)
    assert [learned(tokenizer, row["labels"]) for row in trainer.train_dataset] == [["ab"]]


def test_labels_that_were_masked_stay_so():
    tokenizer = tokenizer_of("chatml")
    ids = tokenizer("<|im_start|>user\nq<|im_start|>assistant\nabcd")["input_ids"]
    labels = [*ids[:-2], -100, ids[-1]]
    trainer = trainer_of(tokenizer, Dataset.from_dict({"input_ids": [ids], "labels": [labels]}))
    train_on_responses_only(trainer, **PARTS)
    assert learned(tokenizer, trainer.train_dataset[0]["labels"]) == ["ab", "d"]


def some_lack_a_marker(tokenizer):
    texts = ["<|im_start|>user\nq<|im_start|>assistant\na"] * 8
    texts += ["<|im_start|>user\nq"] * 3 + ["<|im_start|>assistant\na"] * 2
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("streamed", [False, True], ids=["rows", "stream"])
def test_documents_without_a_marker_are_counted(streamed, caplog):
    tokenizer = tokenizer_of("chatml")
    trainer = trainer_of(tokenizer, dataset_of(some_lack_a_marker(tokenizer), streamed=streamed))
    train_on_responses_only(trainer, **PARTS)
    rows = list(trainer.train_dataset)
    assert [learned(tokenizer, row["labels"]) for row in rows] == [["a"]] * 10
    (said,) = [record.message for record in caplog.records]
    assert "13 documents 3 lack response_part and 2 lack instruction_part; 3 rows without a label" in said


@table("streamed", [False, True], ids=["rows", "stream"])
@table(
    ("parts", "says"),
    [
        ({"response_part": "<|im_start|>model\n"}, "response_part '<|im_start|>model.*in none of"),
        ({"response_part": ""}, "response_part is ''"),
        ({"instruction_part": None}, "instruction_part is None"),
        ({"response_part": PARTS["instruction_part"]}, "are both"),
    ],
)
def test_markers_that_cannot_be_are_refused(parts, says, streamed):
    tokenizer = tokenizer_of("chatml")
    data = dataset_of(some_lack_a_marker(tokenizer)[:8], streamed=streamed)
    trainer = trainer_of(tokenizer, data)
    with pytest.raises(InputError, match=says.replace("|", "\\|")) as refused:
        train_on_responses_only(trainer, **{**PARTS, **parts})
    assert trainer.train_dataset is data
    assert "\n" not in str(refused.value)


def test_evaluations_too():
    tokenizer = tokenizer_of("chatml")
    documents = some_lack_a_marker(tokenizer)
    good, bad = dataset_of(documents[:8]), dataset_of(documents[8:11])
    trainer = trainer_of(tokenizer, good, eval_dataset={"a": good, "b": good})
    train_on_responses_only(trainer, **PARTS)
    assert all(learned(tokenizer, trainer.eval_dataset[key][0]["labels"]) == ["a"] for key in "ab")
    trainer = trainer_of(tokenizer, good, eval_dataset={"a": good, "b": bad})
    with pytest.raises(InputError, match="eval_dataset b"):
        train_on_responses_only(trainer, **PARTS)
    assert trainer.train_dataset is good
    assert trainer.eval_dataset["a"] is good


def test_a_collator_that_makes_its_own_labels():
    """transformers' collator for language models copies `input_ids` over the labels, without a word."""
    tokenizer = tokenizer_of("chatml")
    data = dataset_of(some_lack_a_marker(tokenizer)[:8])
    own = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    with pytest.raises(InputError, match="DataCollatorForLanguageModeling"):
        train_on_responses_only(trainer_of(tokenizer, data, data_collator=own), **PARTS)
    kept = DataCollatorForSeq2Seq(tokenizer)
    trainer = train_on_responses_only(trainer_of(tokenizer, data, data_collator=kept), **PARTS)
    batch = kept(
        [{key: row[key] for key in ("input_ids", "labels")} for row in list(trainer.train_dataset)[:2]]
    )
    assert torch.equal(
        batch["labels"] != -100, torch.tensor([[False] * (batch["labels"].shape[1] - 1) + [True]] * 2)
    )
