"""Messages between the workers of one group: point to point, each behind a header that says what it is.

The receiver knows from the plan what has to come, so any difference is a :class:`~trainer.errors.ProtocolError` and
ends the group. There are no barriers. A :class:`Group` frames and counts; how bytes travel is its subclass's affair:
gloo between processes, queues between threads of one process.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from threading import Condition
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor

from ckptstore.errors import UsageError
from trainer.errors import PeerLostError, ProtocolError

MAGIC = 0x636B7074  # "ckpt"
VERSION = 1
_FIELDS = (
    "magic",
    "version",
    "generation",
    "update",
    "microbatch",
    "kind",
    "source",
    "destination",
    "dtype",
    "rows",
    "positions",
    "width",
    "payload bytes",
    "checksum",
)
_HEADER = 16  # int64 words; the last two are reserved and 0
_PAYLOAD = 1 << 25  # keeps the tags of payloads apart from those of headers
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2, torch.int64: 3}


class Channel(IntEnum):
    """What a message carries."""

    ACTIVATION = 0
    GRADIENT = 1
    NUMBERS = 2  # float64, everybody to everybody
    WORDS = 3  # int64 or float64 from rank 0 to all


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload bytes of boundary tensors (activations and their gradients) that one worker sent and received."""

    sent: int
    received: int


class Group(ABC):
    """One worker's end of a group of ``world`` workers. Not to be used again after any error.

    Args:
        rank, world: this worker's number and how many there are.
        generation: number of this incarnation of the group; a message of another one is refused.
        device: where received tensors are put. Tensors elsewhere than on the CPU travel through a copy there.
    """

    def __init__(self, rank: int, world: int, generation: int, device: torch.device | str) -> None:
        self.rank, self.world, self.generation = rank, world, generation
        self.device = torch.device(device)
        self._sent = self._received = 0

    @property
    def traffic(self) -> Traffic:
        """Boundary bytes since the group was made."""
        return Traffic(self._sent, self._received)

    def send(self, tensor: Tensor, peer: int, channel: Channel, update: int, micro: int) -> None:
        """Send a float32, bfloat16, float64 or int64 tensor of up to 3 dimensions; returns before it has arrived."""
        # A copy of its own: the caller may change the tensor before the message has left.
        payload = tensor.detach().to("cpu", copy=True).contiguous()
        header = self._header(payload.shape, payload.dtype, self.rank, peer, channel, update, micro)
        header[13] = zlib.crc32(raw_bytes(payload))
        # One tag for all headers of a channel, so a peer that is elsewhere in the plan is noticed at once and not by
        # timeout.
        self._put(torch.tensor(header, dtype=torch.int64), peer, int(channel))
        self._put(payload, peer, _tag(channel, update, micro))
        if channel in (Channel.ACTIVATION, Channel.GRADIENT):
            self._sent += header[12]

    def recv(
        self, shape: Sequence[int], dtype: torch.dtype, peer: int, channel: Channel, update: int, micro: int
    ) -> Tensor:
        """Wait for exactly this message of ``peer`` and return it on the group's device.

        Raises:
            ProtocolError: another message came; names each field with expected and received value.
            PeerLostError: nothing came in time, or the peer is gone.
        """
        expected = self._header(shape, dtype, peer, self.rank, channel, update, micro)
        header = torch.empty(_HEADER, dtype=torch.int64)
        self._take(header, peer, int(channel))
        seen: list[int] = header.tolist()
        wrong = [
            f"{name} is {b} instead of {a}" for name, a, b in zip(_FIELDS[:13], expected, seen, strict=False) if a != b
        ]
        if wrong:
            raise ProtocolError(
                f"{channel.name.lower()} from shard {peer} to shard {self.rank}, update {update}, microbatch {micro}",
                "; ".join(wrong),
                "the workers follow different plans; abort the group and start a fresh one",
            )
        payload = torch.empty(tuple(shape), dtype=dtype)
        self._take(payload, peer, _tag(channel, update, micro))
        checksum = zlib.crc32(raw_bytes(payload))
        if checksum != seen[13]:
            raise ProtocolError(
                f"{channel.name.lower()} from shard {peer} to shard {self.rank}, update {update}, microbatch {micro}",
                f"checksum of the payload is {checksum:#010x} instead of {seen[13]:#010x}",
                "the bytes changed on the way; abort the group and start a fresh one",
            )
        if channel in (Channel.ACTIVATION, Channel.GRADIENT):
            self._received += expected[12]
        return payload.to(self.device)

    def exchange(
        self, values: Sequence[float], sizes: Sequence[int], update: int, slot: int = 0
    ) -> tuple[tuple[float, ...], ...]:
        """Give ``values`` to all and return every rank's values, by rank; ``sizes`` says how many each rank has.

        Args:
            values: this rank's numbers; they travel as float64, bit for bit.
            sizes: one length a rank, known to all from the plan.
            update, slot: which exchange this is.
        """
        if len(values) != sizes[self.rank] or len(sizes) != self.world:
            raise UsageError("exchange", f"{len(values)} values on rank {self.rank} where the plan has {tuple(sizes)}")
        mine = torch.tensor(values, dtype=torch.float64)
        for peer in self._others():
            self.send(mine, peer, Channel.NUMBERS, update, slot)
        return tuple(
            tuple(mine.tolist())
            if peer == self.rank
            else tuple(self.recv((sizes[peer],), torch.float64, peer, Channel.NUMBERS, update, slot).tolist())
            for peer in range(self.world)
        )

    def broadcast_words(self, words: Sequence[int], update: int, slot: int) -> tuple[int, ...]:
        """Return rank 0's ``words`` (64 bits each) on every rank; the others pass as many of any value."""
        return tuple(int(w) for w in self._broadcast(torch.tensor(words, dtype=torch.int64), update, slot))

    def broadcast_numbers(self, values: Sequence[float], update: int, slot: int) -> tuple[float, ...]:
        """Return rank 0's float64 ``values`` on every rank; the others pass as many of any value."""
        return tuple(float(v) for v in self._broadcast(torch.tensor(values, dtype=torch.float64), update, slot))

    def _broadcast(self, tensor: Tensor, update: int, slot: int) -> list[float]:
        if self.rank == 0:
            for peer in self._others():
                self.send(tensor, peer, Channel.WORDS, update, slot)
        else:
            tensor = self.recv(tensor.shape, tensor.dtype, 0, Channel.WORDS, update, slot)
        values: list[float] = tensor.tolist()
        return values

    def drain(self) -> None:  # noqa: B027 - nothing to wait for where sending copies
        """Wait until everything sent has left this process."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group in an orderly way, after the last message. After an error: end the process instead."""

    @abstractmethod
    def _put(self, tensor: Tensor, peer: int, tag: int) -> None: ...

    @abstractmethod
    def _take(self, into: Tensor, peer: int, tag: int) -> None: ...

    def _others(self) -> list[int]:
        return [peer for peer in range(self.world) if peer != self.rank]

    def _header(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        source: int,
        destination: int,
        channel: Channel,
        update: int,
        micro: int,
    ) -> list[int]:
        if len(shape) > 3 or dtype not in _DTYPES:
            raise UsageError("message", f"a tensor {tuple(shape)} of {dtype} has no place in the header")
        sides = [1] * (3 - len(shape)) + list(shape)
        size = sides[0] * sides[1] * sides[2] * dtype.itemsize
        words = [MAGIC, VERSION, self.generation, update, micro, int(channel), source, destination, _DTYPES[dtype]]
        return [*words, *sides, size, 0, 0, 0]


class GlooGroup(Group):
    """Between processes, over the default process group of ``torch.distributed`` (backend gloo)."""

    def __init__(self, generation: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), generation, device)
        self._pending: deque[tuple[dist.Work, Tensor, int]] = deque()  # gloo reads the tensors until the work is done

    def _put(self, tensor: Tensor, peer: int, tag: int) -> None:
        while self._pending and self._pending[0][0].is_completed():
            self._finish()
        try:
            work = dist.isend(tensor, peer, tag=tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        assert work is not None
        self._pending.append((work, tensor, peer))

    def _take(self, into: Tensor, peer: int, tag: int) -> None:
        try:
            dist.recv(into, peer, tag=tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def drain(self) -> None:
        while self._pending:
            self._finish()

    def close(self) -> None:
        self.drain()
        dist.destroy_process_group()

    def _finish(self) -> None:
        work, _, peer = self._pending[0]
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        self._pending.popleft()

    def _lost(self, peer: int, error: RuntimeError) -> PeerLostError:
        return PeerLostError(
            f"shard {peer}, seen from shard {self.rank}",
            str(error).splitlines()[0],
            "abort the group; restore the last checkpoint in a fresh one",
        )


class LocalGroup(Group):
    """Between threads of one process; also the group of a worker that is alone."""

    def __init__(self, rank: int, exchange: _Exchange, generation: int, device: torch.device | str) -> None:
        super().__init__(rank, exchange.world, generation, device)
        self._exchange = exchange

    def _put(self, tensor: Tensor, peer: int, tag: int) -> None:
        with self._exchange.changed:
            self._exchange.boxes.setdefault((self.rank, peer, tag), deque()).append(tensor)
            self._exchange.changed.notify_all()

    def _take(self, into: Tensor, peer: int, tag: int) -> None:
        box, ends = (peer, self.rank, tag), monotonic() + self._exchange.timeout
        with self._exchange.changed:
            while not self._exchange.boxes.get(box):
                if self._exchange.broken or not self._exchange.changed.wait(ends - monotonic()):
                    why = (
                        "the group was aborted"
                        if self._exchange.broken
                        else f"no message in {self._exchange.timeout} s"
                    )
                    raise PeerLostError(f"shard {peer}, seen from shard {self.rank}", why)
            into.copy_(self._exchange.boxes[box].popleft())

    def abort(self) -> None:
        """Wake every member that waits for a message; it gets PeerLostError."""
        with self._exchange.changed:
            self._exchange.broken = True
            self._exchange.changed.notify_all()

    def close(self) -> None:
        pass


class _Exchange:
    """Where the threads of a local group leave messages for each other."""

    def __init__(self, world: int, timeout: float) -> None:
        self.world, self.timeout = world, timeout
        self.boxes: dict[tuple[int, int, int], deque[Tensor]] = {}
        self.changed = Condition()
        self.broken = False


def local_groups(
    world: int, *, timeout: float = 60.0, generation: int = 0, device: torch.device | str = "cpu"
) -> tuple[LocalGroup, ...]:
    """The ``world`` ends of a new group inside this process, to be used by one thread each."""
    exchange = _Exchange(world, timeout)
    return tuple(LocalGroup(rank, exchange, generation, device) for rank in range(world))


def connect(*, timeout: float = 60.0, generation: int = 0, device: torch.device | str = "cpu") -> Group:
    """Join the group that the environment describes (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``).

    Every launcher of torch workers sets these. A world of one makes no process group.

    Args:
        timeout: seconds until a peer that does not answer counts as lost; also for joining.

    Raises:
        UsageError: a variable is missing or no number.
        PeerLostError: the others did not come in time.
    """
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise UsageError("process group", f"RANK or WORLD_SIZE is unset or no number ({error})") from error
    if not 0 <= rank < world:
        raise UsageError("process group", f"rank {rank} in a world of {world}", "set RANK and WORLD_SIZE")
    if world == 1:
        return local_groups(1, timeout=timeout, generation=generation, device=device)[0]
    try:
        dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=timeout))
    except ValueError as error:
        raise UsageError("process group", str(error).splitlines()[0], "set MASTER_ADDR and MASTER_PORT") from error
    except RuntimeError as error:
        raise PeerLostError(f"group of {world}, seen from shard {rank}", str(error).splitlines()[0]) from error
    return GlooGroup(generation, device)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor in memory order, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _tag(channel: Channel, update: int, micro: int) -> int:
    return _PAYLOAD | (update & 0xFFF) << 12 | (micro & 0x3FF) << 2 | channel
