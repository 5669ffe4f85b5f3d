"""`train` on rows with images, from the command line to a merged model."""

import json
import re
import shutil

import datasets
import pyarrow as pa
import pytest
import torch
from packs_on_disk import edit_manifest, rewrite
from safetensors.torch import load_file
from tiny_vision import encoded, picture, save_vision_model
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from unsloth_pack import FastVisionModel, VisionDataCollator
from unsloth_pack.cli import main
from unsloth_pack.recipe.command_line import read_options
from unsloth_pack.recipe.prepare import prepare
from unsloth_pack.report.metrics import read_losses

PARTS = {"visual.blocks": "tower", "visual.merger": "aligner", "visual.deepstack": "aligner"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, rows with none to three images, and the images."""
    place = tmp_path_factory.mktemp("images")
    save_vision_model(place / "model", "qwen3_vl")
    (place / "seen").mkdir()
    rows = []
    for i in range(10):
        names = [f"{i}-{n}.{'jpg' if n else 'png'}" for n in range(i % 4)]
        for n, name in enumerate(names):
            picture(40 + 8 * i, 60 + 20 * n, i).save(place / "seen" / name)
        asked = {"role": "user", "content": "<image>" * len(names) + f"What is it? {i}"}
        rows.append({"messages": [asked, {"role": "assistant", "content": f"It is {i}."}], "images": names})
    write(place / "rows.jsonl", rows)
    write(place / "text.jsonl", [{"prompt": f"How are you, {i}?", "completion": "Well."} for i in range(4)])
    return place


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(place):
    return [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]


def flags(place, out, *more):
    found = ["--model_name", place / "model", "--dataset", place / "rows.jsonl", "--output_dir", out]
    found += ["--image_folder", place / "seen", "--max_seq_length", 256, "--dtype", "float32", "--r", 4]
    found += ["--max_steps", 3, "--gradient_accumulation_steps", 1, "--learning_rate", 0.01]
    return [str(each) for each in [*found, "--sample_packing", *more]]


def train(place, out, *more):
    assert main(flags(place, out, *more)) == 0
    return load_file(out / "adapter_model.safetensors")


def refused(capsys, arguments):
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Traceback" not in said
    return said


def prepared(place, tmp_path, *more):
    return prepare(read_options(flags(place, tmp_path / "out", *more)))


def test_packed_rows_are_what_the_collator_of_notebooks_makes(place, tmp_path):
    """And documents of a row come in one batch as they do unpacked."""
    made = prepared(place, tmp_path)
    rows = made.train.rows.rename_column("images", "packed_images")
    collate = made.images.collator()
    model, processor = FastVisionModel.from_pretrained(str(place / "model"), 256, "float32")
    notebook = VisionDataCollator(model, processor, image_folder=place / "seen")
    given = {str(row["messages"][0]["content"]): row for row in rows_of(place)}
    seen = 0
    for row in rows:
        batch = collate.on_device(collate([row]))
        texts = [
            text for text in given if f"{text[-1]}<|im_end|>" in processor.tokenizer.decode(row["input_ids"])
        ]
        order = sorted(texts, key=lambda t: processor.tokenizer.decode(row["input_ids"]).index(f"? {t[-1]}<"))
        wanted = notebook([given[text] for text in order])
        seen += len(order)
        assert row["seq_lengths"] == wanted["packed_seq_lengths"] == list(batch["packed_row"].lengths)
        for name in ("input_ids", "labels"):
            assert torch.equal(batch[name], wanted[name]), name
        assert torch.equal(batch["position_ids"], wanted["position_ids"][0])
        assert ("pixel_values" in batch) == ("pixel_values" in wanted) == bool(row["packed_images"])
        if not row["packed_images"]:
            continue
        assert torch.equal(batch["pixel_values"], wanted["pixel_values"])
        assert batch["image_grid_thw"] == wanted["image_grid_thw"].tolist()
        assert torch.equal(torch.from_numpy(batch["packed_row"].axes), wanted["position_ids"][1:, 0])
    assert seen == 10
    assert made.train.ledger.images == sum(i % 4 for i in range(10))


def test_a_resumed_run_ends_with_the_weights_of_one_that_never_stopped(place, tmp_path):
    """Through a checkpoint, workers, an evaluation and a merged model that answers."""
    whole = train(place, tmp_path / "whole", "--save_steps", 2, "--eval_dataset", place / "rows.jsonl")
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    out = tmp_path / "out"
    (out / "adapter_model.safetensors").unlink()
    (out / "adapter_config.json").unlink()
    shutil.rmtree(out / "checkpoint-3", ignore_errors=True)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("step", 0) <= 2 and '"summary"' not in line]
    (out / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    resumed = ["--resume", "--output_dir", out, "--dataloader_num_workers", 2, "--save_model"]
    assert main([str(each) for each in resumed]) == 0
    again = load_file(out / "adapter_model.safetensors")
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert read_losses(out) == read_losses(tmp_path / "whole")
    assert len(read_losses(out)) == 3

    assert (
        AutoImageProcessor.from_pretrained(out).size
        == AutoImageProcessor.from_pretrained(out / "merged").size
    )
    assert main(["merge", "--model_name", str(out), "--save_path", str(tmp_path / "merged")]) == 0
    row = VisionDataCollator(
        *FastVisionModel.from_pretrained(str(out), 256, "float32"), image_folder=place / "seen"
    )(rows_of(place)[:3])
    del row["labels"], row["packed_seq_lengths"]
    adapted, _ = FastVisionModel.from_pretrained(str(out), 256, "float32")
    for folder in (out / "merged", tmp_path / "merged"):
        merged = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        merged.config.text_config.use_cache = False
        with torch.no_grad():
            error = (merged(**row).logits - adapted.eval()(**row).logits).norm() / merged(**row).logits.norm()
        assert error < 0.02
        assert AutoImageProcessor.from_pretrained(folder).patch_size == 16


def parts_trained(weights):
    """The parts that an adapter has weights for, and whether by LoRA."""
    found = set()
    for name in weights:
        part = next((part for key, part in PARTS.items() if key in name), "decoder")
        found.add(f"{part}, {'lora' if '.lora_' in name else 'whole'}")
    return found


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--freeze_llm"], {"aligner, whole"}),
        (["--freeze_vit", "false", "--freeze_aligner"], {"tower, lora", "decoder, lora"}),
        (
            ["--freeze_vit=false", "--target_modules=q_proj"],
            {"tower, lora", "decoder, lora", "aligner, whole"},
        ),
        (["--freeze_vit=false", "--freeze_llm", "--target_modules=null"], {"tower, lora", "aligner, whole"}),
    ],
)
def test_parts_train_by_name(place, tmp_path, more, parts):
    trained = train(place, tmp_path / "out", "--max_steps", 1, *more)
    assert parts_trained(trained) == parts
    language = {
        name.split(".layers.0.")[1].split(".lora")[0] for name in trained if "language_model.layers.0" in name
    }
    assert language == {"self_attn.q_proj"} or "--target_modules=q_proj" not in more


def test_the_aligner_alone_and_then_the_language_model(place, tmp_path):
    """Two stages: the second trains on top of the first's aligner."""
    first = train(place, tmp_path / "first", "--freeze_llm")
    more = ["--init_adapter", tmp_path / "first", "--merge_init_adapter", "--freeze_aligner"]
    arguments = flags(place, tmp_path / "second", *more)
    assert main([each for each in arguments if each != str(place / "model") and each != "--model_name"]) == 0
    base = load_file(tmp_path / "second" / "base" / "model.safetensors")
    name = "visual.merger.linear_fc1.weight"
    key = next(key for key in first if key.endswith(name))
    assert torch.equal(base[f"model.{name}"], first[key])
    assert parts_trained(load_file(tmp_path / "second" / "adapter_model.safetensors")) == {"decoder, lora"}
    assert (tmp_path / "second" / "base" / "processor_config.json").is_file()


def test_a_row_without_images_moves_nothing_of_what_sees_them(place, tmp_path):
    """Where nothing else trains, and where processes wait for each other: it has a gradient, of 0."""
    made = prepared(place, tmp_path, "--freeze_llm")
    model, _ = FastVisionModel.from_pretrained(str(place / "model"), 256, "float32")
    model = FastVisionModel.get_peft_model(model, r=4, finetune_vision_layers=True)
    rows = made.train.rows.rename_column("images", "packed_images")
    (row,) = [row for row in rows if not row["packed_images"]]
    collate = made.images.collator()
    blind, seeing = (each.on_device(each([row])) for each in (collate.of_evaluation(), collate))
    plain = model(**blind).loss
    loss = model(**seeing).loss
    assert abs((loss - plain).item()) < 1e-5 * plain.item()
    loss.backward()
    of_sight = {name: p.grad for name, p in model.named_parameters() if "visual" in name and p.requires_grad}
    assert len(of_sight) > 20
    assert all(gradient is not None and not gradient.any() for gradient in of_sight.values())


def test_parts_learn_at_rates_of_their_own(place, tmp_path):
    """At a rate of almost 0 a part stays as it was, and the others do not."""
    model, _ = FastVisionModel.from_pretrained(str(place / "model"), 256, "float32")
    before = dict(model.named_parameters())
    rates = ["--freeze_vit=false", "--aligner_lr=1e-30", "--vit_lr=0.1", "--warmup_steps=0"]
    trained = train(place, tmp_path / "out", *rates)
    for name, weight in trained.items():
        base = name.removeprefix("base_model.model.")
        if "visual.merger" in name or "deepstack" in name:
            assert torch.equal(weight, before[base])
    moved = {
        part: max(float(w.abs().max()) for name, w in trained.items() if key in name and "lora_B" in name)
        for part, key in {"tower": "visual.blocks", "decoder": "language_model"}.items()
    }
    assert moved["tower"] > 5 * moved["decoder"] > 0


def test_full_tuning_leaves_the_tower_as_it_was(place, tmp_path):
    before, _ = FastVisionModel.from_pretrained(str(place / "model"), 256, "float32")
    arguments = [each for each in flags(place, tmp_path / "out", "--tuning=full") if each not in ("--r", "4")]
    assert main(arguments) == 0
    after = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in before.named_parameters():
        is_tower = "visual" in name and "merger" not in name
        assert torch.equal(after[name], weight) == is_tower, name
    assert (tmp_path / "out" / "processor_config.json").is_file()


def test_bytes_texts_and_workers(place, tmp_path):
    """A parquet file of encoded images beside rows of text, evaluated on a part that is held out."""
    turns = [{"role": "user", "content": "<image>Who is it?"}, {"role": "assistant", "content": "Nobody."}]
    images = [{"bytes": encoded(picture(50 + 9 * i, 40, i)), "path": None} for i in range(6)]
    rows = datasets.Dataset.from_dict({"messages": [turns] * 6, "image": images})
    rows.cast_column("image", datasets.Image()).to_parquet(tmp_path / "seen.parquet")
    named = f"{tmp_path / 'seen.parquet'},{place / 'text.jsonl'}"
    more = [
        "--dataset",
        named,
        "--eval_fraction",
        0.3,
        "--eval_packing",
        "false",
        "--dataloader_num_workers",
        1,
    ]
    train(place, tmp_path / "out", *more)
    lines = list(map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()))
    (ledger,) = [line["ledger"] for line in lines if line["kind"] == "data" and line["use"] == "train"]
    assert (ledger["rows_read"], ledger["images"]) == (10, 6)


def test_a_large_data_set_is_prepared_by_several_processes(place, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    many = write(tmp_path / "many.jsonl", rows_of(place) * 110)
    found = [
        prepared(place, tmp_path / n, "--dataset", many, "--num_proc", n, "--num_train_epochs", 1)
        for n in "12"
    ]
    few = prepared(place, tmp_path / "few")
    one, two = (each.train for each in found)
    assert one.fingerprint == two.fingerprint != few.train.fingerprint
    assert one.ledger == two.ledger
    assert one.ledger.images == 110 * few.train.ledger.images
    assert one.rows[:] == two.rows[:]


def test_what_is_shrunk_cut_and_skipped_is_counted(place, tmp_path, capsys):
    rows = rows_of(place)
    shrunk = prepared(place, tmp_path, "--max_seq_length", 60, "--shrink_images").train
    whole = prepared(place, tmp_path).train.ledger
    assert max(map(max, shrunk.rows["seq_lengths"])) <= 60
    assert shrunk.ledger.rows_shrunk > 0
    assert shrunk.ledger.tokens_shrunk == whole.tokens_read - shrunk.ledger.tokens_read > 0
    assert shrunk.ledger.vision_tokens == whole.vision_tokens - shrunk.ledger.tokens_shrunk
    arguments = flags(place, tmp_path / "out", "--max_seq_length", 30)
    assert "cut before the end of an image" in refused(capsys, arguments)

    rows[1]["images"] = ["gone.png"]
    data = write(tmp_path / "broken.jsonl", rows)
    arguments = flags(place, tmp_path / "out", "--dataset", data)
    assert "row 1, column 'images'" in refused(capsys, arguments)
    left = prepared(place, tmp_path, "--dataset", data, "--skip_broken_images").train.ledger
    assert (left.rows_broken, left.rows_read, left.images) == (1, 10, whole.images - 1)


def test_an_image_that_breaks_after_its_header(place, tmp_path, capsys):
    """It ends the run in one line, or its document counts no more."""
    folder = tmp_path / "seen"
    shutil.copytree(place / "seen", folder)
    (folder / "1-0.png").write_bytes((folder / "1-0.png").read_bytes()[:200])
    more = ["--image_folder", folder]
    said = refused(capsys, flags(place, tmp_path / "out", *more))
    assert "1-0.png" in said
    assert "cannot be read" in said
    made = prepared(place, tmp_path / "other", *more, "--skip_broken_images")
    rows = made.train.rows.rename_column("images", "packed_images")
    collate = made.images.collator()
    n_broken = 0
    for row in rows:
        batch = collate([row])
        n_broken += batch.get("broken_images", 0)
        if "broken_images" in batch:
            kept = (batch["labels"] != -100).sum()
            image = next(i for i in row["packed_images"] if i["path"] == "1-0.png")
            start = sum(row["seq_lengths"][: image["document"]])
            end = start + row["seq_lengths"][image["document"]]
            assert (batch["labels"][0, start:end] == -100).all()
            assert kept > 0
    assert n_broken == 1
    train(place, tmp_path / "out", *more, "--skip_broken_images", "--overwrite_output_dir")


def test_images_that_change_are_refused(place, tmp_path, capsys):
    folder = tmp_path / "seen"
    shutil.copytree(place / "seen", folder)
    made = prepared(place, tmp_path, "--image_folder", folder)
    picture(48, 60, 5).save(folder / "1-0.png")
    rows, collate = made.train.rows.rename_column("images", "packed_images"), made.images.collator()
    (row,) = [row for row in rows if any(image["path"] == "1-0.png" for image in row["packed_images"])]
    with pytest.raises(ValueError, match=r"changed since it was prepared, got .*1-0\.png"):
        collate([row])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--vit_lr=1e-4"], "vit_lr is 0.0001 and freeze_vit is true.*give --freeze_vit false"),
        (["--aligner_lr=1e-4", "--freeze_aligner"], "aligner_lr is 0.0001 and freeze_aligner is true"),
        (["--freeze_llm", "--freeze_aligner"], "leaves nothing to train"),
        (["--freeze_llm", "--target_modules=q_proj"], "freeze_llm is true and target_modules is"),
        (["--image_folder=no/such"], "image_folder is 'no/such', which is no folder"),
        (["--max_pixels=100"], "max_pixels is 100, and one token is 1024 pixels; raise it"),
        (["--max_pixels=4096", "--min_pixels=8192"], "min_pixels is 8192 and max_pixels is 4096"),
        (["--dataset={place}/text.jsonl"], "image_folder is .*, and the data has no images; leave out"),
        (["--model_name=demo"], "image_folder is .*, and demo takes no images; leave out --image_folder"),
        (["--streaming"], "image_folder is .*, and streaming is set, and rows that stream have no images"),
    ],
)
def test_what_is_refused(place, tmp_path, capsys, more, says):

    arguments = [each.format(place=place) for each in more]
    assert re.search(says, refused(capsys, flags(place, tmp_path / "out", *arguments)))
    assert not (tmp_path / "out").exists()


def pack(place, out, *more, code=0):
    arguments = ["pack", "--model_name", place / "model", "--dataset", place / "rows.jsonl", "--out", out]
    arguments += ["--image_folder", place / "seen", "--max_seq_length", 256, *more]
    assert main([str(each) for each in arguments]) == code


def on_packs(place, packs, out, *more):
    arguments = flags(place, out, "--dataset", packs, *more)
    at = arguments.index("--image_folder")
    return arguments[:at] + arguments[at + 2 :]


@pytest.mark.parametrize("are_paths", [False, True])
def test_packs_train_as_the_rows_that_they_were_made_of(place, tmp_path, are_paths):
    wanted = train(place, tmp_path / "wanted", "--max_pixels", 8192)
    paths = ["--image_paths", "--rows_per_shard", 2] if are_paths else []
    pack(place, tmp_path / "packs", "--max_pixels", 8192, *paths)
    manifest = json.loads((tmp_path / "packs" / "packs.json").read_text())
    assert manifest["images"]["are_paths"] == are_paths
    assert (manifest["images"]["images"], manifest["images"]["most_pixels"]) == (13, 8192)
    folder = ["--image_folder", place / "seen"] if are_paths else []
    arguments = on_packs(place, tmp_path / "packs", tmp_path / "out", *folder)
    assert main(arguments) == 0
    trained = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(torch.equal(trained[name], wanted[name]) for name in wanted)


def without(name):
    return lambda rows: [row.pop(name) for row in rows]


def at(path, value):
    """Sets a field of the first image of the first row that has one."""

    def change(rows):
        images = next(row["images"] for row in rows if row["images"])
        images[0][path] = value

    return change


def swapped(rows):
    images = next(row["images"] for row in rows if len({image["document"] for image in row["images"]}) > 1)
    images.reverse()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda rows: [row.update(images=[]) for row in rows],
            "image tokens, and its images make 0;",
        ),
        (at("tokens", 1), "image tokens, and its images make"),
        (at("height", None), "an image without its size, content or document"),
        (at("bytes", None), "an image without its size, content or document"),
        (at("document", 99), "an image without its size, content or document"),
        (swapped, "an image without its size, content or document"),
        (lambda rows: [row.update(cu_lengths=[0, len(row["input_ids"])]) for row in rows], "max_length is"),
    ],
)
def test_packs_that_have_lost_something_are_refused(place, tmp_path, capsys, change, says):
    pack(place, tmp_path / "packs")
    rewrite(tmp_path / "packs", change)
    assert re.search(says, refused(capsys, on_packs(place, tmp_path / "packs", tmp_path / "out")))


def test_packs_without_their_column_or_for_another_processor_are_refused(place, tmp_path, capsys):
    packs = tmp_path / "packs"
    pack(place, packs)
    arguments = on_packs(place, packs, tmp_path / "out")
    assert "max_pixels is 4096, and the images of" in refused(capsys, [*arguments, "--max_pixels=4096"])
    manifest = json.loads((packs / "packs.json").read_text())
    edit_manifest(packs, images=manifest["images"] | {"processor": "0" * 64})
    assert "packed for another image processor" in refused(capsys, arguments)
    with pa.ipc.open_stream(packs / "shard-00000.arrow") as stream:
        schema = stream.schema
    rewrite(packs, without("images"), schema.remove(schema.get_field_index("images")))
    manifest["images"] = None
    edit_manifest(packs, images=None)
    assert "stands for an image, and has no images; pack the data anew" in refused(capsys, arguments)
