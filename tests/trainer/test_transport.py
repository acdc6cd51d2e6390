"""Messages between workers, over the group that lives in one process."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from ckptstore.errors import UsageError
from trainer.compute.transport import Channel, LocalGroup, Traffic, connect, local_groups
from trainer.errors import PeerLostError, ProtocolError

SENT: dict[str, Any] = {"channel": Channel.ACTIVATION, "update": 5, "micro": 2}


def pair(**options: Any) -> tuple[LocalGroup, LocalGroup]:
    zero, one = local_groups(2, timeout=options.pop("timeout", 5.0), **options)
    return zero, one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_message_arrives_bit_for_bit(dtype: torch.dtype) -> None:
    zero, one = pair()
    tensor = torch.tensor([[1.5, -0.0, 3.0], [7.0, 0.1, 1e30]]).to(dtype)
    zero.send(tensor, 1, **SENT)
    got = one.recv((2, 3), dtype, 0, **SENT)
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


def test_what_is_sent_is_the_value_of_that_moment() -> None:
    zero, one = pair()
    tensor = torch.ones(3)
    zero.send(tensor, 1, **SENT)
    tensor.fill_(9)
    assert one.recv((3,), torch.float32, 0, **SENT).tolist() == [1, 1, 1]


def test_a_tensor_that_is_a_view_with_strides_arrives_in_order() -> None:
    zero, one = pair()
    zero.send(torch.arange(6.0).reshape(2, 3).T, 1, **SENT)
    assert one.recv((3, 2), torch.float32, 0, **SENT).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("expect", "field"),
    [
        ({"update": 6}, "update is 5 instead of 6"),
        ({"update": 5 + 4096}, "update is 5 instead of 4101"),
        ({"micro": 3}, "microbatch is 2 instead of 3"),
        ({"micro": 2 + 1024}, "microbatch is 2 instead of 1026"),
        ({"dtype": torch.bfloat16}, "dtype is 0 instead of 1"),
        ({"shape": (1, 4, 7)}, "width is 8 instead of 7"),
        ({"shape": (2, 2, 8)}, "rows is 1 instead of 2; positions is 4 instead of 2"),
    ],
)
def test_a_message_other_than_the_plan_has_it_is_a_protocol_error(expect: dict[str, Any], field: str) -> None:
    zero, one = pair()
    zero.send(torch.zeros(1, 4, 8), 1, **SENT)
    wanted = {"shape": (1, 4, 8), "dtype": torch.float32, "peer": 0, **SENT, **expect}
    with pytest.raises(ProtocolError, match=field):
        one.recv(**wanted)


def test_a_member_of_another_generation_is_refused() -> None:
    zero, one = pair()
    zero.generation = 3
    zero.send(torch.zeros(2), 1, **SENT)
    with pytest.raises(ProtocolError, match="generation is 3 instead of 0"):
        one.recv((2,), torch.float32, 0, **SENT)


def test_a_payload_that_changes_on_the_way_is_refused() -> None:
    zero, one = pair()
    zero.send(torch.zeros(2), 1, **SENT)
    payload = max(zero._exchange.boxes.items())[1][0]
    payload[1] = 1
    with pytest.raises(ProtocolError, match="checksum"):
        one.recv((2,), torch.float32, 0, **SENT)


def test_boundary_bytes_are_counted_and_control_messages_are_not() -> None:
    zero, one = pair()
    zero.send(torch.zeros(2, 3, 4, dtype=torch.bfloat16), 1, Channel.ACTIVATION, 1, 0)
    one.recv((2, 3, 4), torch.bfloat16, 0, Channel.ACTIVATION, 1, 0)
    one.send(torch.zeros(2, 3, 4), 0, Channel.GRADIENT, 1, 0)
    zero.recv((2, 3, 4), torch.float32, 1, Channel.GRADIENT, 1, 0)
    one.send(torch.zeros(9, dtype=torch.float64), 0, Channel.NUMBERS, 1, 0)
    assert (zero.traffic, one.traffic) == (Traffic(48, 96), Traffic(96, 48))


def test_an_exchange_gives_everybody_everybodys_numbers_bit_for_bit(runs: Any) -> None:
    values = [(0.1, -0.0), (), (1e-320, 2.0**60 + 1, float("inf"))]
    got = runs.in_threads(local_groups(3), lambda g: g.exchange(values[g.rank], (2, 0, 3), update=4))
    hexes = [[[v.hex() for v in row] for row in seen] for seen in got]
    assert hexes == [[[float(v).hex() for v in row] for row in values]] * 3


def test_an_exchange_of_another_length_than_planned_is_refused() -> None:
    with pytest.raises(UsageError, match="exchange"):
        local_groups(1)[0].exchange([1.0], (2,), update=0)


def test_a_broadcast_is_the_word_of_rank_0(runs: Any) -> None:
    words = [(2**62, -1), (0, 0), (0, 0)]
    assert runs.in_threads(local_groups(3), lambda g: g.broadcast_words(words[g.rank], 1, 0)) == [(2**62, -1)] * 3
    numbers = [(0.1, 5e-324), (0.0, 0.0)]
    assert runs.in_threads(local_groups(2), lambda g: g.broadcast_numbers(numbers[g.rank], 1, 0)) == [(0.1, 5e-324)] * 2


def test_a_silent_peer_is_lost_when_the_timeout_passes() -> None:
    zero, _ = pair(timeout=0.01)
    with pytest.raises(PeerLostError, match="no message in"):
        zero.recv((1,), torch.float32, 1, **SENT)


def test_an_abort_wakes_who_waits(runs: Any) -> None:
    def work(group: LocalGroup) -> None:
        if group.rank == 1:
            group.abort()
        else:
            group.recv((1,), torch.float32, 1, **SENT)

    with pytest.raises(PeerLostError, match="aborted"):
        runs.in_threads(local_groups(2), work)


def test_tensors_that_have_no_place_in_the_header_are_refused() -> None:
    zero, _ = pair()
    for tensor in (torch.zeros(1, 1, 1, 1), torch.zeros(1, dtype=torch.float16)):
        with pytest.raises(UsageError, match="no place in the header"):
            zero.send(tensor, 1, **SENT)


def test_a_world_of_one_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    group = connect()
    assert group.exchange([1.0], (1,), 1) == ((1.0,),)
    assert not torch.distributed.is_initialized()
    group.drain()
    group.close()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "0"},
        {"RANK": "x", "WORLD_SIZE": "1"},
        {"RANK": "1", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "garbage"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"},
    ],
)
def test_an_environment_that_describes_no_group_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="process group"):
        connect()


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(PeerLostError, match=rf"port: {port}.*address already in use"):
            connect(timeout=1.0)


def test_a_group_that_nobody_else_joins_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # not listening: nobody hosts the rendezvous
        port = held.getsockname()[1]
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(PeerLostError, match="group of 2, seen from shard 1"):
            connect(timeout=1.0)
