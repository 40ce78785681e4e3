"""Build the manifest's records of one merge: tensors, files, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import sub

from mergepipe.checkpoints.content_id import stored_entries
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.core.canonical_json import digest_of
from mergepipe.engine.work import OutputPlan
from mergepipe.operators.base import MagnitudeBand, MagnitudeCut
from mergepipe.operators.registry import operator_named
from mergepipe.planning.rules import operator_input
from mergepipe.recipes.tasks import Action
from mergepipe.reports import KeptShare
from mergepipe.runs.inputs.opened import Inputs
from mergepipe.snapshots.manifest import OutputTensor, RealizedBytes
from mergepipe.snapshots.shards import ShardLayout, TensorDigest
from mergepipe.storage.file_version import Digested
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.traffic import Traffic


def traffic_facts(traffic: Traffic) -> dict[str, float | int | str]:
    """Return the manifest's facts on remote inputs: requests, retries and what they cost, bytes by host."""
    if not traffic.counts.requests:
        return {}
    return {
        "requests": traffic.counts.requests,
        "retries": traffic.counts.retries,
        "retried_bytes": traffic.counts.retried_bytes,
        "bytes_by_host": ",".join(f"{host}={nbytes}" for host, nbytes in traffic.bytes_by_host.items()),
    }


def kept_shares(inputs: Inputs) -> tuple[KeptShare, ...]:
    """Return what a merge in full keeps of each expert that its rule cuts by magnitude, in the recipe's order."""
    operator, models = operator_named(inputs.recipe.operator.name), inputs.recipe.inputs()
    kept, elements = Counter[int](), Counter[int]()
    for task in inputs.resolution.tasks:
        trims = task.action is not Action.COPY and task.experts and task.base.n_elements
        match operator.reduction(operator_input(task)) if trims else None:
            case MagnitudeCut(kept_E):
                counts = kept_E
            case MagnitudeBand(kept_E, dropped_E):
                counts = tuple(map(sub, kept_E, dropped_E))
            case _:
                continue
        for model, n_kept in zip(task.expert_models, counts, strict=True):
            kept[model] += n_kept
            elements[model] += task.base.n_elements
    return tuple(KeptShare(models[model].text, kept[model], elements[model]) for model in sorted(elements))


def kept_facts(kept: Sequence[KeptShare]) -> dict[str, str]:
    """Return the manifest's fact on what was kept of each expert, in the recipe's order."""
    return {"kept_elements": ",".join(f"{one.kept_elements}/{one.elements}" for one in kept)} if kept else {}


def realized(usage: Usage) -> RealizedBytes:
    """Sum the bytes read and written, by purpose."""
    return RealizedBytes(
        base=usage[Purpose.BASE],
        expert=usage[Purpose.EXPERT],
        analysis=usage[Purpose.ANALYSIS],
        metadata=usage[Purpose.METADATA],
        output=usage[Purpose.OUTPUT],
    )


def tensor_bytes_read(checkpoint: Checkpoint, usage: Usage) -> int:
    """Sum the bytes requested of a checkpoint's tensors, headers excluded, indices of encoded ones included."""
    if checkpoint.encoded is None:
        files = {str(entry.file) for entry in stored_entries(checkpoint)}
    else:
        files = {str(file) for file in (*checkpoint.encoded.files, checkpoint.encoded.index_file)}
    return sum(n for (file, purpose), n in usage.by_file.items() if file in files and purpose is not Purpose.METADATA)


def tensor_records(output: OutputPlan, digests: tuple[TensorDigest, ...]) -> tuple[OutputTensor, ...]:
    """Record every output tensor, in output order."""
    shard_of = {spec.name: shard.name for shard in output.shards for spec in shard.tensors}
    return tuple(
        OutputTensor(
            task.name, task.dtype.name, task.shape, shard_of[task.name], digest.root, task.action.value, task.reason
        )
        for task, digest in zip(output.tasks, digests, strict=True)
    )


def file_records(output: OutputPlan, digests: tuple[TensorDigest, ...]) -> tuple[Digested, ...]:
    """Record every weight file."""
    root_of = {digest.name: digest.root for digest in digests}
    return tuple(
        Digested(
            shard.name,
            shard.file_bytes,
            file_digest_of(shard, root_of),
        )
        for shard in output.shards
    )


def file_digest_of(shard: ShardLayout, root_of: Mapping[str, str]) -> str:
    """The digest of a weight file, from the digests of its tensors."""
    return digest_of([[s.name, s.dtype.name, list(s.shape), root_of[s.name]] for s in shard.tensors])
