"""Config files that are refused, and all that is said of them: each line after `run.yaml:`."""

CASES = [
    (
        "warmup_steps: 5\nwarmup_ratio: 0.1\nlearning_rat: 3\nload_in_4bit: true\nload_in_8bit: true",
        "2: warmup_ratio is 0.1 and warmup_steps is 5; give one of them\n"
        "3: learning_rat is unknown; did you mean learning_rate?\n"
        "4: load_in_4bit and load_in_8bit are set together; choose one",
    ),
    (  # nobody knows whether they lack another option, or that is the misspelt one
        "sample_packng: true\neval_packing: true\nsave_path: x\nsave_modl: true",
        "1: sample_packng is unknown; did you mean sample_packing?\n"
        "4: save_modl is unknown; did you mean save_model?",
    ),
    ("learning_rat: 1e-4", "1: learning_rat is unknown; did you mean learning_rate?"),
    ("lerning_rate: 1e-4", "1: lerning_rate is unknown; did you mean learning_rate?"),
    ("learning-rate: 1e-4", "1: learning-rate is unknown; did you mean learning_rate?"),
    ("Learning_Rate: 1e-4", "1: Learning_Rate is unknown; did you mean learning_rate?"),
    ("lora_alhpa: 4", "1: lora_alhpa is unknown; did you mean lora_alpha?"),
    ("sede: 1", "1: sede is unknown; did you mean seed?"),
    ("dtpye: float16", "1: dtpye is unknown; did you mean dtype?"),
    ("max_seq_lenght: 64", "1: max_seq_lenght is unknown; did you mean max_seq_length?"),
    ("out_dir: out", "1: out_dir is unknown; did you mean output_dir?"),
    ("max_sequence_length: 64", "1: max_sequence_length is unknown; did you mean max_seq_length?"),
    ("trainig: {seed: 1}", "1: trainig is unknown; did you mean training?"),
    ("base_confg: a.yaml", "1: base_confg is unknown; did you mean base_config?"),
    ("type: lora", "1: type is unknown; see `unsloth-pack --help`"),
    ("use_lora: true", "1: use_lora is unknown; give tuning: lora, or tuning: full"),
    ("max_tokens: 64", "1: max_tokens is unknown; see `unsloth-pack --help`"),
    ("speed: 1", "1: speed is unknown; see `unsloth-pack --help`"),
    ("train: rows.json", "1: train is unknown; see `unsloth-pack --help`"),
    ("weight: 1", "1: weight is unknown; see `unsloth-pack --help`"),
    ("padding: true", "1: padding is unknown; packed rows need no padding; leave it out"),
    ("sample: 8", "1: sample is unknown; see `unsloth-pack --help`"),
    ("frobnicate: 1", "1: frobnicate is unknown; see `unsloth-pack --help`"),
    ("mode: fast", "1: mode is unknown; see `unsloth-pack --help`"),
    ("load_in_2bit: true", "1: load_in_2bit is unknown; see `unsloth-pack --help`"),
    ("'': 1", "1: '' is unknown; see `unsloth-pack --help`"),
    ("4: r", "1: 4 is unknown; see `unsloth-pack --help`"),
    ("true: 1", "1: true is unknown; see `unsloth-pack --help`"),
    ("? [a]\n: 1", "1: a list or a mapping stands where a name should; write `name: value`"),
    ("r: 0", "1: r is 0; give a whole number of at least 1"),
    ("r: x", "1: r is 'x'; give a whole number of at least 1"),
    ("r: 1.5", "1: r is 1.5; give a whole number of at least 1"),
    ("r: true", "1: r is true; give a whole number of at least 1"),
    ("r: [4]", "1: r is a list; give a whole number of at least 1"),
    ("r: {a: 1}", "1: r is a mapping; give a whole number of at least 1"),
    ("learning_rate: -1", "1: learning_rate is -1; give a number above 0 and below 1e+09"),
    ("learning_rate: .nan", "1: learning_rate is nan; give a number above 0 and below 1e+09"),
    ("learning_rate: 1e10", "1: learning_rate is 10000000000.0; give a number above 0 and below 1e+09"),
    ("lora_dropout: 1", "1: lora_dropout is 1; give a number of at least 0 and below 1"),
    ("sample_packing: yes", "1: sample_packing is 'yes'; give true or false"),
    ("sample_packing: 1", "1: sample_packing is 1; give true or false"),
    ("bias: some", "1: bias is 'some'; give one of none, all, lora_only"),
    ("bias: true", "1: bias is true; give one of none, all, lora_only"),
    ("dtype: 16", "1: dtype is 16; give one of bfloat16, float16, float32"),
    ("objective: dpo", "1: objective is 'dpo'; give sft"),
    ("model_name: true", "1: model_name is true; give text in quotes"),
    ("model_name: [a]", "1: model_name is a list; give text in quotes"),
    ("dataset: {weight: 2}", "1: dataset is a mapping; give item 1 a path"),
    ("seed: 2026-01-01", "1: seed is '2026-01-01'; give a whole number of at least 0"),
    (
        "use_gradient_checkpointing: often",
        "1: use_gradient_checkpointing is 'often'; give one of true, false, offload, unsloth, auto",
    ),
    (
        "loftq_config: [4]",
        "1: loftq_config is a list; give a JSON object of single values, such as '{\"loftq_bits\": 4}'",
    ),
    (
        "loftq_config: {a: [1]}",
        "1: loftq_config is a mapping; give a JSON object of single values, such as '{\"loftq_bits\": 4}'",
    ),
    (
        "loftq_config: 4",
        "1: loftq_config is 4; give a JSON object of single values, such as '{\"loftq_bits\": 4}'",
    ),
    ("max_steps: 9999999999", "1: max_steps is 9999999999; give a whole number of at most 2147483647"),
    ("report_to: {a: b}", "1: report_to is a mapping; give the name of one tracker, or none, or all"),
    (
        "push_to_hub: true",
        "1: push_to_hub is true; give the name of a repository, OWNER/NAME, or leave it out",
    ),
    ("report_to: true", "1: report_to is true; give the name of one tracker, or none, or all"),
    ("fsdp: true", "1: fsdp is true; give full, keep, or the name of a file of fsdp_config"),
    (
        "deepspeed: {stage: 2}",
        "1: deepspeed is a mapping; give zero2, zero3, or the name of a file of DeepSpeed's settings",
    ),
    ("optim: true", "1: optim is true; give the name of an optimizer, such as adamw_torch"),
    ("init_adapter: true", "1: init_adapter is true; give the folder of an adapter"),
    (
        "val_set_size: 500",
        (
            "1: val_set_size is unknown; give eval_fraction, a share of the documents; of a number of them, "
            "that number divided by all"
        ),
    ),
    (
        "eval_fraction: 500",
        "1: eval_fraction is 500; give a number above 0 and below 1",
    ),
    (
        "stopping_strategy: all_exhausted",
        (
            "1: stopping_strategy is unknown; give mixture: interleave_under for first_exhausted, "
            "interleave_over for all_exhausted"
        ),
    ),
    (
        "loraplus_lr_embedding: 1e-6",
        (
            "1: loraplus_lr_embedding is unknown; it is of LoRA's second matrix on the embeddings; give "
            "learning_rates: {lora_embedding_B: RATE}"
        ),
    ),
    (
        "freeze_parameters: [model.layers.1]",
        (
            "1: freeze_parameters is unknown; give freeze_modules, regular expressions that stand for whole "
            "parts of names, so that a prefix model.layers.1 is that layer, and not the tenth"
        ),
    ),
    (
        "trainable_parameters: [lm_head]",
        (
            "1: trainable_parameters is unknown; give train_modules, regular expressions that stand for "
            "whole parts of names; with tuning: full nothing else trains"
        ),
    ),
    ("save_method: gguf", "1: save_method is 'gguf'; give one of merged_16bit, lora"),
    ("model:\n  learning_rate: 1e-4", "2: learning_rate belongs in training, not in model; move it there"),
    ("adapter:\n  packing: true", "2: packing belongs in data, not in adapter; move it there"),
    (
        "training:\n  r: 4\n  seed: x",
        (
            "2: r belongs in adapter, not in training; move it there\n"
            "3: seed is 'x'; give a whole number of at least 0"
        ),
    ),
    ("data: rows.json", "1: data is a section of options, not a value; write its options below it"),
    ("model: Qwen/Qwen2.5-0.5B", "1: model is a section of options, not a value; did you mean model_name?"),
    (
        "adapter: lora",
        "1: adapter is a section of options, not a value; give tuning: lora, or tuning: full",
    ),
    ("output: out", "1: output is a section of options, not a value; did you mean output_dir?"),
    ("training: [1]", "1: training is a section of options, not a value; write its options below it"),
    ("data:\n  data:\n    dataset: a", "2: data.data is unknown; see `unsloth-pack --help`"),
    ("model:\n  base_config: a.yaml", "2: base_config stands in model; move it to the top"),
    ("training.seed: 4", "1: training.seed is unknown; write `training: {seed: ...}`"),
    (
        "loftq_config.loftq_bits: 4",
        "1: loftq_config.loftq_bits is unknown; write `loftq_config: {loftq_bits: ...}`",
    ),
    ("model:\n  model_nam: a", "2: model.model_nam is unknown; did you mean model_name?"),
    ("r: 4\nr: 8", "2: r is there twice, first in line 1; keep one of them"),
    ("r: 4\nadapter:\n  r: 8", "3: r is there twice, first in line 1; keep one of them"),
    (
        "packing: true\nsample_packing: true",
        "2: sample_packing is there twice, first in line 1; keep one of them",
    ),
    (
        "adapter:\n  r: 4\n  seed: 1\n  r: 8",
        (
            "3: seed belongs in training, not in adapter; move it there\n"
            "4: r is there twice, first in line 2; keep one of them"
        ),
    ),
    ("adapter: {r: 4}\nadapter: {bias: all}", "2: adapter is there twice, first in line 1; keep one of them"),
    ("loftq_config:\n  a: 1\n  a: 2", "3: a is there twice, first in line 2; keep one of them"),
    (
        "lrr: 1\nlrr: 2",
        (
            "2: lrr is there twice, first in line 1; keep one of them\n"
            "2: lrr is unknown; see `unsloth-pack --help`"
        ),
    ),
    ("config: other.yaml", "1: config cannot be set in a file; name the other file in base_config"),
    ("debug: true", "1: debug cannot be set in a file; give it on the command line"),
    ("help: true", "1: help cannot be set in a file; give it on the command line"),
    (
        "base_config: run.yaml",
        "1: base_config is 'run.yaml', which builds on this file; remove it from one of them",
    ),
    (
        "base_config: gone.yaml",
        (
            "1: base_config is 'gone.yaml': No such file or directory; check the path, which begins "
            "at this file's folder"
        ),
    ),
    ("base_config: 4", "1: base_config is 4; give the name of a file, or a list of names"),
    ("base_config: [gone.yaml, 4]", "1: base_config is a list; give the name of a file, or a list of names"),
    (
        "base_config: [gone.yaml, lost.yaml]",
        (
            "1: base_config is 'gone.yaml': No such file or directory; check the path, which begins "
            "at this file's folder\n"
            "1: base_config is 'lost.yaml': No such file or directory; check the path, which begins "
            "at this file's folder"
        ),
    ),
    (
        "base_config: .",
        "1: base_config is '.': no ordinary file; check the path, which begins at this file's folder",
    ),
    ("base_config: ''", "1: base_config is ''; give the name of a file, or a list of names"),
    (
        'base_config: "a\\0b"',
        (
            "1: base_config is 'a\\x00b': no name of a file; check the path, which begins at this "
            "file's folder"
        ),
    ),
    ("r: [", "1: not yaml (expected the node content, but found '<stream end>'); correct it"),
    ("r: 4\n  seed: 1", "2: not yaml (mapping values are not allowed here); correct it"),
    ("r: 'a", "1: not yaml (found unexpected end of stream); correct it"),
    ("r:\t4\n\tseed: 1", "1: not yaml (found character '\\t' that cannot start any token); correct it"),
    ("a: b: c", "1: not yaml (mapping values are not allowed here); correct it"),
    ("r: *no", "1: not yaml: an alias without an anchor, or an anchor twice; remove it"),
    ("r: 4\n---\nr: 8", "2: not yaml: a second document begins; remove it"),
    ("- r", "1: holds no `name: value` lines; write one an option"),
    ("text", "1: holds no `name: value` lines; write one an option"),
    ("4", "1: holds no `name: value` lines; write one an option"),
    ("", "1: holds no `name: value` lines; write one an option"),
    ("# nothing\n", "1: holds no `name: value` lines; write one an option"),
    ("null", "1: holds no `name: value` lines; write one an option"),
    ("r: !!python/object/apply:os.system ['true']", "1: not plain yaml: a value has a tag; write it without"),
    ("r: !frob 4", "1: not plain yaml: a value has a tag; write it without"),
    ("r: &a [*a]", "1: not yaml (its aliases hold themselves or too much); correct it"),
    ("r: &a {b: *a}", "1: not yaml (its aliases hold themselves or too much); correct it"),
    ("<<: 4", "1: not yaml: `<<` merges mappings, and a name is text; correct it"),
    ("r: \x00", "1: not yaml: a character that no text holds; remove it"),
    ("r: 4\nseed: !!int x", "2: not yaml; correct it"),
    (
        "hub_token: hf_averysecrettoken",
        "1: hub_token is unknown; no token is read from here; set HF_TOKEN in the environment",
    ),
    ("hf_averysecrettoken: 1", "1: what looks like a secret is unknown; see `unsloth-pack --help`"),
    ("seed: hf_averysecrettoken", "1: seed is what looks like a secret; give a whole number of at least 0"),
    ("hf_averysecrettoken", "1: holds no `name: value` lines; write one an option"),
    ("r: *hf_averysecrettoken", "1: not yaml: an alias without an anchor, or an anchor twice; remove it"),
    ("r: 'hf_averysecrettoken", "1: not yaml (found unexpected end of stream); correct it"),
    (
        "wandb_api_key: 0123456789abcdef0123456789abcdef01234567",
        "1: wandb_api_key is unknown; see `unsloth-pack --help`",
    ),
    ("r: !hf_averysecrettoken 4", "1: not plain yaml: a value has a tag; write it without"),
    (
        "report_to: [hf_averysecrettoken]",
        "1: report_to is a list; give the name of one tracker, or none, or all",
    ),
    ('"hf_averysecrettoken \\e[31m": 1', "1: what looks like a secret is unknown; see `unsloth-pack --help`"),
    ('"\\e[31m": 1', "1: '\\x1b[31m' is unknown; see `unsloth-pack --help`"),
    ('r: "\\e[31m"', "1: r is '\\x1b[31m'; give a whole number of at least 1"),
    ("a b: 1", "1: 'a b' is unknown; see `unsloth-pack --help`"),
    ("r: 'a\n\n  b'", "1: r is 'a\\nb'; give a whole number of at least 1"),
]
