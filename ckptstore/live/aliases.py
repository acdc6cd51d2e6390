"""Aliases: which tensors are one and the same memory, and which share a part of it and so cannot be told apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from ckptstore.errors import RefusedError


@dataclass(frozen=True, slots=True)
class _Span:
    """Addresses that a tensor's elements lie between, in bytes."""

    start: int
    end: int
    name: str
    tensor: Tensor


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Owner of each name: identical views of one memory belong to the bytewise smallest name.

    Memory decides, not storage objects: two arrays that torch wrapped apart may be one.

    Raises:
        RefusedError: two views have an element in common and are not identical.
    """
    owners: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    spans: dict[str, list[_Span]] = {}
    for name in sorted(tensors, key=str.encode):
        tensor = tensors[name]
        view = _view(tensor)
        if view not in seen and tensor.numel():
            size = tensor.element_size()
            last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            span = _Span(start, start + (int(last) + 1) * size, name, tensor)
            spans.setdefault(str(tensor.device), []).append(span)
        owners[name] = seen.setdefault(view, name)
    for found in spans.values():
        for cluster in _clusters(found):
            _check_apart(cluster)
    return owners


def _view(tensor: Tensor) -> tuple[object, ...]:
    """What makes two tensors the same view of the same memory. An empty tensor has none, and is only itself."""
    if tensor.numel() == 0:
        return (id(tensor),)
    strides = tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    place = (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), strides)
    return (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _clusters(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Groups of spans that may have bytes in common with one another."""
    cluster: list[_Span] = []
    end = 0
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if cluster and span.start >= end:
            yield cluster
            cluster = []
        cluster.append(span)
        end = max(end, span.end) if len(cluster) > 1 else span.end
    if cluster:
        yield cluster


def _check_apart(cluster: list[_Span]) -> None:
    """RefusedError naming two tensors of a cluster that have a byte in common.

    Every tensor marks its bytes in one map of the cluster's memory, and looks first whether one is marked already.
    """
    if len(cluster) == 1:
        return
    for index, span in enumerate(_marked(cluster)):
        if span is None:
            continue
        for other in cluster[:index]:
            if any(_marked([other, span])):
                raise RefusedError(
                    f"tensors {other.name!r:.120} and {span.name!r:.120}",
                    "they are views of one storage that overlap and are not identical",
                    "save the storage's owner and make the views from it",
                )


def _marked(spans: list[_Span]) -> Iterator[_Span | None]:
    """Each span that has a byte in common with an earlier one, None for each that has not."""
    base = min(span.start for span in spans)
    # The largest step in which all elements begin and end.
    unit = gcd(*(number for span in spans for number in (span.tensor.element_size(), span.start - base)))
    marks = torch.zeros((max(span.end for span in spans) - base) // unit, dtype=torch.bool, device="cpu")
    for span in spans:
        size = span.tensor.element_size() // unit
        # an expanded dimension is one element
        steps = span.tensor.stride()
        shape = [1 if step == 0 else length for length, step in zip(span.tensor.shape, steps, strict=True)]
        strides = [step * size for step in steps]
        mine = marks.as_strided((*shape, size), (*strides, 1), (span.start - base) // unit)
        yield span if bool(mine.any()) else None
        mine.fill_(True)
