"""Verification of several checkpoints together, which reads each object once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from ckptstore.format.digest import Digest
from ckptstore.format.keys import is_ref_name
from ckptstore.meter import OnProgress
from ckptstore.store import Store
from ckptstore.verify import Verifier, VerifyReport


def verify_many(
    store: Store,
    names: Iterable[Digest | str],
    *,
    scope: Callable[[Digest], Collection[int] | None] | None = None,
    files: bool = True,
    progress: OnProgress | None = None,
) -> Iterator[VerifyReport]:
    """Verify several checkpoints together: no object is read twice, whichever of them need it.

    An object that is damaged is a finding in the report of each checkpoint that needs it. A report counts as read what
    was read for it; what was read for those before it stands in its receipt with how long ago that may have been. An
    object is read again only if a checkpoint looks for other chunks in the same pack. Held in memory are one closure, a
    line for each object, and 64 MiB of documents, which are read again only if they fell out of there.

    Args:
        store: the store.
        names: roots, refs or prefixes; of a ref, its log of generations is checked as well. Each root is verified once.
        scope: the shards of a root that are looked at, None for all; by default those that pins of a partial store
            keep.
        files: whether the trees of files and of the preparation belong to what must be here.
        progress: called with (bytes read, bytes to be read as far as they are known).

    Returns:
        The reports, in the order in which the roots were named, each as soon as it is done.

    Raises:
        NotFoundError, UsageError: a name means nothing; nothing was read yet.
    """
    logs: dict[Digest, list[str]] = {}
    for name in names:
        root = name if isinstance(name, Digest) else store.resolve(name)
        logs.setdefault(root, []).extend([name] if isinstance(name, str) and is_ref_name(name) else [])
    return _reports(store, logs, store.scope if scope is None else scope, files, progress)


def _reports(
    store: Store,
    logs: dict[Digest, list[str]],
    scope: Callable[[Digest], Collection[int] | None],
    files: bool,
    progress: OnProgress | None,
) -> Iterator[VerifyReport]:
    verifier = Verifier(store.backend)
    before = latest = 0

    def advance(done: int, total: int) -> None:
        nonlocal latest
        latest = total
        if progress is not None:
            progress(before + done, before + total)

    for root, refs in logs.items():
        latest = 0
        checked = (store.refs.findings(name) for name in refs)
        report = verifier.verify(root, scope(root), advance, checked, files=files)
        for finding in report.findings:
            store.objects.forget(finding.key)
        yield report
        before += latest
