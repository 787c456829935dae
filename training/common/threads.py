"""Number of threads of a model within a stage.

The demo gives each small model one thread (`compeer_core.model_pool`), since visitors share the
machine. A stage has the machine to itself.
"""

from functools import partial

import torch

from compeer_core.backends.transformers_.model import ChatModel


def use_all_threads(chat: ChatModel) -> None:
    """Let a model use as many threads as the stage has."""
    chat.owner.call(partial(torch.set_num_threads, torch.get_num_threads()))
