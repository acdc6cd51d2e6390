"""Stores in buckets under test: reached through a proxy, with a model whose weights are objects, and interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

import ckptstore
from ckptstore.backends.traffic import Traffic
from ckptstore.store import Store
from tests.support import s3 as server
from tests.support.faultactions import Blackhole, Call
from tests.support.faultproxy import FaultProxy
from tests.support.http1 import Request


def through(proxy: FaultProxy, s3: server.SharedServer, prefix: str, **options: str) -> Store:
    """The store below ``prefix``, made if need be, by way of the proxy."""
    ckptstore.open(s3.url(prefix), create=True)
    return ckptstore.open(s3.url(prefix, endpoint_url=proxy.endpoint, addressing="path", **options))


def layers(value: float = 0.0) -> nn.ParameterList:
    """Six weights, each an object of its own."""
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(300, 300) + value) for _ in range(6)])


def traffic(store: Store) -> Traffic:
    assert store.traffic is not None
    return store.traffic


def missing(store: Store) -> list[str]:
    """What a ref of the store leads to and is not there whole."""
    return [str(f) for name in store.refs.names() for f in store.verify(name).findings]


@contextmanager
def interrupted_when(proxy: FaultProxy, method: str, path: str) -> Iterator[None]:
    """Ctrl-C at the first such request, which hangs."""

    def interrupt(_request: Request) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    proxy.add(Call(before=interrupt), method=method, path=path, times=1)
    proxy.add(Blackhole(), method=method, path=path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
