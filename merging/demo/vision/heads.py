"""Heads that are never trained: prototypes of the classes among the base's features.

They play the part that text embeddings play for CLIP. Base, experts and merged models share them,
so that a model's score says where its features are, and nothing else.

Shape letters: B examples, C classes, F features.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from merging.demo.vision.backbone import features_of_all, open_model
from merging.demo.vision.tasks import Pictures

TEMPERATURE = 30.0
"""Logit of a feature that points exactly at its class."""


def head_of(base: Path, pictures: Pictures, classes: int) -> dict[str, Tensor]:
    """The head of a task, from the base's features of its training pictures."""
    features_BF = features_of_all(open_model(base), pictures.pixels)
    return prototype_head(features_BF, torch.from_numpy(pictures.labels), classes)


def prototype_head(features_BF: Tensor, labels_B: Tensor, classes: int) -> dict[str, Tensor]:
    """`weight` [classes, features] and `bias` [classes] of a nearest-prototype classifier by cosine.

    A cosine divides by the length of each feature, which no linear layer can. Dividing by the mean length
    instead scales all logits of an example alike, and so leaves every decision as it was.
    """
    means_CF = torch.stack([features_BF[labels_B == label].mean(0) for label in range(classes)])
    centre_F = means_CF.mean(0)
    directions_CF = F.normalize(means_CF - centre_F, dim=1)
    length = (features_BF - centre_F).norm(dim=1).mean()
    weight_CF = TEMPERATURE / length * directions_CF
    return {"weight": weight_CF, "bias": -weight_CF @ centre_F}
