"""Live tensors as bytes and back: which kinds are stored, their bytes chunk by chunk, and tensors inside values."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ckptstore.errors import RefusedError
from ckptstore.format import canonical, values
from ckptstore.format.canonical import MAX_DEPTH
from ckptstore.format.page import Role, ValueEntry, show_role
from ckptstore.format.tensors import CHUNK, MAX_CHUNKS
from ckptstore.format.values import VALUE_TENSOR_LIMIT, EntryRef, TensorValue

DTYPES: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.uint16: "u16",
    torch.int16: "i16",
    torch.uint32: "u32",
    torch.int32: "i32",
    torch.uint64: "u64",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e5m2: "f8e5m2",
    torch.float8_e4m3fnuz: "f8e4m3fnuz",
    torch.float8_e5m2fnuz: "f8e5m2fnuz",
    torch.complex32: "c32",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
if hasattr(torch, "float8_e8m0fnu"):
    DTYPES[torch.float8_e8m0fnu] = "f8e8m0fnu"

TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_NEGATED = frozenset((torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128))
"""Element types whose negative views torch can read; only the imaginary part of a conjugate is one in practice."""

DEVICES = ("cpu", "cuda")
"""Kinds of devices whose generators the format names; training elsewhere would lose its random numbers."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A live tensor that becomes an entry, with the marks by which a change of it while it is written is seen."""

    path: str
    role: Role
    tensor: Tensor
    version: int
    address: int

    @classmethod
    def of(cls, path: str, role: Role, tensor: Tensor) -> TensorSource:
        """The source of ``tensor`` as it is now."""
        return cls(path, role, tensor, _version(tensor), tensor.data_ptr())

    @property
    def name(self) -> str:
        """Role and path, for messages."""
        return f"{show_role(self.role)} {self.path!r:.120}"

    def is_changed(self) -> bool:
        """Whether torch wrote to the tensor, or gave it another memory, since this source was made."""
        return (_version(self.tensor), self.tensor.data_ptr()) != (self.version, self.address)


def _version(tensor: Tensor) -> int:
    """How often torch has written to the tensor in place; what was made in inference mode does not count."""
    return -1 if tensor.is_inference() else tensor._version


def type_name(item: object) -> str:
    """Qualified name of the type of ``item``."""
    return f"{type(item).__module__}.{type(item).__qualname__}"


def check_tensor(tensor: Tensor, where: str) -> None:
    """RefusedError naming ``where`` and the reason, if ``tensor`` is of a kind that format 1 does not store exactly."""
    reason = ""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        reason = f"a tensor of the subclass {type_name(tensor)}"
        if torch.nn.parameter.is_lazy(tensor):
            reason = "a tensor of a lazy module that saw no batch yet"
    elif tensor.is_meta:
        reason = "a meta tensor, which has no values,"
    elif tensor.layout is not torch.strided:
        reason = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        reason = "a quantised tensor"
    elif tensor.is_nested:
        reason = "a nested tensor"
    elif tensor.dtype not in DTYPES:
        reason = f"a tensor of dtype {tensor.dtype}"
    elif tensor.is_neg() and tensor.dtype not in _NEGATED:
        reason = f"a negative view of dtype {tensor.dtype}"
    elif tensor.device.type not in DEVICES:
        reason = f"the generator of a {tensor.device.type} device has no name in format 1: state that is trained there"
    elif tensor.numel() * tensor.element_size() > MAX_CHUNKS * CHUNK:
        reason = f"a tensor of more than {MAX_CHUNKS} chunks (256 GiB)"
    else:
        reason = _memory_problem(tensor)
    if reason:
        raise RefusedError(where, f"{reason} cannot be stored exactly", "leave it out or convert it before saving")


def _memory_problem(tensor: Tensor) -> str:
    """What keeps the elements of a strided tensor from being read; empty if nothing does."""
    if torch._is_functional_tensor(tensor):
        return "a tensor of a function transform, whose values stand elsewhere,"
    try:
        held = tensor.untyped_storage().nbytes()
    except RuntimeError:
        return "a tensor of a function transform, which has no memory of its own,"
    if tensor.numel():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        # Sharded trainers free the memory of what they gather again later; reading there would be reading anything.
        if (tensor.storage_offset() + last + 1) * tensor.element_size() > held:
            return "a tensor whose memory was freed"
    return ""


def bits(tensor: Tensor) -> Tensor:
    """``tensor``, no conjugate or negative view, as integers with its bits and its layout (a complex128: as pairs).

    A copy of these has the same bits; one of a bool, for one, has not (2 becomes 1).
    """
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_INTEGERS[tensor.element_size()])


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The logical row-major little-endian bytes of ``tensor`` in chunks of 16 MiB, each on the CPU.

    Contiguous CPU tensors are not copied; others are copied one chunk's worth at a time.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        flat = tensor.reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), CHUNK):
            yield memoryview(flat[start : start + CHUNK].cpu().numpy())  # type: ignore[arg-type]
        return
    chunk = bytearray()
    for piece in _pieces(tensor):
        plain_piece = bits(piece.resolve_conj().resolve_neg()).cpu().contiguous()
        data = memoryview(plain_piece.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        while len(data):
            taken = data[: CHUNK - len(chunk)]
            chunk += taken
            data = data[len(taken) :]
            if len(chunk) == CHUNK:
                yield memoryview(chunk)
                chunk = bytearray()
    if chunk:
        yield memoryview(chunk)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of ``tensor`` of at most about one chunk, in row-major order."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= CHUNK or tensor.dim() == 0:
        yield tensor
        return
    rows = max(1, tensor.shape[0] * CHUNK // nbytes)
    for start in range(0, tensor.shape[0], rows):
        part = tensor.narrow(0, start, min(rows, tensor.shape[0] - start))
        if part.shape[0] == 1 and part.numel() * part.element_size() > CHUNK:
            yield from _pieces(part[0])
        else:
            yield part


def tensor_value(tensor: Tensor, where: str) -> TensorValue:
    """A small tensor as a value, for state dicts that hold tensors."""
    check_tensor(tensor, where)
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > VALUE_TENSOR_LIMIT:
        why = f"a tensor of {nbytes} bytes inside a value, over the limit of {VALUE_TENSOR_LIMIT}"
        raise RefusedError(where, why, "make it a buffer of a module that is saved")
    return TensorValue(DTYPES[tensor.dtype], tuple(tensor.shape), b"".join(chunks(tensor)))


def value_tensor(value: TensorValue) -> Tensor:
    """The tensor of a value, on the CPU."""
    flat = torch.empty(len(value.data), dtype=torch.uint8, device="cpu")
    flat.numpy()[:] = memoryview(value.data)
    return flat.view(TORCH_DTYPES[value.dtype]).reshape(value.shape)


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """``value`` with every tensor in it replaced by a tensor value. Containers keep their exact types.

    Raises:
        RefusedError: a tensor in it cannot be stored exactly, or it is nested too deeply.
    """
    check_depth(depth, where)
    if isinstance(value, Tensor):
        return tensor_value(value, where)
    if type(value) in (list, tuple):
        return type(value)(plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value))
    if type(value) in _MAPPINGS:
        copy = value.copy()
        for key, item in value.items():
            copy[key] = plain(item, f"{where}[{key!r:.60}]", depth + 1)
        return copy
    return value


def live(value: Any) -> Any:
    """The inverse of :func:`plain`."""
    if type(value) is TensorValue:
        return value_tensor(value)
    if type(value) in (list, tuple):
        return type(value)(live(item) for item in value)
    if type(value) in _MAPPINGS:
        copy = value.copy()
        for key, item in value.items():
            copy[key] = live(item)
        return copy
    return value


def lift(value: Any, where: str, suffix: tuple[str, ...] = ()) -> tuple[Any, list[tuple[tuple[str, ...], Tensor]]]:
    """``value`` with a reference in the place of every tensor, and those tensors with their suffixes (F-44).

    A suffix is the way to the tensor: positions in lists and tuples, keys of mappings. Where a mapping has keys that
    are no texts, all its keys are written as typed values.

    Raises:
        RefusedError: a tensor or a key cannot be stored exactly, or it is nested too deeply.
    """
    check_depth(len(suffix), where)
    if isinstance(value, Tensor):
        check_tensor(value, where)
        return EntryRef(suffix), [(suffix, value)]
    found: list[tuple[tuple[str, ...], Tensor]] = []

    def part(item: Any, key: object, name: str) -> Any:
        lifted, tensors = lift(item, f"{where}[{key!r:.60}]", (*suffix, name))
        found.extend(tensors)
        return lifted

    if type(value) in (list, tuple):
        return type(value)(part(item, i, str(i)) for i, item in enumerate(value)), found
    if type(value) in _MAPPINGS:
        copy = value.copy()
        texts = all(type(key) is str for key in value)
        for key, item in value.items():
            name = key if texts else canonical.encode(values.to_json(key, f"{where} key")).decode()
            copy[key] = part(item, key, name)
        return copy, found
    return value, found


def state_entries(path: str, role: Role, value: Any) -> tuple[list[TensorSource], list[ValueEntry]]:
    """The entries of a state value: a tensor is one; anything else is a value whose tensors are entries below its role.

    Raises:
        RefusedError: it cannot be stored exactly.
    """
    where = f"{show_role(role)} {path!r:.120}"
    lifted, found = lift(value, where)
    sources = [TensorSource.of(path, role + suffix, tensor) for suffix, tensor in found]
    return sources, [] if isinstance(value, Tensor) else [ValueEntry(path, role, values.to_json(lifted, where))]


def put_back(value: Any, tensor: Callable[[tuple[str, ...]], Tensor]) -> Any:
    """The inverse of :func:`lift`: ``tensor`` gives the tensor of a suffix."""
    if type(value) is EntryRef:
        return tensor(value.suffix)
    if type(value) in (list, tuple):
        return type(value)(put_back(item, tensor) for item in value)
    if type(value) in _MAPPINGS:
        copy = value.copy()
        for key, item in value.items():
            copy[key] = put_back(item, tensor)
        return copy
    return live(value)


def check_depth(depth: int, where: str) -> None:
    """RefusedError for what is nested deeper than any document, above all for what contains itself."""
    if depth > MAX_DEPTH:
        raise RefusedError(where[:200], f"nested deeper than {MAX_DEPTH}, or it contains itself", "store plain values")


_MAPPINGS = (dict, OrderedDict, Counter)
