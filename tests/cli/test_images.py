"""`train` on rows with images, from the command line to a merged model."""

import json
import re
import shutil

import pytest
import torch
from image_runs import flags, prepared, refused, rows_of, train, write
from safetensors.torch import load_file
from tiny_vision import picture
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from unsloth_pack import FastVisionModel, VisionDataCollator
from unsloth_pack.cli import main
from unsloth_pack.report.metrics import read_losses


def test_packed_rows_are_what_the_collator_of_notebooks_makes(place, tmp_path):
    """And documents of a row come in one batch as they do unpacked."""
    made = prepared(place, tmp_path)
    rows = made.train.rows.rename_column("images", "packed_images")
    collate = made.images.collator()
    model, processor = FastVisionModel.from_pretrained(str(place / "model"), 256, "float32")
    notebook, of_plain = (
        VisionDataCollator(each, processor, image_folder=place / "seen") for each in (model, model.config)
    )
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
        assert torch.equal(batch["position_ids"], wanted["position_ids"])
        assert ("pixel_values" in batch) == ("pixel_values" in wanted) == bool(row["packed_images"])
        if not row["packed_images"]:
            continue
        assert torch.equal(batch["pixel_values"], wanted["pixel_values"])
        assert batch["image_grid_thw"] == wanted["image_grid_thw"]
        axes = of_plain([given[text] for text in order])["position_ids"][1:, 0]
        assert torch.equal(torch.from_numpy(batch["packed_row"].axes), axes)
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
    trained, processor = FastVisionModel.from_pretrained(str(out), 256, "float32")
    collate = VisionDataCollator(trained.config, processor, image_folder=place / "seen")
    row = collate(rows_of(place)[:3])
    del row["labels"], row["packed_seq_lengths"]
    adapted, _ = FastVisionModel.from_pretrained(str(out), 256, "float32")
    for folder in (out / "merged", tmp_path / "merged"):
        merged = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        merged.config.text_config.use_cache = False
        with torch.no_grad():
            error = (merged(**row).logits - adapted.eval()(**row).logits).norm() / merged(**row).logits.norm()
        assert error < 0.02
        assert AutoImageProcessor.from_pretrained(folder).patch_size == 16


def test_what_is_shrunk_cut_and_skipped_is_counted(place, tmp_path, capsys):
    rows = rows_of(place)
    shrunk = prepared(place, tmp_path, "--max_seq_length", 60, "--shrink_images").train
    whole = prepared(place, tmp_path).train.ledger
    assert max(map(max, shrunk.rows["seq_lengths"])) <= 60
    assert shrunk.ledger.rows_shrunk > 0
    assert shrunk.ledger.tokens_shrunk == whole.tokens_read - shrunk.ledger.tokens_read > 0
    assert shrunk.ledger.vision_tokens == whole.vision_tokens - shrunk.ledger.tokens_shrunk

    longest = max(
        len(row) for row in prepared(place, tmp_path, "--sample_packing=false").train.rows["labels"]
    )
    arguments = ("--max_seq_length", longest - 1, "--max_token_loss", "1")
    left = prepared(place, tmp_path, *arguments, "--sample_packing=false").train
    assert (left.ledger.rows_truncated, left.ledger.rows_left_out) == (1, 0)  # cut behind its images
    left = prepared(place, tmp_path, "--max_seq_length", 30, *arguments[2:], "--sample_packing=false").train
    assert 0 < left.ledger.rows_left_out < left.ledger.rows_truncated
    assert len(left.rows) == 10 - left.ledger.rows_fully_masked
    assert left.ledger.images == sum(len(row) for row in left.rows["images"]) < whole.images
    assert left.ledger.tokens_read == left.ledger.tokens_truncated + sum(map(len, left.rows["labels"]))
    said = refused(capsys, flags(place, tmp_path / "out", "--max_seq_length", 30))
    assert f"({left.ledger.rows_left_out} rows whole, for a cut goes through an image" in said

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
    whole = (folder / "1-0.png").read_bytes()
    (folder / "1-0.png").write_bytes(whole[:200] + whole[-12:])  # it ends as a whole one does
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
        (["--vit_lr=1e-4"], "vit_lr is 0.0001, and no weight that it is for trains; correct it"),
        (["--freeze_llm", "--freeze_aligner"], "leaves nothing to train"),
        (["--image_folder=no/such"], "image_folder is 'no/such', which is no folder"),
        (["--max_pixels=100"], "max_pixels is 100, and one token is 1024 pixels"),
        (["--max_pixels=4096", "--min_pixels=8192"], "min_pixels is 8192 and max_pixels is 4096"),
        (["--model_name=demo"], "image_folder is .*, and demo takes no images; leave out --image_folder"),
    ],
)
def test_what_is_refused(place, tmp_path, capsys, more, says):

    arguments = [each.format(place=place) for each in more]
    assert re.search(says, refused(capsys, flags(place, tmp_path / "out", *arguments)))
    assert not (tmp_path / "out").exists()
