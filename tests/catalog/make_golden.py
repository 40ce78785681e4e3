"""Write the golden catalog of the current schema version; run once for each version, never again."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path, PurePosixPath

from catalog_cases import NOON, WEIGHTS_NAME, make_manifest, make_statistics

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.home import CATALOG_NAME
from mergepipe.checkpoints.contract import Checkpoint, FileFingerprint, TensorEntry
from mergepipe.core.blocks import BF16
from mergepipe.storage.location import Location

DENSITIES = (0.1, 1 / 3)


def golden_checkpoint(name: str) -> Checkpoint:
    """A checkpoint that is nowhere."""
    path = Path(PurePosixPath("/nowhere", name, WEIGHTS_NAME))
    entry = TensorEntry("t.weight", BF16, (500, 2), Location.local(path), 100, 2000)
    file = FileFingerprint(
        WEIGHTS_NAME, 2100, "1700000000123456789.1700000000123456790.12345678901234567890", "ab" * 16
    )
    return Checkpoint(Location.local(path), Location.local(path.parent), {entry.name: entry}, (file,), ())


def write_golden(path: Path) -> None:
    """Two models, statistics, two snapshots."""
    with tempfile.TemporaryDirectory() as home:
        with Catalog.open(Path(home)) as catalog:
            base = catalog.register_model(golden_checkpoint("base"))
            expert = catalog.register_model(golden_checkpoint("expert"), "c" * 32)
            catalog.put_many(expert, base, {"t.weight": make_statistics(1, densities=DENSITIES)})
            catalog.put_many(expert, base, {"u": make_statistics(2)})
            for name in ("one", "two"):
                catalog.record_snapshot(make_manifest(name), Path("/nowhere", name), created=NOON)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((Path(home) / CATALOG_NAME).read_bytes())


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]))
