import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_MODEL, Cli
from models import lively, lively_seq2seq
from safetensors.torch import load_file, save_file

import nanolm
from nanolm import files
from nanolm.classification.classifier import load as load_classifier
from nanolm.errors import DataError, ModelError
from nanolm.generation.language_model import load
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, configure
from nanolm.model.huggingface import (
    BaseModel,
    save_model,
    save_partial,
    save_seq2seq,
    weights_fingerprint,
)
from nanolm.pairs.translator import Translator
from nanolm.runs.export import export_folder
from nanolm.runs.export_gguf import export_gguf
from nanolm.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["the cat sat on the mat. " * 9], "bpe")
SHAPE = {"vocab_size": TOKENIZER.vocab_size, "layers": 1, "heads": 2, "dim": 16, "context": 16}
NAMES = {"MANIFEST.json", "README.md", "config.json", "generation_config.json"}
NAMES |= {"model.safetensors", "tokenizer.json", "tokenizer_config.json"}
HOSTILE = "a\"b'c: [x](javascript:1) | <script> `d` \n---\n# e \x1b[2J {{f}} \u2028 \ud800 *g*"


def export(source: Path | str, to: Path, dtype: str | None = None) -> list[str]:
    said: list[str] = []
    export_folder(str(source), to, dtype, said.append)
    return said


def header(folder: Path) -> dict[str, Any]:
    """The YAML of the card, as the Hub reads it."""
    from huggingface_hub import ModelCard

    values: dict[str, Any] = ModelCard.load(folder / "README.md").data.to_dict()
    return values


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(lively(configure("modern", **SHAPE)), folder, TOKENIZER)
    return folder


def test_a_run(trained: Path, cli: Cli, tmp_path: Path) -> None:
    shown = cli("export", trained, "--to", "out/my model")
    folder = tmp_path / "out/my model"
    assert shown.returncode == 0, shown.stderr
    assert "f32 (as stored)" in shown.stderr
    assert "hf upload NAME 'out/my model'" in shown.stderr
    assert "choose a license in out/my model/README.md" in shown.stderr
    assert {file.name for file in folder.iterdir()} == NAMES
    assert load(folder, print).generate("the", seed=1) == load(trained, print).generate(
        "the", seed=1
    )
    card, result = (
        (folder / "README.md").read_text(),
        json.loads((trained / "run.json").read_text()),
    )
    assert f"| bits per byte | {result['result']['val_bits_per_byte']:.4f} |" in card
    assert result["fingerprints"]["corpus"] in card
    assert str(trained.parent) not in card  # no paths of this machine
    assert "**TODO**: choose a license" in card
    assert header(folder) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["nanolm", "qwen3"],
    }


def test_results_belong_to_the_best_checkpoint(tmp_path: Path, corpus: Path) -> None:
    nanolm.train(corpus, out=tmp_path / "run", steps=6, save_every=2, **TINY_MODEL)
    first, *_, best = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    assert best == (tmp_path / "run/best").resolve()
    export(first, tmp_path / "early")
    card = (tmp_path / "early/README.md").read_text()
    assert f"| step | {int(first.name[5:])} |" in card
    assert "bits per byte" not in card


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_precision(dtype: str, model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "one", dtype)
    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "one")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].to(kinds[dtype])) for name in before)
    config = json.loads((tmp_path / "one/config.json").read_text())
    assert config["dtype"] == str(kinds[dtype])[6:]
    said = export(tmp_path / "one", tmp_path / "two")  # as it was stored
    assert f"{dtype} (as stored)" in said[0]
    after_two = load_file(tmp_path / "two/model.safetensors")
    assert all(torch.equal(after[name], after_two[name]) for name in after)


def test_the_precision_of_the_base_model(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "base", "bf16")
    rows = "".join(f"good {n}\tyes\nbad {n}\tno\n" for n in range(20))
    (tmp_path / "rows.tsv").write_text(rows)
    how: dict[str, Any] = {"start_from": str(tmp_path / "base"), "steps": 2, "batch": 4}
    nanolm.finetune(tmp_path / "rows.tsv", out=tmp_path / "run", **how)
    said = export(tmp_path / "run", tmp_path / "one")
    assert "bf16 (as its base model is stored)" in said[0]
    card = (tmp_path / "one/README.md").read_text()
    assert "| started from | base |" in card
    assert "| accuracy |" in card
    shutil.rmtree(tmp_path / "base")
    assert "f32 (the base model is not available)" in export(tmp_path / "run", tmp_path / "two")[0]


def test_weights_that_are_too_large_for_f16(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "large")
    tensors = load_file(tmp_path / "large/model.safetensors")
    tensors["model.norm.weight"][0] = 70_000
    save_file(tensors, tmp_path / "large/model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="too large for f16; use --type bf16"):
        export(tmp_path / "large", tmp_path / "out", "f16")
    assert not (tmp_path / "out").exists()


def test_a_partial_classifier_becomes_whole(model: Path, tmp_path: Path) -> None:
    labels = ("<b>", HOSTILE.encode(errors="replace").decode())
    config = ClassifierConfig(base=configure("modern", **SHAPE), labels=labels, window=16)
    classifier = Classifier(config, load(model, print).model)
    base = BaseModel(model, weights_fingerprint(model))
    (tmp_path / "partial").mkdir()
    trained = {"score.weight": classifier.score.weight.detach()}
    save_partial(classifier, base, trained, {}, tmp_path / "partial", TOKENIZER)
    export(tmp_path / "partial", tmp_path / "whole")
    assert not (tmp_path / "whole/base.json").exists()
    one, two = (load_classifier(tmp_path / name, print) for name in ("partial", "whole"))
    assert one.classify("the cat") == two.classify("the cat")
    assert header(tmp_path / "whole")["pipeline_tag"] == "text-classification"
    row = next(line for line in card_lines(tmp_path / "whole") if line.startswith("| labels"))
    assert row.startswith("| labels | \\<b\\>, a\"b'c: \\[x\\]\\(javascript:1\\) \\| \\<script\\> ")


def card_lines(folder: Path) -> list[str]:
    return (folder / "README.md").read_text(encoding="utf-8").splitlines()


def test_names_cannot_break_the_card(model: Path, tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "").encode(errors="ignore").decode()
    export(model, tmp_path / name)
    lines = card_lines(tmp_path / name)
    assert [n for n, line in enumerate(lines) if line == "---"] == [0, 6]
    assert sum(line.startswith("# ") for line in lines) == 3  # two comments and the title
    assert not any("\x1b" in line for line in lines)
    assert header(tmp_path / name)["tags"] == ["nanolm", "qwen3"]


@pytest.mark.parametrize(("name", "base"), [("hf://gpt2", "gpt2"), ("hf://a/b", "a/b")])
def test_the_base_model_is_a_name_on_the_hub(
    name: str, base: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "cache" / "--".join(("models", *base.split("/")))
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text("abc")
    shutil.copytree(model, place / "snapshots/abc")
    export(name, tmp_path / "out")
    assert header(tmp_path / "out")["base_model"] == base


@pytest.mark.parametrize("family", ["encoder-decoder", "modern-encoder-decoder"])
def test_a_translator(family: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    translator = lively_seq2seq(family, **SHAPE)
    save_seq2seq(translator, tmp_path / "model", TOKENIZER, TOKENIZER)
    export(tmp_path / "model", tmp_path / "out", "bf16")
    one, two = (Translator.load_folder(tmp_path / name) for name in ("model", "out"))
    for before, after in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(before.bfloat16().float(), after)
    ours = family.startswith("modern")
    assert header(tmp_path / "out")["library_name"] == ("nanolm" if ours else "transformers")
    assert any("Only nanolm can read" in line for line in card_lines(tmp_path / "out")) == ours
    assert not any("gguf" in line for line in card_lines(tmp_path / "out"))


def test_only_an_earlier_export_is_replaced(model: Path, trained: Path, tmp_path: Path) -> None:
    step = next((trained / "checkpoints").glob("step-*"))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(model)
    for other in (model, trained, step, tmp_path, *tmp_path.iterdir()):
        with pytest.raises(DataError, match="not an earlier export; choose another --to"):
            export(model, other)
    out = tmp_path / "out"
    export(model, out)
    assert len(export(model, out, "bf16")) == 3
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert [file.name for file in tmp_path.glob(".*")] == []
    (out / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"notes\.txt was not written by nanolm; choose"):
        export(model, out)
    (out / "notes.txt").unlink()
    (out / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"config\.json is damaged"):
        export(model, out)


def test_a_gguf_file(model: Path, tmp_path: Path) -> None:
    export_gguf(str(model), tmp_path / "model.gguf", "f32", print)
    export(tmp_path / "model.gguf", tmp_path / "folder")
    before, after = load(model, print), load(tmp_path / "folder", print)
    assert before.generate("the", seed=1) == after.generate("the", seed=1)


def test_an_edited_card_is_kept(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(model, out)
    card = re.sub("(?m)^> .*$", "", (out / "README.md").read_text()).encode() + b"M\xefne.\n"
    (out / "README.md").write_bytes(card)  # in another encoding
    load(out, print)  # the manifest does not mention it
    assert "README.md is kept, since it was edited" in export(model, out, "f16")
    assert (out / "README.md").read_bytes() == card


def test_what_a_kill_left_is_removed(model: Path, tmp_path: Path) -> None:
    for name in (".tmp-out-999999999", ".trash-out-999999999", ".tmp-out-2-999999999"):
        (tmp_path / name).mkdir()
    export(model, tmp_path / "out")
    files.verify(tmp_path / "out")
    assert [file.name for file in tmp_path.glob(".*")] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["language model", "classifier", "seq2seq"])
def test_the_code_on_the_card_runs(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model
    if kind != "language model":
        (folder := tmp_path / "model").mkdir()
    if kind == "classifier":
        config = ClassifierConfig(base=configure("modern", **SHAPE), labels=("a", "b"), window=16)
        save_model(Classifier(config), folder, TOKENIZER)
    if kind == "seq2seq":
        save_seq2seq(lively_seq2seq("encoder-decoder", **SHAPE), folder, TOKENIZER)
    export(folder, tmp_path / "out", "bf16")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall("(?s)```python\n(.*?)```", (tmp_path / "out/README.md").read_text())
    exec(code, {})  # noqa: S102


@pytest.mark.slow
def test_peft_adapts_it(model: Path, tmp_path: Path) -> None:
    """LoRA of another library, merged and read here again."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    export(model, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    how = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    adapted = peft.get_peft_model(theirs, how)
    ids = torch.tensor([TOKENIZER.encode("the cat sat on the")])
    optimizer = torch.optim.AdamW(adapted.parameters(), lr=1e-2)
    for _ in range(3):
        adapted(ids, labels=ids).loss.backward()
        optimizer.step()
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path / "merged")
    with torch.no_grad():
        before, after = (load(folder, print).model(ids) for folder in (model, tmp_path / "merged"))
        assert torch.allclose(after, merged(ids).logits, atol=1e-4)
    assert not torch.allclose(before, after, atol=1e-2)
