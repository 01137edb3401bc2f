"""Sequence-to-sequence models: who sees what, and the same results in every way of computing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli
from models import SHAPE, lively_seq2seq
from torch import Tensor, nn

from nanolm.errors import ModelError
from nanolm.model.config import EncoderDecoderConfig, Seq2SeqConfig, configure
from nanolm.model.config_json import model_type
from nanolm.model.encoder_decoder import CrossAttention
from nanolm.model.huggingface import load_seq2seq, save_seq2seq, snapshot
from nanolm.model.rnn import CELLS
from nanolm.model.seq2seq import Memory, Seq2Seq
from nanolm.model.seq2seq_rnn import AdditiveScores, Bidirectional, RecurrentSeq2Seq
from nanolm.model.shapes import parameter_shapes, parameters_by_part
from nanolm.text.tokenizer import train_tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "2017": {"family": "encoder-decoder"},
    "2017, pre-norm": {"family": "encoder-decoder", "norm_place": "pre", "encoder_layers": 1},
    "modern": {"family": "modern-encoder-decoder"},
    "modern, grouped": {"family": "modern-encoder-decoder", "kv_heads": 2, "tied": False},
    "separate": {"family": "encoder-decoder", "source_vocab_size": 50, "tied": False},
    "rnn": {"family": "seq2seq-rnn", "attention": "none"},
    "rnn, dot": {"family": "seq2seq-rnn", "attention": "dot", "source_vocab_size": 50},
    "lstm": {"family": "seq2seq-lstm", "attention": "none", "tied": False},
    "lstm, additive": {"family": "seq2seq-lstm", "attention": "additive", "encoder_layers": 3},
    "gru": {"family": "seq2seq-gru", "attention": "none"},
    "gru, dot": {"family": "seq2seq-gru", "attention": "dot", "layers": 1},
    "gru, additive": {"family": "seq2seq-gru"},
}
LENGTHS = torch.tensor([7, 4, 1])
MASK = torch.arange(7) < LENGTHS[:, None]  # (3, 7)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Seq2Seq:
    return lively_seq2seq(**MODELS[request.param], std=0.3)


def texts() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(SHAPE["vocab_size"], (3, 7)), torch.randint(SHAPE["vocab_size"], (3, 5))


def inputs(model: Seq2Seq, source: Tensor, target: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The logits, and the vectors of the source and target tokens."""
    vectors: list[Tensor] = []

    def keep(module: nn.Module, arguments: object, output: Tensor) -> Tensor:
        vectors.append(output.detach().requires_grad_())
        return vectors[-1]

    embeddings = {getattr(model, "source_embedding", model.token_embedding), model.token_embedding}
    hooks = [embedding.register_forward_hook(keep) for embedding in embeddings]
    logits = model(source, MASK, target)
    for hook in hooks:
        hook.remove()
    return logits, vectors


def test_nothing_sees_what_it_must_not_by_gradient(model: Seq2Seq) -> None:
    """A target position depends on itself, earlier ones and the tokens of its own source."""
    logits, vectors = inputs(model, *texts())
    for row in range(3):
        for position in range(5):
            score = logits[row, position].square().sum()
            source, target = torch.autograd.grad(score, vectors, retain_graph=True)
            seen = target.abs().sum(dim=-1) > 0  # (batch, target)
            expected = torch.zeros(3, 5, dtype=torch.bool)
            expected[row, : position + 1] = True
            assert torch.equal(seen, expected)
            expected = torch.zeros(3, 7, dtype=torch.bool)
            expected[row] = MASK[row]
            assert torch.equal(source.abs().sum(dim=-1) > 0, expected)


def test_nothing_sees_what_it_must_not_by_value(model: Seq2Seq) -> None:
    source, target = texts()
    with torch.no_grad():
        logits = model(source, MASK, target)
        other = torch.where(MASK, source, (source + 1) % SHAPE["vocab_size"])
        assert torch.equal(model(other, MASK, target), logits)
        for cut in range(1, 5):
            later = target.clone()
            later[:, cut:] = (later[:, cut:] + 1) % SHAPE["vocab_size"]
            torch.testing.assert_close(model(source, MASK, later)[:, :cut], logits[:, :cut])
        for row, length in enumerate(LENGTHS.tolist()):  # alone, without padding
            alone = model(source[row : row + 1, :length], MASK[:1, :length], target[row : row + 1])
            torch.testing.assert_close(alone[0], logits[row], atol=2e-5, rtol=1e-5)


def test_step_by_step_is_the_same(model: Seq2Seq) -> None:
    """With the cache; and with the weights of attention, which are computed step by step."""
    source, target = texts()
    with torch.no_grad():
        memory = model.encode(source, MASK)
        weights: list[Tensor] = []
        whole = model.decode(target, memory, cross_weights=weights)
        torch.testing.assert_close(model.head(whole), model(source, MASK, target))
        for lengths in ([1, 1, 1, 1, 1], [3, 2], [2, 1, 2]):
            cache, parts = model.init_cache(3, 5), []
            for part in target.split(lengths, dim=1):
                parts.append(model.decode(part, memory, cache))
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=1e-5)
    for each in weights:
        assert each.shape[0] == 3
        assert each.shape[2:] == (5, 7)
        torch.testing.assert_close(each.sum(dim=-1), torch.ones(each.shape[:3]))
        assert not each.masked_select(~MASK[:, None, None]).any()
    attends = getattr(model.config, "attention", "") != "none"
    layers = model.config.layers if isinstance(model.config, EncoderDecoderConfig) else 1
    assert len(weights) == (layers if attends else 0)


def test_rows_can_be_selected_as_in_beam_search(model: Seq2Seq) -> None:
    source, target = texts()
    rows = torch.tensor([2, 0, 0])
    with torch.no_grad():
        memory, cache = model.encode(source, MASK), model.init_cache(3, 5)
        model.decode(target[:, :3], memory, cache)
        cache.select(rows)
        after = model.decode(target[:, 3:], memory.select(rows), cache)
        prefix = torch.cat([target[rows, :3], target[:, 3:]], dim=1)
        whole = model.decode(prefix, model.encode(source[rows], MASK[rows]))
    torch.testing.assert_close(after, whole[:, 3:], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [1, 4])
def test_cross_attention_is_that_of_torch(heads: int) -> None:
    """Written out = fused = nn.MultiheadAttention."""
    config = configure("encoder-decoder", **SHAPE | {"heads": heads})
    assert isinstance(config, EncoderDecoderConfig)
    torch.manual_seed(0)
    ours = CrossAttention(config, 0)
    theirs = nn.MultiheadAttention(config.dim, heads, batch_first=True)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    rows = [config.dim, 2 * config.dim]
    ours.query.weight.data, ours.key_value.weight.data = theirs.in_proj_weight.split(rows)
    ours.query.bias.data, ours.key_value.bias.data = theirs.in_proj_bias.split(rows)
    ours.out.load_state_dict(theirs.out_proj.state_dict())
    x, states = torch.randn(3, 5, config.dim), torch.randn(3, 7, config.dim)
    expected, weights = theirs(x, states, states, ~MASK, average_attn_weights=False)
    written: list[Tensor] = []
    torch.testing.assert_close(ours(x, Memory(states, MASK)), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours(x, Memory(states, MASK), written), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(written[0], weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cell", CELLS)
def test_the_encoder_is_torchs_bidirectional_layer(cell: str) -> None:
    """On packed sequences, which have no padding."""
    torch.manual_seed(0)
    dim = 6
    ours = Bidirectional(CELLS[cell](dim), CELLS[cell](dim), dim)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.4)
    ours.out.weight.data, ours.out.bias.data = torch.eye(2 * dim), torch.zeros(2 * dim)
    kind = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[cell]
    theirs = kind(dim, dim, batch_first=True, bidirectional=True)
    for way, end in ((ours.rightward, ""), (ours.leftward, "_reverse")):
        getattr(theirs, f"weight_ih_l0{end}").data = way.input_weight.data
        getattr(theirs, f"weight_hh_l0{end}").data = way.state_weight.data
        getattr(theirs, f"bias_ih_l0{end}").data = way.bias.data
        getattr(theirs, f"bias_hh_l0{end}").data.zero_()
    x = torch.randn(3, 7, dim)
    packed = nn.utils.rnn.pack_padded_sequence(x, LENGTHS, batch_first=True)
    output, last = theirs(packed)
    expected, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
    states, ends = ours(x, MASK)
    torch.testing.assert_close(states[MASK], expected[MASK], atol=1e-5, rtol=0)
    h = last[0] if cell == "lstm" else last  # (2, batch, dim)
    torch.testing.assert_close(ends, torch.cat([*h], dim=-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["additive", "dot"])
def test_attention_as_on_the_slides(kind: str) -> None:
    """One position and one source state at a time."""
    model = lively_seq2seq("seq2seq-lstm", attention=kind, layers=1, std=0.5)
    assert isinstance(model, RecurrentSeq2Seq)
    source, target = texts()
    with torch.no_grad():
        memory = model.encode(source, MASK)
        ours = model.decode(target, memory)
        x = model.token_embedding(target) * model.config.dim**0.5
        start = tuple(part[:, 0] for part in memory.final)
        hidden, _ = model.decoder[0].written_out(x, start)  # type: ignore[operator]
        for row, length in enumerate(LENGTHS.tolist()):
            for position in range(5):
                h = hidden[row, position]
                scores = []
                for s in memory.states[row, :length]:
                    if isinstance(model.attention, AdditiveScores):
                        w, u = model.attention.query.weight, model.attention.key.weight
                        scores.append(model.attention.score.weight[0] @ torch.tanh(w @ h + u @ s))
                    else:
                        scores.append(h @ s)
                weights = torch.stack(scores).softmax(dim=0)
                context = weights @ memory.states[row, :length]
                expected = torch.tanh(model.combine.weight @ torch.cat([context, h]))
                torch.testing.assert_close(ours[row, position], expected, atol=1e-5, rtol=0)


def test_the_bottleneck_is_all_that_is_known() -> None:
    """Without attention, the source reaches the decoder through its first state alone."""
    model = lively_seq2seq("seq2seq-gru", attention="none")
    source, target = texts()
    with torch.no_grad():
        memory = model.encode(source, MASK)
        assert [part.shape for part in memory.final] == [(3, 2, SHAPE["dim"])]
        alone = Memory(torch.full_like(memory.states, torch.nan), MASK, memory.final)
        assert torch.equal(model.decode(target, alone), model.decode(target, memory))


def test_shapes_are_those_of_the_model(model: Seq2Seq) -> None:
    actual = [(name, tuple(value.shape)) for name, value in model.named_parameters()]
    assert list(parameter_shapes(model.config).items()) == actual
    assert sum(parameters_by_part(model.config).values()) == model.parameter_count()


def test_what_is_loaded_is_what_was_saved(model: Seq2Seq, tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], "byte")
    save_seq2seq(snapshot(model), tmp_path, tokenizer, shard=10_000)
    again = load_seq2seq(tmp_path, dropout=0.2)
    assert again.config == type(model.config)(**vars(model.config) | {"dropout": 0.2})
    for (name, one), (_, two) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    assert (again.head.weight is again.token_embedding.weight) == model.config.tied


def test_a_fresh_model_trains(model: Seq2Seq) -> None:
    """All gradients are finite, and no parameter is without one."""
    model.init_weights()
    source, target = texts()
    model.train()(source, MASK, target).logsumexp(dim=-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(
    ("family", "changes", "stored", "why"),
    [
        ("encoder-decoder", {}, "marian", ""),
        ("encoder-decoder", {"norm_place": "pre"}, "pegasus", ""),
        ("encoder-decoder", {"norm_place": "pre", "source_vocab_size": 9}, "nanolm", ""),
        ("encoder-decoder", {"kv_heads": 2}, "nanolm", "marian does not support --kv-heads 2"),
        ("modern-encoder-decoder", {}, "nanolm", "pegasus does not support --positions rope"),
        ("seq2seq-gru", {}, "nanolm", "it is recurrent"),
    ],
)
def test_the_family_on_disk(family: str, changes: dict[str, Any], stored: str, why: str) -> None:
    found, reason = model_type(configure(family, **SHAPE | changes))
    assert found == stored
    assert why in reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoder_layers": 0}, "--encoder-layers 0"),
        ({"encoder_layers": 2000}, "--encoder-layers 2000"),
        ({"source_vocab_size": 0}, "source_vocab_size of 0"),
        ({"positions": "alibi"}, "--positions alibi"),
    ],
)
def test_impossible_configs_are_refused(changes: dict[str, Any], words: str) -> None:
    config = configure("encoder-decoder", **SHAPE | changes)
    assert isinstance(config, Seq2SeqConfig)
    assert any(words in problem for problem in config.problems())


def test_other_models_are_refused(tmp_path: Path) -> None:
    from nanolm.model.huggingface import load_classifier, load_model

    save_seq2seq(lively_seq2seq("seq2seq-rnn"), tmp_path, train_tokenizer([], "byte"))
    for load in (load_model, load_classifier):
        with pytest.raises(ModelError, match=r"is a sequence-to-sequence model.*nanolm translate"):
            load(tmp_path)


def test_commands_say_what_to_use(tmp_path: Path, cli: Cli) -> None:
    tokenizer = train_tokenizer([], "byte")
    model = lively_seq2seq("encoder-decoder", vocab_size=258, source_vocab_size=300)
    save_seq2seq(model, tmp_path, tokenizer, train_tokenizer(["abc"], "char"))
    for words in (["sample", tmp_path], ["classify", tmp_path, "a"]):
        shown = cli(*words)
        assert shown.returncode == 4
        assert f"nanolm translate {tmp_path}" in shown.stderr
    shown = cli("info", tmp_path)
    assert "AutoModelForSeq2SeqLM" in shown.stdout
    assert "source char, 261 tokens; target byte, 258 tokens" in shown.stdout
    assert cli("doctor", tmp_path).returncode == 0
