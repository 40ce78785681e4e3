"""Compare a snapshot's configuration with its tensors: a contradiction is damage or, if inherited, a notice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mergepipe.checkpoints.directory import parse_config
from mergepipe.core.blocks import DTYPES, DTypeKind
from mergepipe.errors import MergePipeError, NotFoundError
from mergepipe.recipes.output_tensors import shape_contradictions
from mergepipe.recipes.yaml_source import shortened
from mergepipe.reports import Damage
from mergepipe.snapshots.manifest import Manifest, OutputTensor
from mergepipe.storage.contract import Store
from mergepipe.storage.limits import CONFIG_BYTES
from mergepipe.storage.location import Location

_DTYPE_KEYS = ("torch_dtype", "dtype")


def config_findings(store: Store, path: Location, manifest: Manifest) -> tuple[tuple[Damage, ...], tuple[str, ...]]:
    """List damage where the configuration cannot be read, and notices where it contradicts the tensors."""
    try:
        content = parse_config(store.read_small(path, CONFIG_BYTES), path)
    except NotFoundError:
        return (), ()  # a merge of bare files has none; one that was written and is gone is found by its digest
    except MergePipeError as error:
        return (Damage("config", path.name, "", 0, 0, error.problems[0].message),), ()
    return (), tuple(f"{path.name}: {contradiction}" for contradiction in _contradictions(content, manifest.tensors))


def _contradictions(config: Mapping[str, object], tensors: Sequence[OutputTensor]) -> Iterator[str]:
    merged = {t.dtype for t in tensors if DTYPES[t.dtype].kind is DTypeKind.FLOAT}
    stated = next((config[key] for key in _DTYPE_KEYS if isinstance(config.get(key), str)), None)
    names = {DTYPES[name].recipe_name for name in merged}
    if stated is not None and merged and stated not in names:
        yield f"says {shortened(str(stated))}, the tensors are {', '.join(sorted(names))}"
    yield from shape_contradictions(config, {tensor.name: tensor.shape for tensor in tensors})
