"""Live tensors as bytes and back: which kinds are stored, which share a storage, and their bytes chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ckptstore.errors import RefusedError
from ckptstore.format.canonical import MAX_DEPTH
from ckptstore.format.tensors import CHUNK
from ckptstore.format.values import TensorValue

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


def type_name(item: object) -> str:
    """Qualified name of the type of ``item``."""
    return f"{type(item).__module__}.{type(item).__qualname__}"


def check_tensor(tensor: Tensor, where: str) -> None:
    """RefusedError naming ``where`` and the reason, if ``tensor`` is of a kind that format 1 does not store exactly."""
    reason = ""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        reason = f"a tensor of the subclass {type_name(tensor)}"
    elif tensor.is_meta:
        reason = "a meta tensor has no values"
    elif tensor.layout is not torch.strided:
        reason = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        reason = "a quantised tensor"
    elif tensor.is_nested:
        reason = "a nested tensor"
    elif tensor.dtype not in DTYPES:
        reason = f"a tensor of dtype {tensor.dtype}"
    if reason:
        raise RefusedError(where, f"{reason} cannot be stored exactly", "leave it out or convert it before saving")


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Owner of each path: identical views of one storage belong to the bytewise smallest path.

    Raises:
        RefusedError: two views overlap and are not identical.
    """
    owners: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    spans: dict[tuple[str, int], list[tuple[int, int, str]]] = {}
    for path in sorted(tensors, key=str.encode):
        tensor = tensors[path]
        if tensor.numel() == 0:
            owners[path] = next((owner for owner in owners if tensors[owner] is tensor), path)
            continue
        storage = tensor.untyped_storage().data_ptr()
        view = (
            str(tensor.device),
            storage,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if view in seen:
            owners[path] = seen[view]
            continue
        seen[view] = owners[path] = path
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * tensor.element_size()
        end = start + (int(last) + 1) * tensor.element_size()
        spans.setdefault((str(tensor.device), storage), []).append((start, end, path))
    for views in spans.values():
        views.sort()
        for index, (_, end, path) in enumerate(views):
            for start, _, other in views[index + 1 :]:
                if start >= end:
                    break
                if _share_elements(tensors[path], tensors[other]):
                    raise RefusedError(
                        f"tensors {path!r:.120} and {other!r:.120}",
                        "they are views of one storage that overlap and are not identical",
                        "save the storage's owner and make the views from it",
                    )
    return owners


def _share_elements(left: Tensor, right: Tensor) -> bool:
    """Whether two views of one storage have a byte in common: mark the bytes of one, look at those of the other."""
    marks = torch.zeros(left.untyped_storage().nbytes(), dtype=torch.bool)

    def bytes_of(tensor: Tensor) -> Tensor:
        size = tensor.element_size()
        strides = [stride * size for stride in tensor.stride()]
        return marks.as_strided((*tensor.shape, size), (*strides, 1), tensor.storage_offset() * size)

    bytes_of(left).fill_(True)
    return bool(bytes_of(right).any())


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
        plain_piece = piece.cpu().resolve_conj().resolve_neg().contiguous()
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
    return TensorValue(DTYPES[tensor.dtype], tuple(tensor.shape), b"".join(chunks(tensor)))


def value_tensor(value: TensorValue) -> Tensor:
    """The tensor of a value, on the CPU."""
    flat = (
        torch.frombuffer(bytearray(value.data), dtype=torch.uint8) if value.data else torch.empty(0, dtype=torch.uint8)
    )
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
    if isinstance(value, dict):
        copy = value.copy()
        for key, item in value.items():
            copy[key] = plain(item, f"{where}[{key!r:.60}]", depth + 1)
        return copy
    return value


def check_depth(depth: int, where: str) -> None:
    """RefusedError for what is nested deeper than any document, above all for what contains itself."""
    if depth > MAX_DEPTH:
        raise RefusedError(where[:200], f"nested deeper than {MAX_DEPTH}, or it contains itself", "store plain values")


def live(value: Any) -> Any:
    """The inverse of :func:`plain`."""
    if type(value) is TensorValue:
        return value_tensor(value)
    if type(value) in (list, tuple):
        return type(value)(live(item) for item in value)
    if isinstance(value, dict):
        copy = value.copy()
        for key, item in value.items():
            copy[key] = live(item)
        return copy
    return value
