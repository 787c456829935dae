"""Models that run in this process, through `transformers`.

`TransformersBackend` generates turns and `TransformersScorer` reads label probabilities. Both use a
`ChatModel`: one set of weights with its processor, shared by policies and judges and run by one
`OwnerThread`. `compeer_core.model_pool` creates them.

From the bottom up: `owner_thread` and `sequence_state` let visitors share a model; `chat_template`
and `tokens` adapt to a checkpoint's template and tokenizer; `model` joins these with the weights;
`sampler` draws tokens; `scheduler` batches turns, with `kv_cache`; `generation` and `scoring` are the
two uses.
"""

from compeer_core.backends.transformers_.generation import TransformersBackend
from compeer_core.backends.transformers_.model import ChatModel
from compeer_core.backends.transformers_.owner_thread import OwnerThread
from compeer_core.backends.transformers_.scheduler import Scheduler
from compeer_core.backends.transformers_.scoring import TransformersScorer

__all__ = ["ChatModel", "OwnerThread", "Scheduler", "TransformersBackend", "TransformersScorer"]
