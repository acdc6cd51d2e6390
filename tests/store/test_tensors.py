"""Every bit of every tensor of the closed table comes back; the rest is refused by name (faults B036 to B044)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._subclasses.fake_tensor
import torch.masked
from torch import nn

import ckptstore
from ckptstore import TrainingState
from ckptstore.errors import MismatchError, RefusedError
from ckptstore.live.tensors import DTYPES, chunks
from ckptstore.store import Store
from tests.support.training import commit_state

SHAPES = [(), (1,), (0,), (0, 3), (3, 0), (1, 1), (5, 7)]


class Box(nn.Module):
    """A module that holds tensors under any names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return dict(self.tensors)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return b"".join(chunks(tensor))


def round_trip(store: Store, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    root = commit_state(store, "main", [ckptstore.TrainingState(model=Box(tensors))], 1)
    fresh = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    ckptstore.open(store.url).restore(root, ckptstore.TrainingState(model=Box(fresh)))
    return fresh


def raw(dtype: torch.dtype, data: list[int], size: int) -> torch.Tensor:
    flat = torch.tensor(list(b"".join(value.to_bytes(size, "little") for value in data)), dtype=torch.uint8)
    return flat.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_every_shape_of_every_dtype_comes_back(store: Store, dtype: torch.dtype) -> None:
    """B038 (pytorch/pytorch#131976): 0-dim, single-element and zero-size ones too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        size = torch.empty(0, dtype=dtype).element_size()
        tensors = {}
        for index, shape in enumerate(SHAPES):
            count = torch.Size(shape).numel()
            values = torch.arange(count * size, dtype=torch.int64).remainder(2 if dtype == torch.bool else 251)
            tensors[f"t{index}"] = values.to(torch.uint8).view(dtype).reshape(shape)
        for name, loaded in round_trip(store, tensors).items():
            assert loaded.dtype == dtype
            assert loaded.shape == tensors[name].shape
            assert bytes_of(loaded) == bytes_of(tensors[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_all_patterns_of_16_bits_come_back(store: Store, dtype: torch.dtype) -> None:
    """B040 (coreweave/tensorizer#27)."""
    every = raw(dtype, list(range(65536)), 2)
    assert bytes_of(round_trip(store, {"x": every})["x"]) == bytes_of(every)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if "float8" in str(d)], ids=str)
def test_all_patterns_of_8_bits_come_back(store: Store, dtype: torch.dtype) -> None:
    """B040."""
    every = raw(dtype, list(range(256)), 1)
    assert bytes_of(round_trip(store, {"x": every})["x"]) == bytes_of(every)


SPECIAL = [
    0x7FF0000000000001,
    0x7FF8000000000001,
    0xFFF8000000000000,
    0xFFF0000000000001,
    1,
    1 << 63,
    0x7FF0000000000000,
]


def test_nan_payloads_subnormals_and_signed_zeros_come_back_and_each_bit_counts(store: Store) -> None:
    """B040: also through a push and a pull."""
    special = raw(torch.float64, SPECIAL, 8)
    single = raw(torch.float32, [0x7F800001, 0x7FC00001, 0xFFC00000, 1, 1 << 31, 0x7F800000, 0xFF800001] * 20, 4)
    loaded = round_trip(store, {"d": special, "s": single})
    assert bytes_of(loaded["d"]) == bytes_of(special)
    assert bytes_of(loaded["s"]) == bytes_of(single)
    root = store.head("main")
    assert root is not None
    far = ckptstore.open("memory:far-nan", create=True)
    ckptstore.push(store, far, root)
    fresh = {"d": torch.zeros_like(special), "s": torch.zeros_like(single)}
    far.restore(root, ckptstore.TrainingState(model=Box(fresh)))
    assert bytes_of(fresh["s"]) == bytes_of(single)
    roots = set()
    for bit in range(64):
        changed = special.clone()
        changed.view(torch.int64)[0] ^= 1 << bit if bit < 63 else -(1 << 63)
        roots.add(
            commit_state(store, f"bit{bit}x", [ckptstore.TrainingState(model=Box({"d": changed, "s": single}))], 1)
        )
    assert len(roots | {root}) == 65


def dense_views() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 4, 5, 3)
    complex_base = torch.randn(4, 3, dtype=torch.complex64)
    return {
        "transpose": torch.randn(40, 30).t(),
        "step": torch.arange(200.0)[::2],
        "expand": torch.randn(1, 30).expand(20, 30),
        "channels-last": base.to(memory_format=torch.channels_last),
        "narrow": torch.randn(20, 20).narrow(1, 3, 9),
        "permute": torch.randn(7, 5, 6).permute(2, 0, 1),
        "conj": complex_base.conj(),
        "neg": torch.imag(complex_base.clone().conj()),
    }


@pytest.mark.parametrize("name", dense_views())
def test_any_view_is_stored_as_its_logical_elements(store: Store, name: str) -> None:
    """B037 (safetensors#17): the root is that of the contiguous copy, and it comes back into such a view."""
    view = dense_views()[name]
    copy = view.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    roots = [
        commit_state(store, ref, [ckptstore.TrainingState(model=Box({"x": tensor}))], 1)
        for ref, tensor in (("view", view), ("copy", copy))
    ]
    assert roots[0] == roots[1]
    target = dense_views()[name]
    store.restore(roots[0], ckptstore.TrainingState(model=Box({"x": target})))
    assert bytes_of(target) == bytes_of(view)


BITS = [2, 255, 0, 1, 3, 128] * 4
"""Bytes of a bool that no comparison gives, beside the two that it does."""


@pytest.mark.parametrize("view", ["whole", "transposed", "column", "step", "expanded"])
def test_bytes_of_a_bool_that_are_neither_0_nor_1_come_back(store: Store, view: str) -> None:
    """B040: a copy of a bool makes 1 of them; bits are kept in every layout."""
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "whole": lambda t: t,
        "transposed": torch.Tensor.t,
        "column": lambda t: t[:, 2],
        "step": lambda t: t[::2, 1::3],
        "expanded": lambda t: t[:, :1].expand(4, 5),
    }
    saved, loaded = (torch.tensor(numbers, dtype=torch.uint8).reshape(4, 6) for numbers in (BITS, [0] * 24))
    root = commit_state(store, "main", [TrainingState(model=Box({"x": views[view](saved.view(torch.bool))}))], 1)
    store.restore(root, TrainingState(model=Box({"x": views[view](loaded.view(torch.bool))})))
    assert torch.equal(views[view](loaded), views[view](saved))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_any_bits_of_any_dtype_come_back_into_any_layout(store: Store, dtype: torch.dtype) -> None:
    """B037, B040: NaN payloads, subnormals and bytes that are no number of the type, in a layout of their own."""
    size = torch.empty(0, dtype=dtype).element_size()
    pattern = torch.arange(size * 35).mul(37).remainder(256).to(torch.uint8)

    def made(flat: torch.Tensor) -> dict[str, torch.Tensor]:
        whole = flat.view(dtype).reshape(5, 7)
        return {"transposed": whole.t(), "step": whole.clone()[::2, ::3]}

    saved, fresh = made(pattern), made(torch.zeros_like(pattern))
    expected = pattern.reshape(5, 7, size).transpose(0, 1).contiguous().flatten()
    root = commit_state(store, "main", [TrainingState(model=Box(saved))], 1)
    ckptstore.open(store.url).restore(root, TrainingState(model=Box(fresh)))
    assert bytes_of(saved["transposed"]) == bytes(expected.tolist())
    assert all(bytes_of(fresh[name]) == bytes_of(saved[name]) for name in saved)


def freed(tensor: torch.Tensor, left: int = 0) -> torch.Tensor:
    """``tensor`` after the memory behind it was given back, as sharded trainers do between uses."""
    tensor.untyped_storage().resize_(left)
    return tensor


REFUSED: dict[str, Any] = {
    "freed": lambda: freed(torch.ones(100)),
    "freed in part": lambda: freed(torch.ones(10, 10).t(), 40),
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "fake": lambda: fake(),
    "packed": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.uint4),
    "sparse-csc": lambda: torch.eye(3).to_sparse_csc(),
    "sparse-bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "opaque": lambda: torch.ones(3, 3).to_mkldnn(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "masked": lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    "negative view without an operation": lambda: torch._neg_view(torch.ones(3).to(torch.float8_e5m2)),
    "sparse-coo": lambda: torch.eye(3).to_sparse(),
    "sparse-uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    "sparse-csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "subclass": lambda: torch.ones(3).as_subclass(type("Odd", (torch.Tensor,), {})),
}


def fake() -> torch.Tensor:
    with torch._subclasses.fake_tensor.FakeTensorMode():
        return torch.zeros(3)


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_tensors_inside_a_function_transform_are_refused(transform: str) -> None:
    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RefusedError, match=r"'x': a tensor of a function transform.*cannot be stored exactly"):
            TrainingState(model=Box({"x": tensor})).capture()
        return tensor.sum()

    if transform == "vmap":
        torch.vmap(inside)(torch.ones(2, 3))
    else:
        torch.func.grad(inside)(torch.ones(3))


if hasattr(torch, "float4_e2m1fn_x2"):
    REFUSED["sub-byte float"] = lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_are_refused_by_name_before_anything_is_written(store: Store, name: str) -> None:
    """B037."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = REFUSED[name]()
    before = [stat.key for stat in store.backend.list("")]
    state = ckptstore.TrainingState(model=Box({"fine": torch.ones(3), "odd one": tensor}))
    with pytest.raises(RefusedError, match=r"buffer 'odd one'.*cannot be stored exactly"):
        store.save_shard(state, store.begin("main"), step=1)
    assert [stat.key for stat in store.backend.list("")] == before


def test_a_slice_is_stored_without_the_rest_of_its_storage(disk_store: Store) -> None:
    """B036 (pytorch/pytorch#40157)."""
    marker = b"SECRET-MARKER-BYTES-01234567"
    whole = torch.zeros(1_000_000, dtype=torch.uint8)
    whole[5000 : 5000 + len(marker)] = torch.tensor(list(marker), dtype=torch.uint8)
    part = whole[100:200]
    roots = [
        commit_state(disk_store, ref, [ckptstore.TrainingState(model=Box({"x": tensor}))], 1)
        for ref, tensor in (("slice", part), ("clone", part.clone()))
    ]
    assert roots[0] == roots[1]
    stats = list(disk_store.backend.list("objects/"))
    assert sum(stat.size for stat in stats) == 100
    assert all(marker not in disk_store.backend.get(stat.key) for stat in disk_store.backend.list(""))


@pytest.mark.parametrize(
    ("live", "message"),
    [
        (torch.zeros(6, 2), r"stored as f32 \(2, 6\) and live as f32 \(6, 2\)"),
        (torch.zeros(12), r"live as f32 \(12,\)"),
        (torch.zeros(3, 4), r"live as f32 \(3, 4\)"),
        (torch.zeros(2, 6, dtype=torch.int32), r"stored as f32 \(2, 6\) and live as i32 \(2, 6\)"),
    ],
)
def test_another_shape_or_dtype_is_refused_naming_both(store: Store, live: torch.Tensor, message: str) -> None:
    """B039 (pytorch/pytorch#126604)."""
    root = commit_state(store, "main", [ckptstore.TrainingState(model=Box({"x": torch.ones(2, 6)}))], 1)
    with pytest.raises(MismatchError, match=message):
        store.restore(root, ckptstore.TrainingState(model=Box({"x": live})))
    assert not live.any()


NAMES = ["x/y", "../../etc/x", "/abs", ".", "..", "", "a\nb", "a\x00b", "n" * 5000, "dot.", "space ", "CON", "%2F", "/"]
NAMES += ["\u200frtl", "\N{PARTY POPPER}", "e\u0301", "\u00e9"]


def test_names_are_only_names(disk_store: Store) -> None:
    """B044 (meta-pytorch/torchsnapshot#31): every legal text round-trips and no file is named after one."""
    tensors = {name: torch.full((40,), float(index)) for index, name in enumerate(NAMES)}
    loaded = round_trip(disk_store, tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in NAMES)
    for stat in disk_store.backend.list("objects/"):
        assert len(stat.key) == len("objects/ab/") + 64


def test_a_lone_surrogate_in_a_name_is_refused(store: Store) -> None:
    """B044."""
    with pytest.raises(ckptstore.CkptStoreError, match="surrogate"):
        commit_state(store, "main", [ckptstore.TrainingState(model=Box({"a\ud800": torch.ones(40)}))], 1)
    assert store.head("main") is None


def test_overlapping_views_that_are_not_identical_are_refused(store: Store) -> None:
    base = torch.arange(100.0)
    state = ckptstore.TrainingState(model=Box({"left": base[:60], "right": base[50:]}))
    with pytest.raises(RefusedError, match=r"'left' and 'right'.*overlap"):
        state.capture()


def test_views_that_share_a_storage_and_no_element_are_stored_apart(store: Store) -> None:
    base = torch.arange(200.0)
    tensors = {"even": base[::2], "odd": base[1::2]}
    loaded = round_trip(store, tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_large_tensors_are_cut_every_16_mib_and_only_new_chunks_are_written(store: Store) -> None:
    big = torch.zeros(40 * 2**20 // 4 + 10, dtype=torch.float32)
    big[0] = 1.0
    state = ckptstore.TrainingState(model=Box({"big": big}))
    root = commit_state(store, "main", [state], 1)
    entry = next(store.closure(root).shards[0].tensors())
    assert entry.lengths() == [16 * 2**20, 16 * 2**20, 8 * 2**20 + 40]
    before = {stat.key for stat in store.backend.list("objects/")}
    big[-1] = 5.0
    commit_state(store, "main", [state], 2)
    after = {stat.key: stat.size for stat in store.backend.list("objects/")}
    assert [size for key, size in after.items() if key not in before] == [8 * 2**20 + 40]
    fresh = torch.empty_like(big)
    store.restore(store.head("main"), ckptstore.TrainingState(model=Box({"big": fresh})))  # type: ignore[arg-type]
    assert torch.equal(fresh, big)


def test_a_large_tensor_that_is_not_contiguous_is_the_same_tensor(store: Store) -> None:
    big = torch.arange(6 * 2**20, dtype=torch.int32).reshape(2048, 3072)
    roots = [
        commit_state(store, ref, [ckptstore.TrainingState(model=Box({"x": tensor}))], 1)
        for ref, tensor in (("a", big.t()), ("b", big.t().contiguous()))
    ]
    assert roots[0] == roots[1]


def test_extra_state_of_modules_is_state(store: Store) -> None:
    class Counting(nn.Linear):
        calls = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls, "seen": torch.arange(3)}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    model = nn.Sequential(Counting(2, 2))
    model[0].calls = 7  # type: ignore[assignment]
    root = commit_state(store, "main", [ckptstore.TrainingState(model=model)], 1)
    fresh = nn.Sequential(Counting(2, 2))
    fresh[0].calls = 7  # type: ignore[assignment]
    store.restore(root, ckptstore.TrainingState(model=fresh))
    assert fresh[0].calls == 7


@pytest.mark.deep
def test_more_elements_than_fit_31_bits_come_back(disk_store: Store) -> None:
    """B034 (pytorch/pytorch#717): 2^31 + 5 bytes of one tensor, and as many elements of one byte through a view."""
    count = 2**31 + 5
    big = torch.zeros(count, dtype=torch.uint8)
    big[-1], big[2**31 - 1], big[2**31] = 7, 8, 9
    wide = torch.tensor([[3], [4]], dtype=torch.int8).expand(2, 2**30 + 3)
    root = commit_state(disk_store, "main", [TrainingState(model=Box({"big": big, "wide": wide}))], 1)
    big.zero_()
    fresh = torch.zeros(2, 1, dtype=torch.int8)
    target = Box({"big": big, "wide": fresh.expand(2, 2**30 + 3)})
    ckptstore.open(disk_store.url).restore(root, TrainingState(model=target))
    assert (int(big[-1]), int(big[2**31 - 1]), int(big[2**31]), int(big[0])) == (7, 8, 9, 0)
    assert fresh.flatten().tolist() == [3, 4]
