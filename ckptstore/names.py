"""Names of checkpoints: refs, digests, and unique prefixes of digests."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import NotFoundError, UsageError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import check_ref_name, digest_of_key
from ckptstore.refs import Refs

MIN_PREFIX = 4

_HEX = re.compile(r"[0-9a-f]+")
_CHECKPOINT = b'{"binding":'  # no document of another kind begins so: its first key is another one


def resolve(backend: ReadBackend, refs: Refs, name: str) -> Digest:
    """The root that ``name`` means: a ref, a digest, or a unique prefix of one (4 hex digits or more).

    Raises:
        NotFoundError: nothing has that name.
        UsageError: the prefix fits several checkpoints; lists them.
    """
    digits = name.removeprefix("b3:")
    is_hex = _HEX.fullmatch(digits) is not None
    if is_hex and len(digits) == 64:
        return Digest.parse(digits)
    if not name.startswith("b3:") and not (is_hex and len(digits) >= MIN_PREFIX):
        head = refs.head(check_ref_name(name))
        if head is None or head.root is None:
            known = ", ".join(refs.names()) or "none"
            raise NotFoundError(f"ref {name}", f"no such ref in {backend.url}", f"refs: {known}")
        return head.root
    if not is_hex or not MIN_PREFIX <= len(digits) < 64:
        raise UsageError(f"root {name!r:.80}", f"neither a ref nor {MIN_PREFIX} to 64 hex digits of a digest")
    fitting = list(checkpoints(backend, digits))
    if not fitting:
        raise NotFoundError(
            f"checkpoint {name}", f"none in {backend.url} begins so", "ckpt ref list and ckpt log show what there is"
        )
    if len(fitting) > 1:
        listed = ", ".join(root.short for root in fitting[:8])
        raise UsageError(f"prefix {name}", f"it fits {len(fitting)} checkpoints: {listed}", "give more digits")
    return fitting[0]


def checkpoints(backend: ReadBackend, prefix: str = "") -> Iterator[Digest]:
    """Roots of all checkpoint documents whose hex begins with ``prefix``, sorted."""
    folder = f"documents/{prefix[:2]}/" if len(prefix) >= 2 else "documents/"
    for stat in backend.list(folder):
        digest = digest_of_key(stat.key)
        if digest is None or not digest.hex.startswith(prefix):
            continue
        if backend.get(stat.key, 0, len(_CHECKPOINT)) == _CHECKPOINT:
            yield digest
