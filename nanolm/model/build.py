"""From a config to a model with fresh weights."""

from nanolm.model.base import Model
from nanolm.model.config import GPTConfig, ModelConfig, RecurrentConfig
from nanolm.model.gpt import GPT
from nanolm.model.rnn import Recurrent


def build_model(config: ModelConfig) -> Model:
    match config:
        case GPTConfig():
            return GPT(config)
        case RecurrentConfig():
            return Recurrent(config)
    raise TypeError(config)
