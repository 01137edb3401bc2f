"""config.json of an encoder-decoder Transformer, as MarianMT (post-norm) or Pegasus (pre-norm)."""

from typing import Any, Literal

from nanolm.model.config import SEQ2SEQ_FAMILIES, EncoderDecoderConfig, Switches, TransformerConfig
from nanolm.model.json_values import Values

SEQ2SEQ = {"marian": "MarianMTModel", "pegasus": "PegasusForConditionalGeneration"}
# Our names of activation functions, by their Hugging Face names; the last of several is written.
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "relu2": "relu2"}
ACTIVATIONS |= dict.fromkeys(("gelu_fast", "gelu_pytorch_tanh", "gelu_new"), "gelu_tanh")
ACTIVATIONS |= dict.fromkeys(("swish", "silu"), "silu")
# The values of each switch that a family supports.
SWITCHES = ("positions", "norm", "norm_place", "feed_forward", "qk_norm", "bias")
EXPRESSED_SEQ2SEQ: dict[str, Switches] = {
    family: {
        name: (value,)
        for name, value in SEQ2SEQ_FAMILIES["encoder-decoder"].items()
        if name in (*SWITCHES, "norm_epsilon")
    }
    | {"norm_place": (place,), "feed_forward": tuple(ACTIVATIONS.values()), "head_width": (None,)}
    for family, place in {"marian": "post", "pegasus": "pre"}.items()
}
# Our names of the sizes, by their Hugging Face names.
MARIAN_SIZES = {
    "max_position_embeddings": "context",
    "d_model": "dim",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "layers",
    "encoder_attention_heads": "heads",
    "decoder_attention_heads": "heads",
    "encoder_ffn_dim": "hidden",
    "decoder_ffn_dim": "hidden",
}


def separate_source(config: TransformerConfig) -> bool:
    """Whether Pegasus cannot express the source embedding: it must be that of the target, or have
    the same size in a model without tied weights."""
    own = config.source_vocab_size if isinstance(config, EncoderDecoderConfig) else None
    return own is not None and (own != config.vocab_size or config.tied)


def marian_to_json(config: EncoderDecoderConfig, family: str) -> dict[str, Any]:
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    separate = config.source_vocab_size
    written: dict[str, Any] = {
        **{theirs: getattr(config, ours) for theirs, ours in MARIAN_SIZES.items()},
        "activation_function": activations[config.feed_forward],
        "dropout": config.dropout,
        "attention_dropout": 0.0,
        "scale_embedding": True,
        "is_encoder_decoder": True,
        "forced_eos_token_id": None,  # by default, generation at full length ends with token 0
    }
    if family == "marian":
        written["vocab_size"] = separate or config.vocab_size
        written["decoder_vocab_size"] = config.vocab_size
        written["share_encoder_decoder_embeddings"] = separate is None
    if separate is None and not config.tied:
        written["tie_source_embedding"] = True  # ours: transformers 5 ties all embeddings or none
    return written


def read_marian(values: Values, family: Literal["marian", "pegasus"]) -> EncoderDecoderConfig:
    pre_norm = family == "pegasus"
    values.only("quantization_config", [None], None, "quantized weights")
    for name in values.like("architectures", []):
        if name not in (SEQ2SEQ[family], f"{family.capitalize()}Model"):
            raise values.wrong("architectures", "not a sequence-to-sequence model")
    values.only("is_encoder_decoder", [True], True, "a decoder without an encoder")
    values.only("scale_embedding", [True], False, "embeddings that are not scaled")
    # Fields of early versions of transformers, in which one class served several models.
    values.only("static_position_embeddings", [True], True, "learned positions")
    values.only("normalize_embedding", [False], False, "a norm after the embedding")
    values.only("add_bias_logits", [False], False, "a bias in the output layer")
    values.only("normalize_before", [pre_norm], pre_norm, f"this value for {family} models")
    values.only("add_final_layer_norm", [pre_norm], pre_norm, f"this value for {family} models")
    what = "this activation function"
    activation = values.only("activation_function", ACTIVATIONS, "gelu", what)
    for name in ("attention_heads", "ffn_dim"):
        if values.count(f"encoder_{name}") != values.count(f"decoder_{name}"):
            same = "nanolm needs the same value in the encoder and the decoder"
            raise values.wrong(f"decoder_{name}", same)
    sizes = {
        ours: values.count(theirs, 1024 if ours == "context" else None)
        for theirs, ours in MARIAN_SIZES.items()
    }
    fixed: dict[str, Any] = {
        name: allowed[0] for name, allowed in EXPRESSED_SEQ2SEQ[family].items()
    }
    source = target = values.count("vocab_size")
    tied = values.like("tie_word_embeddings", True)
    shared, ours_shared = tied, values.like("tie_source_embedding", False)
    if family == "marian":
        target = values.count("decoder_vocab_size", source)
        shared = values.like("share_encoder_decoder_embeddings", True) and tied
    if (shared or ours_shared) and target != source:
        raise values.wrong("decoder_vocab_size", "a shared embedding has only one size")
    return EncoderDecoderConfig(
        **fixed | sizes | {"feed_forward": ACTIVATIONS[activation]},
        vocab_size=target,
        source_vocab_size=None if shared or ours_shared else source,
        kv_heads=sizes["heads"],
        tied=tied,
        dropout=values.number("dropout", 0.1),
    )
