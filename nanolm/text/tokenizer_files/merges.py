"""vocab.json and merges.txt, the two tokenizer files of GPT-2 and of some later models, converted
to a tokenizer.json with the ids of the class that `transformers` uses for them."""

from pathlib import Path
from typing import Any

from nanolm.errors import ModelError
from nanolm.text.saving import BPE_MODEL, BYTE_LEVEL, ISOLATED, tokenizer_json
from nanolm.text.tokenizer import END_OF_TEXT
from nanolm.text.tokenizer_files.byte_level import QWEN
from nanolm.text.tokenizer_files.tokenizer_json import parse, read, read_near, read_settings

CURE = (
    "transformers can write one: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER), "
    "with NAME and FOLDER in quotes"
)
TOKENS = tuple(f"{key}_token" for key in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
CLIP_SPLIT = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
ENDS = dict.fromkeys(("eos_token", "unk_token"), END_OF_TEXT)
# Special tokens of each class, unless the files say otherwise.
SPECIAL: dict[str, dict[str, str]] = {
    "GPT2Tokenizer": {"bos_token": END_OF_TEXT, **ENDS},
    "Qwen2Tokenizer": {**ENDS, "pad_token": END_OF_TEXT},
    "CLIPTokenizer": {"bos_token": "<|startoftext|>", **ENDS, "pad_token": END_OF_TEXT},
    "RobertaTokenizer": {
        **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>"},
        **{"pad_token": "<pad>", "cls_token": "<s>", "mask_token": "<mask>"},
    },
}
AROUND = {  # tokens before and after a text
    "CLIPTokenizer": ("bos_token", "eos_token"),
    "RobertaTokenizer": ("cls_token", "sep_token"),
}
# The class of a model that does not name it.
CLASSES = dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "phi", "starcoder2"), "GPT2Tokenizer")
CLASSES |= dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer")
CLASSES |= dict.fromkeys(("llama", "mistral", "mixtral"), "LlamaTokenizer")
CLASSES |= {"roberta": "RobertaTokenizer", "clip": "CLIPTokenizer"}


def tokenizer_class(file: Path) -> str:
    """The class that the files next to `file` ask for; empty if they say nothing."""
    config = read_near(file, "config.json")
    named = read_near(file, "tokenizer_config.json").get("tokenizer_class")
    kind = config.get("model_type")
    named = named or config.get("tokenizer_class") or CLASSES.get(str(kind), kind)
    return str(named or "").removesuffix("Fast")


def merges_to_json(vocabulary_file: Path, merges_file: Path) -> tuple[str, dict[str, str]]:
    """A tokenizer.json, and the special tokens unless a tokenizer_config.json names others."""
    kind = tokenizer_class(vocabulary_file) or "GPT2Tokenizer"
    if kind not in SPECIAL:
        raise ModelError(
            f"{vocabulary_file.parent} has no tokenizer.json, and nanolm does not know how "
            f"{kind:.80} splits texts; {CURE}"
        )
    vocabulary = parse(read(vocabulary_file), vocabulary_file)
    settings, defaults = read_settings(vocabulary_file), SPECIAL[kind]
    merges = []
    for number, line in enumerate(read(merges_file).split("\n"), start=1):
        pair = line.rstrip("\r").split(" ")
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        if len(pair) != 2:
            raise ModelError(f"{merges_file}, line {number}: a merge needs two tokens")
        merges.append(pair)
    model = {**BPE_MODEL, "vocab": vocabulary, "merges": merges}
    added = added_tokens(vocabulary_file, vocabulary, defaults)
    named = {key: content(settings.get(key) or token) for key, token in defaults.items()}
    byte_level = {**BYTE_LEVEL, "add_prefix_space": bool(settings.get("add_prefix_space"))}
    normalizer: dict[str, Any] | None = None
    splits: list[dict[str, Any]] = []
    decoders: list[dict[str, Any]] = [BYTE_LEVEL]
    if kind == "Qwen2Tokenizer":
        normalizer = {"type": "NFC"}
        splits = [{"type": "Split", "pattern": {"Regex": QWEN}, **ISOLATED}]
        byte_level["use_regex"] = False
    elif kind == "CLIPTokenizer":
        spaces = {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}
        steps = [{"type": "NFC"}, spaces, {"type": "Lowercase"}]
        normalizer = {"type": "Sequence", "normalizers": steps}
        removed = {"behavior": "Removed", "invert": True}
        splits = [{"type": "Split", "pattern": {"Regex": CLIP_SPLIT}, **removed}]
        byte_level = BYTE_LEVEL
        model |= {"end_of_word_suffix": "</w>", "unk_token": named["unk_token"]}
        decoders += [{"type": "Replace", "pattern": {"String": "</w>"}, "content": " "}]
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [*splits, byte_level]}
    decoder = {"type": "Sequence", "decoders": decoders}
    processor: dict[str, Any] | None = None
    if kind in AROUND:
        ids = {new["content"]: new["id"] for new in added}
        first, last = ([named[key], ids[named[key]]] for key in AROUND[kind])
        processor = {"type": "RobertaProcessing", "cls": first, "sep": last}
        processor |= {"trim_offsets": False, "add_prefix_space": False}
    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}
    return tokenizer_json({**parts, "post_processor": processor, "model": model}, added), defaults


def added_tokens(
    file: Path, vocabulary: dict[str, int], defaults: dict[str, str]
) -> list[dict[str, Any]]:
    """The added tokens that the files next to `file` list, as in a tokenizer.json. Those without an
    id follow the vocabulary."""
    settings = read_settings(file)
    added: dict[str, dict[str, Any]] = {}
    try:
        listed = settings.get("added_tokens_decoder") or {
            id: {"content": token} for token, id in read_near(file, "added_tokens.json").items()
        }
        rows = sorted(((int(id), token) for id, token in listed.items()), key=lambda row: row[0])
        named = defaults | {key: settings[key] for key in TOKENS if key in settings}
        tokens = [token for token in named.values() if token is not None]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = settings.get(key) or []
            tokens += more.values() if isinstance(more, dict) else more
        following = len(vocabulary)
        for id, token in [*rows, *((None, token) for token in tokens)]:
            name = content(token)
            if name in added:
                added[name]["special"] |= id is None
                continue
            number = vocabulary.get(name, following)
            if id not in (None, number):
                problem = f"the id of {name!r:.80} is {id}, but its place is {number}"
                raise ModelError(f"{file}: {problem}")
            flags = token if isinstance(token, dict) else {}
            special = id is None or bool(flags.get("special"))
            strips = {key: bool(flags.get(key)) for key in ("single_word", "lstrip", "rstrip")}
            normalized = bool(flags.get("normalized", not special))
            added[name] = {"id": number, "content": name, "special": special, **strips}
            added[name]["normalized"] = normalized
            following = max(following, number + 1)
        return sorted(added.values(), key=lambda new: new["id"])
    except (TypeError, ValueError, AttributeError, KeyError):
        raise ModelError(f"{file}: the special tokens of its folder are not valid") from None


def content(token: Any) -> str:
    """The text of a special token, which is a string or an object."""
    name = token["content"] if isinstance(token, dict) else token
    if not isinstance(name, str) or not name:
        raise ValueError
    return name
