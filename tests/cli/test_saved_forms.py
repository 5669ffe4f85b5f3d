"""What is saved is what `--save_method` names, and `generate` answers as its flags say."""

from transformers import GenerationMixin

from unsloth_pack.cli import main

ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}


def test_the_adapter_alone(train, tmp_path):
    assert train("--save_model", save_method="lora", max_steps=1) == 0
    command = ["merge", "--model_name", "out", "--save_path", "again", "--save_method", "lora"]
    assert main(command) == 0
    for folder in ("out/merged", "again"):
        names = {path.name for path in (tmp_path / folder).iterdir()}
        assert names >= ADAPTER
        assert "model.safetensors" not in names


def test_the_adapter_for_vllm(train, tmp_path, capsys):
    assert train(r=24, max_steps=1) == 0
    command = ["merge", "--model_name", "out", "--save_path", "served", "--save_method", "lora_vllm"]
    assert main(command) == 0
    assert "needs --max-lora-rank 32" in capsys.readouterr().out.splitlines()[-1]
    assert {path.name for path in (tmp_path / "served").iterdir()} >= ADAPTER


def test_how_an_answer_is_generated(model, monkeypatch):
    calls = []

    def generate(self, *_, input_ids, **options):
        calls.append(options)
        return input_ids

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    command = ["generate", "--model_name", model, "--prompt", "a", "--dtype", "float32"]
    assert main([*command, "--temperature", "0.5", "--max_new_tokens", "3"]) == 0
    assert main(command) == 0
    told = [(call["do_sample"], call.get("temperature"), call["max_new_tokens"]) for call in calls]
    assert told == [(True, 0.5, 3), (False, None, 128)]
