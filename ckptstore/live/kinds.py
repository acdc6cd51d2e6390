"""Kinds: what an object of a program is, by its class alone; the object itself is never asked."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from ckptstore.live.rng import GENERATORS

LIVING = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, AveragedModel)
"""What only training makes: found wherever in the process it is."""

_AVERAGE = re.compile(r"ema|.*(ExponentialMovingAverage|Ema(?![a-z])|EMA(?![a-z])).*", re.ASCII)
_TOKENIZER = re.compile(r".*Tokenizer(Fast|Base)?|SentencePieceProcessor", re.ASCII)


def is_asked_for(item: object) -> bool:
    """Whether it is of a kind that a checkpoint has to do with."""
    kind = type(item)
    if issubclass(kind, (*LIVING, *GENERATORS, nn.Module, DataLoader)):
        return True
    return is_stateful(item) or is_tokenizer(item)


def is_stateful(item: object) -> bool:
    """Whether its class has both methods. The object itself is not asked: some make up what they are asked for."""
    kinds = type(item).__mro__
    if issubclass(type(item), type) or str(type(item).__module__).partition(".")[0] == "ckptstore":
        return False
    return all(any(name in vars(kind) for kind in kinds) for name in ("state_dict", "load_state_dict"))


def is_average(item: object) -> bool:
    """Whether it keeps an average of weights: torch's, or one that has a state and is called so."""
    named = _AVERAGE.fullmatch(type(item).__name__) is not None
    return issubclass(type(item), AveragedModel) or (named and is_stateful(item))


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer holds a chat template."""
    template = vars(tokenizer).get("chat_template") if hasattr(tokenizer, "__dict__") else None
    return template is not None


def is_tokenizer(item: object) -> bool:
    """Whether it turns text into numbers, by its name."""
    return _TOKENIZER.fullmatch(type(item).__name__) is not None
