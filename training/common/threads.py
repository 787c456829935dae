"""How many threads a model of a stage computes on.

Where visitors share a machine, small models have one thread each (`compeer_core.model_pool`). A stage
waits for its models and has nothing else to do meanwhile.
"""

from functools import partial

import torch

from compeer_core.backends.transformers_.model import ChatModel


def use_all_threads(chat: ChatModel) -> None:
    """Let a model compute on as many threads as the stage has."""
    chat.owner.call(partial(torch.set_num_threads, torch.get_num_threads()))
