"""A training process to be killed: ``python -m tests.support.victim KIND STORE REF STEPS``.

Resumes REF, trains to STEPS, saves after every second step, says so on stdout, and prints the last root.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import ckptstore
from tests.support.training import Shuffled, seed_everything


class Convolutional(nn.Module):
    """A small convolutional net."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 5)
        )

    def forward(self, numbers: Tensor) -> Tensor:
        x = torch.sin(numbers.float()[:, None] * torch.arange(1.0, 65.0)).reshape(-1, 1, 8, 8)
        return self.layers(x)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A small transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, numbers: Tensor) -> Tensor:
        tokens = (numbers[:, None] * torch.arange(1, 7)) % 24
        return self.head(self.body(self.embed(tokens))[:, -1])  # type: ignore[no-any-return]


def build(kind: str) -> dict[str, Any]:
    """Model, optimizer, data and, for the transformer, a scheduler."""
    seed_everything()
    data = Shuffled(24, 6)
    if kind == "convolutional":
        model: nn.Module = Convolutional()
        return {"model": model, "data": data, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)}
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    return {"model": model, "data": data, "optimizer": optimizer, "scheduler": scheduler}


def main(kind: str, url: str, ref: str, steps: int) -> None:
    """Train and save."""
    torch.set_num_threads(1)
    objects = build(kind)
    with ckptstore.open(url, create=True).run(ref, **objects) as run:
        step = run.resume()
        while step < steps:
            numbers = objects["data"].next()
            loss = nn.functional.cross_entropy(objects["model"](numbers), numbers % 5)
            objects["optimizer"].zero_grad()
            loss.backward()
            objects["optimizer"].step()
            if "scheduler" in objects:
                objects["scheduler"].step()
            step += 1
            if step % 2 == 0:
                print("saved", step, run.save(step, metrics={"loss": loss.item()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
