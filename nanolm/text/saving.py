"""The files of a tokenizer as Hugging Face `transformers` expects them."""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanolm.text.tokenizer import Tokenizer


def tokenizer_config(tokenizer: "Tokenizer", context: int, end: bool = False) -> str:
    """The contents of tokenizer_config.json. What another model's file says is kept."""
    config: dict[str, Any] = {
        # Without the class, transformers 5 uses the tokenizer of the model's family instead.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.special[tokenizer.start_of_text],
        "eos_token": tokenizer.special[tokenizer.end_of_text],
        "pad_token": tokenizer.special[tokenizer.padding],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        # As here, a special token spelled out in a text is plain text.
        "split_special_tokens": True,
        **tokenizer.config,
    }
    if end:
        for key in ("add_bos_token", "add_eos_token"):  # would replace what `with_end` adds
            config.pop(key, None)
        config["model_input_names"] = ["input_ids", "attention_mask"]
    return json.dumps(config, indent=1) + "\n"


def with_end(tokenizer: "Tokenizer") -> str:
    """The contents of a tokenizer.json that adds the end-of-text token to every text."""
    end, id = tokenizer.special[tokenizer.end_of_text], tokenizer.end_of_text
    text, added = (
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": end, "type_id": 0}},
    )
    second = {"Sequence": {"id": "B", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing",
        "single": [text, added],
        "pair": [text, added, second, added],
        "special_tokens": {end: {"id": end, "ids": [id], "tokens": [end]}},
    }
    whole = json.loads(tokenizer.to_json()) | {"post_processor": processor}
    return json.dumps(whole, ensure_ascii=False, indent=1) + "\n"
