"""`tokenize` gives what TRL's SFTTrainer would, token for token and label for label."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from model_folder import byte_tokenizer
from tables import table
from tokenizers import pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from unsloth_pack.data.formats import Conversion
from unsloth_pack.data.lossless_json import to_dataset
from unsloth_pack.data.token_counts import check_token_loss
from unsloth_pack.data.tokenize import IGNORE_INDEX, documents_of, tokenizer_hash
from unsloth_pack.errors import InputError

TEMPLATE = (
    "{% if mood is defined %}[{{ mood }}]{% endif %}{% if tools %}[tools]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
COUNTING = "{{ messages | length }}" + UNMARKED
STRICT = "{% if messages | length > 2 %}{{ raise_exception('too many turns') }}{% endif %}" + TEMPLATE
RERENDERING = TEMPLATE.replace("[assistant]{% endif", "[assistant]<think>{% endif")


@pytest.fixture
def tokenizer():
    made = byte_tokenizer(TEMPLATE)
    made.add_special_tokens({"bos_token": "<s>"})
    begun = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", made.bos_token_id)])
    made.backend_tokenizer.post_processor = begun
    return made


def tokenize(rows, tokenizer, **options):
    documents = documents_of(to_dataset(rows), tokenizer, **options)
    return documents.rows, documents.ledger


def by_trl(data, tokenizer, tmp_path, max_length, responses_only):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    args = SFTConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_length=max_length,
        assistant_only_loss=responses_only,
        dataloader_pin_memory=False,
    )
    return SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer).train_dataset


ALPACA = [
    {"instruction": "greet é", "input": "", "output": "hi"},
    {"instruction": "add", "input": "1 1", "output": "2"},
    {"instruction": "long " * 20, "input": "", "output": "cut off"},
]
TURNS = [("user", "q"), ("assistant", "call"), ("tool", "seen"), ("assistant", "a")]
MESSAGES = [
    {"messages": [{"role": who, "content": text} for who, text in TURNS], "tools": '[{"name": "f"}]'},
    {"messages": [{"role": who, "content": text} for who, text in TURNS[:2]], "tools": "[]"},
    {
        "messages": [{"role": who, "content": text} for who, text in TURNS[2:][::-1]],
        "tools": '[{"name": "f"}]',
    },
]
MESSAGES[2]["messages"][0]["role"], MESSAGES[2]["messages"][1]["role"] = "user", "assistant"
CHAT_PAIRS = [
    {
        "prompt": [{"role": "user", "content": "q"}],
        "completion": [{"role": who, "content": text} for who, text in TURNS[1:]],
    },
    {"prompt": [{"role": "user", "content": "r"}], "completion": [{"role": "assistant", "content": "b"}]},
]
MOODS = [{"mood": "calm"}, {}, {"mood": None}]
MOODY = [row | {"chat_template_kwargs": mood} for row, mood in zip(MESSAGES, MOODS, strict=True)]
MOODY_PAIRS = [row | {"chat_template_kwargs": mood} for row, mood in zip(CHAT_PAIRS, MOODS, strict=False)]
STRING_PAIRS = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "", "completion": "alone<eos>"}]
TEXT = [{"text": "one\ntwo"}, {"text": "ended<eos>"}, {"text": "x" * 70}]


@table("template", [TEMPLATE, RERENDERING])
@table(
    ("rows", "responses_only"),
    [
        (ALPACA, False),
        (ALPACA, True),
        (MESSAGES, True),
        (CHAT_PAIRS, False),
        (CHAT_PAIRS, True),
        (MOODY, False),
        (MOODY_PAIRS, True),
        (STRING_PAIRS, False),
        (TEXT, False),
    ],
)
def test_equals_trl(rows, responses_only, template, tokenizer, tmp_path):
    tokenizer.chat_template = template
    ours, ledger = tokenize(rows, tokenizer, max_length=60, train_on_responses_only=responses_only)
    converted = Conversion(to_dataset(rows), chat_template=True).rows(0, len(rows), 99)
    data = to_dataset([*converted])
    theirs = by_trl(data, tokenizer, tmp_path, 60, responses_only)
    assert ours.column_names == ["input_ids", "labels"]
    assert ours["input_ids"][:] == theirs["input_ids"][:]
    assert ours["labels"][:] == theirs["labels"][:]
    assert len(ours) == ledger.rows_read - ledger.rows_fully_masked
    assert ledger.rows_read == len(rows)


@table(
    ("one", "two"),
    [({"text": "some"}, {"text": "<s>some"}), (STRING_PAIRS[0], {"prompt": "<s>2+2=", "completion": "4"})],
)
def test_a_text_begins_once(one, two, tokenizer):
    (without,), (given,) = (tokenize([row], tokenizer, max_length=60)[0].to_list() for row in (one, two))
    assert given == without
    assert given["input_ids"].count(tokenizer.bos_token_id) == 1


rows_of_text = st.lists(st.text("ab", max_size=30), min_size=1, max_size=8).map(
    lambda texts: [{"text": text} for text in texts]
)
rows_of_turns = st.lists(
    st.lists(st.text("ab", min_size=1, max_size=12), min_size=2, max_size=4).map(
        lambda texts: {
            "messages": [
                {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
            ]
        }
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.one_of(rows_of_text, rows_of_turns), max_length=st.integers(1, 60), responses_only=st.booleans()
)
def test_the_ledger_adds_up_over_any_rows(tokenizer, rows, max_length, responses_only):
    responses_only = responses_only and "messages" in rows[0]
    try:
        cut, ledger = tokenize(rows, tokenizer, max_length=max_length, train_on_responses_only=responses_only)
    except InputError as error:
        assume("would count in the loss" not in str(error))
        raise
    masked = ledger.tokens_masked_by_template + ledger.tokens_masked_at_boundaries
    assert ledger.tokens_read == (
        ledger.tokens_truncated + ledger.tokens_dropped + masked + ledger.tokens_counted
    )
    labels = cut["labels"][:]
    assert ledger.rows_fully_masked == len(rows) - len(labels)
    kept = sum(map(len, labels))
    assert masked + ledger.tokens_counted == kept
    assert ledger.tokens_counted == sum(label != IGNORE_INDEX for row in labels for label in row[1:])
    assert ledger.tokens_masked_at_boundaries == sum(row[0] != IGNORE_INDEX for row in labels)
    assert ledger.tokens_masked_by_template == sum(row.count(IGNORE_INDEX) for row in labels)
    assert ledger.discarded == pytest.approx(1 - kept / ledger.tokens_read)
    assert (ledger.longest > max_length) == (ledger.tokens_truncated > 0)
    if ledger.discarded:
        with pytest.raises(InputError, match=r"of its [0-9,]+ tokens, and --max_token_loss allows 0.00%"):
            check_token_loss("rows.json", ledger, 0.0, max_length, 2048)
    check_token_loss("rows.json", ledger, ledger.discarded, max_length, 2048)


def test_answers_of_a_template_without_marks(tokenizer):
    labels = []
    for tokenizer.chat_template in (TEMPLATE, UNMARKED):
        made, _ = tokenize(CHAT_PAIRS, tokenizer, max_length=99, train_on_responses_only=True)
        labels.append(made["labels"][:])
    assert labels[0] == labels[1]


def test_a_blank_text_is_dropped_and_counted(tokenizer):
    texts = [{"text": text} for text in ("one", "", " \n", "two")]
    rows, ledger = tokenize(texts, tokenizer, max_length=99)
    assert [tokenizer.decode(ids) for ids in rows["input_ids"]] == ["<s>one<eos>", "<s>two<eos>"]
    assert (ledger.rows_read, ledger.rows_fully_masked, ledger.tokens_dropped) == (4, 2, 2)


@pytest.mark.parametrize(
    ("rows", "template", "responses_only", "complaint"),
    [
        (TEXT, TEMPLATE, True, "plain text; give conversations"),
        (MESSAGES, COUNTING, True, r"row 0: .*does not mark answers; put \{% generation %\} around them"),
        (MESSAGES[1:] + MESSAGES[:1], STRICT, False, r"row 2: .*too many turns.*; correct or remove"),
        ([{"text": "a"}], TEMPLATE, False, "none of the 3 tokens in 1 rows .* max_seq_length 1.*; raise"),
    ],
)
def test_refuses(rows, template, responses_only, complaint, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=complaint):
        tokenize(
            rows,
            tokenizer,
            max_length=1 if "max_seq" in complaint else 60,
            train_on_responses_only=responses_only,
        )


def test_the_hash_of_a_tokenizer_is_of_what_makes_ids(tokenizer, tmp_path):
    first = tokenizer_hash(tokenizer)
    tokenizer(["a", "bc"], padding=True, truncation=True, max_length=8)  # leaves settings behind
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(tokenizer) == tokenizer_hash(AutoTokenizer.from_pretrained(tmp_path)) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: setattr(tokenizer, "chat_template", UNMARKED),
        lambda tokenizer: setattr(tokenizer, "eos_token", "<s>"),
        lambda tokenizer: setattr(
            tokenizer.backend_tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)
        ),
    ],
    ids=["the template", "the end", "the rules"],
)
def test_another_tokenizer_has_another_hash(change, tokenizer):
    first = tokenizer_hash(tokenizer)
    change(tokenizer)
    assert tokenizer_hash(tokenizer) != first
