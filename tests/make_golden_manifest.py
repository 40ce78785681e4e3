"""Writes the golden snapshot of the current manifest version; run once for each version, never again."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import mergepipe
from mergepipe.canonical import digest_of
from mergepipe.manifest import MANIFEST_NAME, MANIFEST_VERSION
from mergepipe.testing.families import TINY, write_family

GOLDEN = Path(__file__).resolve().parent / "golden"
RECIPE = """\
merge_method: ties
base_model: base
models:
- {model: expert-1, parameters: {weight: 0.6, density: 0.5}}
- {model: expert-2, parameters: {weight: 0.4, density: 0.5}}
"""


def main() -> None:
    """Merge a tiny family under a budget; the manifest names its models as being nowhere."""
    golden = GOLDEN / f"manifest-{MANIFEST_VERSION}"
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_family(root, TINY, 2)
        (root / "recipe.yml").write_text(RECIPE)
        mergepipe.merge(root / "recipe.yml", root / "out", budget="40%", reuse=False, catalog=False, shard_bytes=50_000)
        shutil.rmtree(golden, ignore_errors=True)
        shutil.copytree(root / "out", golden)
        text = (golden / MANIFEST_NAME).read_text().replace(place, "/nowhere")
    content = json.loads(text)
    del content["digest"]
    content["digest"] = digest_of(content)
    (golden / MANIFEST_NAME).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
