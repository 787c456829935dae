"""What the image tower of COMPEER-nano says of a face becomes tokens that its language model can learn to read.

A classifier's logits are laid along the embeddings of words for the classes: a token leans towards "happy" as far
as the tower leans towards the class. All of it is linear, so it becomes the tower's last layer.
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
"""For each class a word that seekers use, or the likes of it."""


def even_handed(logits: Tensor, labels: Tensor) -> Tensor:
    """Return what to add to logits, so that each class is named as often as it is there.

    A classifier that is unsure names the frequent and the plain classes, and afraid and sad faces seldom.

    Args:
        logits: Of photos, shape (photos, classes).
        labels: Their classes, shape (photos).

    Returns:
        Shape (classes), of mean 0.
    """
    classes = logits.shape[-1]
    there = torch.bincount(labels, minlength=classes) / len(labels)
    added = torch.zeros(classes)
    for _ in range(300):
        named = torch.bincount((logits + added).argmax(-1), minlength=classes) / len(labels)
        added -= 0.2 * torch.log((named + 1e-3) / (there + 1e-3))
    return added - added.mean()


def embeddings_of(model: PreTrainedModel) -> Tensor:
    """Return a copy of a language model's input embeddings, shape (tokens, width)."""
    weight: Tensor = model.get_input_embeddings().get_parameter("weight")
    return weight.detach().clone()


def word_vectors(embeddings: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return the embedding of each class's word, shape (classes, width); the mean where it has several tokens."""
    found = []
    for name in FACE_CLASSES:
        places = tokenizer(f" {WORDS[name]}", add_special_tokens=False)["input_ids"]
        found.append(embeddings[torch.tensor(places)].mean(0))
    return torch.stack(found)


def _directions(words: Tensor) -> Tensor:
    apart = words - words.mean(0)
    return nn.functional.normalize(apart, dim=-1)


def speaking_layer(
    head: nn.Linear, added: Tensor, logits: Tensor, words: Tensor, length: float
) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a layer that makes tokens of what a head makes logits of.

    The mean photo becomes the mean word. What sets a photo apart from it is on average as long as a word.

    Args:
        head: Makes logits, (classes), of what comes before it, (values).
        added: To be added to the logits, shape (classes).
        logits: What the head makes of some photos, shape (photos, classes).
        words: Vectors of the classes' words, shape (classes, width).
        length: How long a word is.

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
