"""Number of threads of a model within a stage.

The demo generates a single turn of a small model with one thread (`compeer_core.model_pool`). A stage has the
machine to itself.
"""

import torch

from compeer_core.backends.transformers_.model import ChatModel


def use_all_threads(chat: ChatModel) -> None:
    """Let a model use as many threads as the stage has."""
    threads = torch.get_num_threads()

    def use() -> None:
        chat.threads = None
        torch.set_num_threads(threads)

    chat.owner.call(use)
