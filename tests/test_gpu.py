"""The same code on a CUDA GPU; skipped where there is none."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from faults import Killed, before_step, kill
from journeys import journeys, same
from models import PUBLISHED_FAMILIES, SHAPE, SWITCHES, every_gpt, gpt_config, lively, of_family

import nanolm
from nanolm.generation.batch import Batch, BatchRow
from nanolm.generation.decoding import CachedDecoder, NaiveDecoder
from nanolm.generation.language_model import Sample
from nanolm.generation.sampler import Sampler
from nanolm.generation.sampling_params import SamplingParams
from nanolm.generation.words import score_words
from nanolm.model.base import Model
from nanolm.model.classifier import Classifier
from nanolm.model.config import FAMILIES, ClassifierConfig, configure
from nanolm.model.device import free_memory
from nanolm.model.size import preset_sizes, training_bytes
from nanolm.planning.trial import SpeedTrial
from nanolm.pretraining import distil
from nanolm.text.tokenizer import train_tokenizer
from nanolm.training import step
from nanolm.training.optim import Optimizers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_train_resume_and_sample(family: str, tmp_path: Path) -> None:
    choices = []
    result = nanolm.train(
        "embedded:stories",
        out=tmp_path / "run",
        family=family,
        preset="micro",
        steps=300,
        dropout=0.1,
        notify=lambda event: choices.append(str(event)),
    )
    assert any("bfloat16" in choice or "float32" in choice for choice in choices)
    assert result.train_loss is not None
    assert result.val_bits_per_byte is not None
    assert result.train_loss < 4.5
    assert result.val_bits_per_byte < 2
    writer = nanolm.load(tmp_path / "run")
    on_cpu = writer.generate("Once upon a time", greedy=True, tokens=20)
    writer.model.to("cuda")
    assert len(writer.generate("Once upon a time", greedy=True, tokens=20)) > 0
    assert len(on_cpu) > 0


def written(
    path: type[NaiveDecoder] | type[CachedDecoder],
    model: Model,
    prompts: list[list[int]],
    sizes: tuple[int, ...] = (),
) -> Any:
    tokenizer = train_tokenizer([], "byte")
    params = SamplingParams(
        tokens=36, top_p=0.95, repetition_penalty=1.2, ban=("a", "bc"), min_tokens=9, seed=1
    )
    count, length = max((len(prompts), *sizes)), max(map(len, prompts)) + 36
    sampler = Sampler(tokenizer, count, model.device)
    batch = Batch(path(model, count, length), sampler, length, sizes)
    found: dict[BatchRow, list[Any]] = {BatchRow(prompt, params, top=3): [] for prompt in prompts}
    batch.join(list(found))
    while batch.busy():
        for row, token in batch.step():
            found[row].append((token.id, [id for id, _ in token.top]))
    return list(found.values())


def test_cached_and_naive_agree_token_for_token() -> None:
    """All kinds of models, one row and many, rows of different lengths, past the context."""
    shape = {**SHAPE, "vocab_size": 258, "context": 12}
    lengths = random.Random(0).choices(range(1, 30), k=12)
    prompts = [random.Random(length).choices(range(256), k=length) for length in lengths]
    models = [lively(configure(family, **shape), std=0.4) for family in FAMILIES]
    for config in random.Random(1).sample(every_gpt(), 30):
        changes = {name: getattr(config, name) for name in SWITCHES}
        models.append(lively(gpt_config(**shape | changes), std=0.4))
    published = PUBLISHED_FAMILIES.values()
    models += [lively(gpt_config(**shape | changes), std=0.4) for changes in published]
    fused = 0
    for model in models:
        model.to("cuda").eval()
        fused += CachedDecoder(model, 1, 9).fused(1) is not None
        for rows in (1, 3, 12):
            expected = written(NaiveDecoder, model, prompts[:rows])
            assert written(CachedDecoder, model, prompts[:rows]) == expected
        assert (
            written(CachedDecoder, model, prompts, (16,)) == expected
        )  # with rows that stand idle
    assert fused > 10  # the kernels were tried


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_close(family: str, dtype: torch.dtype) -> None:
    model = of_family(family, dim=64).to("cuda")
    ids = torch.randint(SHAPE["vocab_size"], (1, 7), device="cuda")
    expected = model(ids)[0].log_softmax(-1)
    model.to(dtype)
    decoder = CachedDecoder(model, 1, 8)
    with torch.inference_mode():
        for length in range(1, 8):
            decoder.prepare(ids, [length])
            found = decoder.logits(ids, torch.tensor([length], device="cuda"))
            difference = found[0].float().log_softmax(-1) - expected[length - 1]
            assert difference.abs().mean() < 0.1 * expected.std()


def test_without_a_compiler_for_kernels_it_still_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_family("modern", vocab_size=258).to("cuda")
    prompts = [[1, 2, 3]]
    expected = written(NaiveDecoder, model, prompts)

    def fail(*anything: object) -> None:
        raise RuntimeError("no C compiler")

    from nanolm.model.fast import decoding

    monkeypatch.setattr(decoding.OneToken, "__call__", fail)
    assert written(CachedDecoder, model, prompts) == expected


def some_models() -> list[Model]:
    chosen = random.Random(0).sample(every_gpt(), 100)
    chosen += [gpt_config(**changes) for changes in PUBLISHED_FAMILIES.values()]
    return [*map(lively, chosen), of_family("rnn"), of_family("lstm")]


def test_any_model_computes_what_it_does_on_a_cpu() -> None:
    for model in some_models():
        check_on_a_gpu(model)


def check_on_a_gpu(model: Model) -> None:
    ids = torch.randint(SHAPE["vocab_size"], (2, SHAPE["context"]))
    expected = model(ids)
    model.to("cuda")
    ids = ids.to("cuda")
    allowed = 1e-4
    size = expected.abs().max()
    assert (model(ids).cpu() - expected).abs().max() < allowed * size
    memory = model.init_cache(batch=2, length=SHAPE["context"])
    with torch.no_grad():
        pieces = [model(part, memory) for part in ids.split([3, 1, 4], dim=1)]
    assert (torch.cat(pieces, dim=1).cpu() - expected).abs().max() < allowed * size
    model.train()
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("preset", ["mini", "gpt2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_of_memory(family: str, preset: str) -> None:
    (size,) = [size for size in preset_sizes(family) if size.preset == preset]
    shape = {name: getattr(size, name) for name in ("layers", "heads", "dim", "context")}
    config = configure(family, vocab_size=size.vocab_size, **shape)
    free_memory()  # what another test left would be freed meanwhile, and be missed
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trial = SpeedTrial(config, 16, "cuda")
    for _ in range(2):
        trial.step()
    trial.wait()
    trial.close()
    taken = torch.cuda.max_memory_allocated() - before
    estimate = training_bytes(config, size.parameters, 16 * size.context)
    rel = 0.2 if family == "rnn" else 0.15
    assert estimate == pytest.approx(taken, rel=rel), f"{taken / 1e9:.2f} GB"


def test_captured_updates_are_those_of_single_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of several lengths, each captured when it comes up again; two without a gradient."""

    def trained(most: int) -> tuple[dict[str, torch.Tensor], list[float], int]:
        monkeypatch.setattr(step, "MAX_GRAPH_TOKENS", most)
        torch.manual_seed(0)
        base = configure("modern", vocab_size=300, layers=2, heads=2, dim=32, context=64)
        config = ClassifierConfig(base=base, labels=("a", "b"), window=64)
        model = Classifier(config).to("cuda")
        parameters = dict(model.named_parameters())

        def loss(
            ids: torch.Tensor, lengths: torch.Tensor, truth: torch.Tensor, spoil: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return F.cross_entropy(model(ids, lengths), truth) * spoil.mean(), {}

        update = step.Step(loss, Optimizers(parameters, weight_decay=0.1), "float32")
        losses = []
        for number in range(30):
            torch.manual_seed(number)
            width = (8, 16, 24)[number % 3]
            ids = torch.randint(300, (4, width))
            lengths, truth = torch.randint(1, width + 1, (4,)), torch.randint(2, (4,))
            spoil = torch.tensor([math.nan if number in (2, 20) else 1.0] * 4)
            before = {name: value.detach().clone() for name, value in parameters.items()}
            norm, found = update((ids, lengths, truth, spoil), 1e-3 * (1 - number / 30)).tolist()
            if number in (2, 20):  # once before and once after it is captured
                assert not math.isfinite(norm)
                assert all(torch.equal(parameters[name], before[name]) for name in before)
            else:
                losses.append(found)
        weights = {name: value.detach().cpu() for name, value in parameters.items()}
        return weights, losses, len(update.captured)

    single, captured = trained(0), trained(10_000)
    assert (single[2], captured[2]) == (0, 3)
    assert captured[1] == pytest.approx(single[1], abs=1e-4)
    for name, value in single[0].items():
        torch.testing.assert_close(captured[0][name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("train", ["all", "lora"])
def test_fine_tuning_and_classifying_on_a_gpu(train: str, tmp_path: Path) -> None:
    nanolm.train(
        "embedded:tiny", out=tmp_path / "base", steps=20, layers=2, heads=2, dim=64, context=64
    )
    result = nanolm.finetune(
        "embedded:reviews", start_from=tmp_path / "base", out=tmp_path / "run", limit=400, steps=60,
        train=train, lr=1e-3,
    )  # fmt: skip
    assert result.val
    assert result.val.loss < 0.72
    here = nanolm.load_classifier(tmp_path / "run")
    there = here.on("cuda", "float32")
    texts = ["A lovely film.", "It was not good, it was bad. " * 9, "x"]
    logits = there.logits(texts)
    assert there.model.device.type == "cuda"
    there.model.cpu()
    assert logits == pytest.approx(here.logits(texts), abs=1e-3)


@pytest.mark.parametrize("family", ["modern", "llama", "gpt2"])
def test_lora_on_a_gpu(family: str, tmp_path: Path) -> None:
    """Fused kernels, which would skip the adapters, stand aside: what is trained is saved."""
    shape: dict[str, Any] = {"layers": 2, "heads": 2, "dim": 64, "context": 64, "family": family}
    nanolm.train("embedded:tiny", out=tmp_path / "base", steps=3, **shape)
    how: dict[str, Any] = {"train": "lora", "steps": 60, "batch": 8, "lr": 1e-2}
    result = nanolm.train(
        "embedded:tiny", start_from=tmp_path / "base", out=tmp_path / "run", **how
    )
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert result.val_loss and result.val_loss < first["val_loss"] - 0.1
    lines = (Path(path) for path in (tmp_path / "run/best", tmp_path / "run/last"))
    ids = torch.arange(50, device="cuda")[None]
    best, last = (nanolm.load(path).model.to("cuda")(ids) for path in lines)
    torch.testing.assert_close(best, last, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("columns", [16, 1 << 20])
def test_distillation(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the most likely tokens, or with all; steps are captured into graphs."""
    monkeypatch.setattr(distil, "soft_target_columns", lambda *_: columns)
    how: dict[str, Any] = {"preset": "micro", "steps": 300, "teachers": 2, "save_every": 100}
    with monkeypatch.context() as patch:
        before_step(patch, 250, kill)
        with pytest.raises(Killed):
            nanolm.train("embedded:stories", out=tmp_path / "run", **how)
    result = nanolm.train("embedded:stories", out=tmp_path / "run", **how)
    teachers = json.loads((tmp_path / "run/run.json").read_text())["teachers"]
    worst = max(teacher["val_bits_per_byte"] for teacher in teachers)
    assert result.val_bits_per_byte and result.val_bits_per_byte < 1.5 * worst < 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["training", "fine-tuning"])
def test_deterministic_is_the_same_to_the_bit_however_often_it_is_killed(
    kind: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journey = journeys(tmp_path)[kind]
    how: dict[str, Any] = {"steps": 60, "save_every": 7, "deterministic": True, "device": "cuda"}
    if kind == "training":
        how |= {"family": family, "preset": "micro", "context": 64, "batch": 8}
        settings = {"dropout": 0.1}
    else:
        how |= {"family": family}
        settings = {name: value for name, value in journey.settings.items() if name != "threads"}
    journey = replace(journey, settings=settings)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    journey.go(whole, **how)
    for step_ in (5, 20, 21, 40, 59):
        with monkeypatch.context() as patch:
            before_step(patch, step_, kill)
            with pytest.raises(Killed):
                journey.go(killed, **how)
    journey.go(killed, **how)
    assert same(whole, killed)


def test_a_batch_that_really_does_not_fit(tmp_path: Path) -> None:
    """A tenth of the memory that it would take: it goes through in parts, and learns the same."""
    how: dict[str, Any] = {"preset": "mini", "tokenizer": "byte", "batch": 1024, "dropout": 0.0}
    how |= {"steps": 5, "evaluations": 1, "dtype": "float32", "weight_decay": 0.1}
    native = nanolm.train("embedded:stories", out=tmp_path / "native", **how)
    taken = torch.cuda.max_memory_allocated()
    notes: list[str] = []
    torch.cuda.empty_cache()
    share = 0.3 * taken / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        short = nanolm.train(
            "embedded:stories",
            out=tmp_path / "short",
            notify=lambda event: notes.append(str(event)),
            **how,
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("not enough memory for a whole batch" in note for note in notes)
    assert short.tokens == native.tokens
    assert short.val_loss == pytest.approx(native.val_loss, abs=1e-3)


def test_words_are_as_likely_as_on_a_cpu(trained: Path) -> None:
    model = nanolm.load(trained)
    sample = Sample("the small cat")
    for _ in model.stream([sample], SamplingParams(tokens=20, seed=3)):
        pass
    expected = score_words(model, sample, top=4)
    model.model.to("cuda")
    for found, word in zip(score_words(model, sample, top=4), expected, strict=True):
        assert found.text == word.text
        assert found.probability == pytest.approx(word.probability, rel=0.02, abs=1e-4)
        assert found.top[0][0] == word.top[0][0]
