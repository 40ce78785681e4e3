"""Writes the golden store of this version from the models beside it; run it as a program."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import mergepipe
from mergepipe.core.canonical_json import digest_of
from mergepipe.deltastore.header import FORMAT_VERSION, HEADER_NAME

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def main() -> None:
    """Pack the golden expert; the header names the models as they lie beside one another."""
    golden = GOLDEN / f"delta-store-{FORMAT_VERSION}"
    os.chdir(golden)
    out = golden / "store"
    with tempfile.TemporaryDirectory() as place:
        mergepipe.pack("base.safetensors", ["expert.safetensors"], place)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(Path(place) / "expert", out)
    document = json.loads((out / HEADER_NAME).read_text())
    del document["digest"]
    document |= {"base": "base.safetensors", "expert": "expert.safetensors"}
    content = {**document, "digest": digest_of(document)}
    (out / HEADER_NAME).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
