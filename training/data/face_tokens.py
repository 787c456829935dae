"""The last layer of the small models' image tower: from expression logits to tokens that a language model can read.

A classifier's logits are mapped onto the embeddings of words for the classes: a token points towards "happy" as far
as the tower's logits do. The map is linear, so it becomes the tower's last layer.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.data.faces import FACE_CLASSES

WORDS = {
    "angry": "angry",
    "disgust": "disgusting",
    "fear": "anxious",
    "happy": "happy",
    "neutral": "fine",
    "sad": "depressed",
    "surprise": "surprised",
}
"""For each class a word that seekers use, or a similar one."""


def even_handed(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a bias on the logits with which each class is predicted as often as it occurs.

    An unsure classifier over-predicts frequent and easy classes and rarely predicts fear and sadness.

    Args:
        logits: Shape (photos, classes).
        labels: Their classes, shape (photos).

    Returns:
        Shape (classes), with mean 0.
    """
    classes = logits.shape[-1]
    frequencies = torch.bincount(labels, minlength=classes) / len(labels)
    bias = torch.zeros(classes)
    for _ in range(300):
        predicted = torch.bincount((logits + bias).argmax(-1), minlength=classes) / len(labels)
        bias -= 0.2 * torch.log((predicted + 1e-3) / (frequencies + 1e-3))
    return bias - bias.mean()


def embeddings_of(model: PreTrainedModel) -> Tensor:
    """Return a copy of a language model's input embeddings, shape (tokens, width)."""
    weight: Tensor = model.get_input_embeddings().get_parameter("weight")
    return weight.detach().clone()


def word_vectors(embeddings: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return the embedding of each class's word, shape (classes, width); the mean of several tokens."""
    vectors = []
    for name in FACE_CLASSES:
        ids = tokenizer(f" {WORDS[name]}", add_special_tokens=False)["input_ids"]
        vectors.append(embeddings[torch.tensor(ids)].mean(0))
    return torch.stack(vectors)


def _directions(words: Tensor) -> Tensor:
    apart = words - words.mean(0)
    return nn.functional.normalize(apart, dim=-1)


def speaking_layer(
    head: nn.Linear, added: Tensor, logits: Tensor, words: Tensor, length: float
) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a layer that replaces a classification head and outputs tokens.

    The mean photo maps to the mean word. The deviation of a photo from it has on average the norm of a word.

    Args:
        head: Maps values to logits (classes).
        added: Bias on the logits, shape (classes).
        logits: The head's outputs for some photos, shape (photos, classes).
        words: Embeddings of the classes' words, shape (classes, width).
        length: Mean norm of a word.

    Returns:
        Shapes (width, values) and (width).
    """
    classes = len(words)
    directions = _directions(words)
    centring = torch.eye(classes) - 1 / classes
    leanings = (logits + added) @ centring
    mean = leanings.mean(0)
    scaled = directions * (length / ((leanings - mean) @ directions).norm(dim=-1).mean())
    weight = scaled.T @ centring @ head.weight
    bias = words.mean(0) + scaled.T @ (centring @ (head.bias + added) - mean)
    return weight.detach(), bias.detach()
