"""Models that run in this process, through `transformers`.

`TransformersBackend` writes turns and `TransformersScorer` reads label probabilities. Both stand on
a `ChatModel`: one set of weights with its processor, shared by policies and judges and run by one
`OwnerThread`. `compeer_core.model_pool` makes them.

From the bottom up: `owner_thread` and `track` are how visitors share a model; `chat_template`,
`control_tokens` and `text_decoder` are what has to be known of a checkpoint's template and
tokenizer; `chat_model` joins these to the weights; `choice` samples; `rounds` lets turns share them,
with `joined_cache`; `writing` and `scoring` are the two uses.
"""

from compeer_core.backends.transformers_.generation import TransformersBackend
from compeer_core.backends.transformers_.model import ChatModel
from compeer_core.backends.transformers_.owner_thread import OwnerThread
from compeer_core.backends.transformers_.scheduler import Rounds
from compeer_core.backends.transformers_.scoring import TransformersScorer

__all__ = ["ChatModel", "OwnerThread", "Rounds", "TransformersBackend", "TransformersScorer"]
