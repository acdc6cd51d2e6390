"""Records what is said of the exhibits that nothing is recorded of: ``python -m tests.museum.record``.

What is recorded is read by a person before it is committed; what was recorded before is not touched.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.golden.answers import unpacked
from tests.museum.damage import named
from tests.museum.exhibit import HERE, observe, recipes, recorded


def main() -> None:
    """Observe what is new, and write it down beside the rest."""
    found = recorded()
    with tempfile.TemporaryDirectory() as top:
        golden = unpacked(Path(top))
        keys = named(golden)
        for name, recipe in recipes().items():
            if name not in found:
                folder = Path(top) / name
                folder.mkdir()
                found[name] = observe(recipe, golden, keys, folder)
    lines = []
    for name in recipes():
        asked = [f"  {json.dumps(asked)}: {json.dumps(told)}" for asked, told in found[name].items()]
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(asked) + "\n }")
    HERE.joinpath("findings.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
