"""`export`: the exported model answers as the trained one, or a line says where it does not.

llama.cpp is an extra. Here a converter and a reader of the same interface stand in for it, with its habits:
no space before a text, no name for the demo's tokenizer. `tests/outside/test_exports.py` runs llama.cpp.
"""

import json
import re
import shutil
import sys
import zipfile
from collections import namedtuple
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from unsloth_pack import FastLanguageModel
from unsloth_pack.checkpoints.gguf import llama_template, modelfile
from unsloth_pack.cli import main
from unsloth_pack.demo import MODEL_DIR, TRAIN_FILE, messages, user_text
from unsloth_pack.errors import InputError

CONVERTER = """
import pathlib, sys, zipfile
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("unknown pre-tokenizer")
def main():
    folder, file = sys.argv[1], sys.argv[2].removeprefix("--outfile=")
    assert TextModel().get_vocab_base_pre(None) == "gpt-2"
    with zipfile.ZipFile(file, "w") as archive:
        for path in pathlib.Path(folder).iterdir():
            archive.write(path, path.name)
"""


class Llama:
    """What `LlamaFile` calls of llama-cpp-python, on a zip file of a merged model."""

    change = staticmethod(lambda model, tokenizer: None)  # that the conversion makes

    def __init__(self, file, *, n_ctx, **options):
        folder = f"{file}.unzipped"
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder)
        self.model, self.tokenizer = (
            AutoModelForCausalLM.from_pretrained(folder),
            AutoTokenizer.from_pretrained(folder),
        )
        shutil.rmtree(folder)
        self.tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        assert "generation" not in self.tokenizer.chat_template.replace("add_generation_prompt", "")
        self.change(self.model, self.tokenizer)

    def tokenize(self, text, add_bos, special):
        return self.tokenizer(text.decode(), add_special_tokens=add_bos).input_ids

    @torch.no_grad()
    def eval(self, ids):
        self.scores = self.model(torch.tensor([ids])).logits[0].float().numpy()

    def reset(self):
        pass

    close = reset


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with an adapter on the demo that changes its answers, and prompts."""
    folder = tmp_path_factory.mktemp("trained")
    model, tokenizer = FastLanguageModel.from_pretrained("demo", dtype=torch.float32)
    model = FastLanguageModel.get_peft_model(model, r=4)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder / "run")
    tokenizer.save_pretrained(folder / "run")
    rows = [json.loads(line) for line in TRAIN_FILE.read_text().splitlines()[:2]]
    (folder / "prompts.txt").write_text("\n".join(user_text(row).replace("\n", " ") for row in rows))
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    return folder


@pytest.fixture
def export(trained, tmp_path, monkeypatch, capsys):
    """Export it; returns the exit code and what was said, or the line of the error."""
    monkeypatch.chdir(trained)
    llama = ModuleType("llama_cpp")
    llama.Llama, llama.__spec__ = type("Llama", (Llama,), {}), ModuleSpec("llama_cpp", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", llama)

    def call(*flags, source="run", prompts="prompts.txt"):
        given = [f"--prompts={prompts}"] if prompts else []
        place = [] if any("save_path" in flag for flag in flags) else [f"--save_path={tmp_path / 'out'}"]
        code = main(["export", source, *given, *place, *flags])
        out, err = capsys.readouterr()
        return code, out if code == 0 else err.splitlines()[-1]

    call.llama = llama.Llama
    return call


GGUF = ("--to=gguf", "--converter=convert_hf_to_gguf.py")


@pytest.mark.parametrize("to", ["hf", "vllm"])
def test_a_folder_answers_as_the_run(export, to, tmp_path):
    code, said = export(f"--to={to}")
    assert code == 0, said
    assert "greedy tokens are the trained model's" in said
    same, _, n_tokens = said.split(": ")[1].split()[:3]
    assert int(same) > 0.9 * int(n_tokens) > 0
    assert (tmp_path / "out" / ("config.json" if to == "hf" else "adapter_config.json")).is_file()


def test_a_folder_that_answers_otherwise_is_refused_and_removed(export, tmp_path, monkeypatch):
    from unsloth_pack.checkpoints import saving

    real = saving.merged_weights

    def halved(*arguments):
        return ((name, w / 2 if "down_proj" in name else w) for name, w in real(*arguments))

    monkeypatch.setattr(saving, "merged_weights", halved)
    code, line = export("--to=hf")
    assert code == 1
    assert "prompt 1" in line
    assert not (tmp_path / "out").exists()


def test_a_file_answers_as_the_run(export, tmp_path):
    code, said = export("--to=ollama", GGUF[1])
    assert code == 0, said
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["Modelfile", "run.gguf"]
    assert (tmp_path / "out" / "Modelfile").read_text().startswith("FROM ./run.gguf\nTEMPLATE")


def halve(model, tokenizer):
    model.model.layers[2].mlp.down_proj.weight.data.mul_(0.5)


def lower_case(model, tokenizer):
    tokenizer.backend_tokenizer.normalizer = Lowercase()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (halve, r"prompt 1, token \d+ of the answer: '.*', the trained model has '"),
        (lower_case, r"prompt 1, token \d: the file reads '.*', the run '"),
    ],
)
def test_a_file_that_answers_otherwise_is_named_so(export, change, said, tmp_path):
    export.llama.change = staticmethod(change)
    code, line = export(*GGUF)
    assert code == 1
    assert re.search(said, line), line
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.gguf.failed"]
    assert "run.gguf.failed" in line


def test_prompts_come_from_the_data_of_the_run(export, tmp_path, trained):
    folder = tmp_path / "own"
    shutil.copytree(trained / "run", folder)
    options = {"dataset": str(tmp_path / "rows.jsonl")}
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "config", "options": options}) + "\n")
    code, line = export("--to=hf", source=str(folder), prompts=None)
    assert (code, "give --prompts FILE" in line) == (2, True)
    rows = [
        {"messages": [{"role": "user", "content": x}, {"role": "assistant", "content": "y"}]} for x in "ab"
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert export("--to=hf", source=str(folder), prompts=None)[0] == 0


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--to=onnx"], "--to is 'onnx'; write unsloth-pack export RUN --to gguf | ollama | vllm | hf"),
        ([], "--to is None"),
        (["--to=hf", "--save_path=run"], "save_path 'run' is not empty"),
        (["--to=hf", "--quantize=q8_0"], "quantize is 'q8_0' with --to hf"),
        ([*GGUF, "--quantize=q3"], "quantize is 'q3'; it should be 'q8_0', 'q6_k', 'q5_k_m' or 'q4_k_m'"),
        (["--to=gguf", "--converter=none.py"], "converter is 'none.py'"),
        (["--to=hf", "--prompts=none.txt"], "none.txt: file not found"),
    ],
)
def test_bad_input_is_one_line(export, flags, said, tmp_path):
    code, line = export(*flags)
    assert code == 2
    assert said in line
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named_before_weights_load(export, monkeypatch, tmp_path):
    monkeypatch.setattr("unsloth_pack.api.FastLanguageModel.from_pretrained", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "is not installed; pip install 'unsloth-pack[gguf]'" in export(*GGUF)[1]
    assert "takes images" in export("--to=hf", source="vision-demo")[1]
    assert "no such folder" in export("--to=hf", source="no/such/folder")[1]
    assert "names no data" in export("--to=hf", prompts=None)[1]


def test_a_full_disk_is_named_before_anything_is_written(export, monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 10**9, 10**6))
    code, line = export("--to=hf")
    assert code == 2
    assert "needs 0.0 GB" in line
    assert not (tmp_path / "out").exists()


def test_merge_points_to_export(export, capsys):
    assert main(["merge", "--model_name=run", "--save_path=merged", "--save_method=gguf"]) == 2
    assert "unsloth-pack export RUN --to gguf" in capsys.readouterr().err


def test_an_unknown_architecture_is_named(export, trained, tmp_path):
    refuses = CONVERTER.replace(
        "    folder, file", "    sys.exit('Model X is not supported')\n    folder, file"
    )
    (tmp_path / "convert.py").write_text(refuses)
    code, line = export("--to=gguf", f"--converter={tmp_path / 'convert.py'}")
    assert code == 2
    assert "refuses the model (Model X is not supported)" in line
    assert not (tmp_path / "out").exists()


def test_the_template_of_a_file_gives_the_same_tokens():
    """Also where texts begin with spaces, are empty, or end a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    template = llama_template(tokenizer)
    plain = AutoTokenizer.from_pretrained(MODEL_DIR)
    plain.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    rows = [messages(json.loads(line)) for line in TRAIN_FILE.read_text().splitlines()[:50]]
    odd = ["", " a", "  b", "\nc", "4 5  6"]
    turns = [{"role": role, "content": text} for text in odd for role in ("system", "user", "assistant")]
    for conversation in (*rows, turns, turns[1:2]):
        for ask in (False, True):
            options = {"tokenize": False, "add_generation_prompt": ask}
            text = tokenizer.apply_chat_template(conversation, **options)
            written = tokenizer.apply_chat_template(conversation, chat_template=template, **options)
            assert plain(written).input_ids == tokenizer(text).input_ids


CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_modelfile_has_the_chat_template_in_go():
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.chat_template = CHATML
    assert modelfile(tokenizer, "m.gguf") == (
        'FROM ./m.gguf\nTEMPLATE """{{ if not .System }}<|im_start|>system\nBe kind.<|im_end|>\n{{ end }}'
        "{{ range .Messages }}"
        '{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n{{ end }}'
        '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n{{ end }}'
        '{{ if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n{{ end }}{{ end }}'
        '<|im_start|>assistant\n"""\nPARAMETER stop "<|im_end|>"\nPARAMETER stop "<|endoftext|>"\n'
    )
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", "{{ loop.index }} {{ m.content }}")
    with pytest.raises(InputError, match="no form in Ollama's language"):
        modelfile(tokenizer, "m.gguf")
    tokenizer.chat_template = None
    assert modelfile(tokenizer, "m.gguf") == "FROM ./m.gguf\n"
