"""Choose what of a remote base is read while a plan is made: the network would be idle, and all of it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.engine.work import EngineOptions, plan_output
from mergepipe.runs.inputs.opened import Inputs
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.read_ahead import FileRange, ReadAhead
from mergepipe.storage.stores import Stores
from mergepipe.storage.traffic import abort_requests

SHARE_OF_MEMORY = 4
CONNECTIONS_FOR_EACH_WORKER = 4


@contextmanager
def base_read_ahead(inputs: Inputs, store: Stores, engine: EngineOptions, shard_bytes: int) -> Iterator[ReadAhead]:
    """Read the base's tensors in output order until the read-ahead is stopped or left; nothing of a local base.

    Memory: a quarter of `engine.memory_bytes`, which the lookahead of a merge from the network leaves free. While the
    merge holds a tensor that takes more than the rest, it comes on top.
    """
    is_dear = store.terms(inputs.base.path).request_cost_bytes > 0
    ranges, remaining_bytes = [], engine.memory_bytes // SHARE_OF_MEMORY if is_dear else 0
    for task in plan_output(inputs.resolution.tasks, shard_bytes).tasks:
        if isinstance(task.base, TensorEntry) and task.base_model == 0 and remaining_bytes:
            nbytes = min(task.base.nbytes, remaining_bytes)
            ranges.append(FileRange(task.base.file, task.base.offset, task.base.offset + nbytes))
            remaining_bytes -= nbytes
    workers = engine.remote.connections // CONNECTIONS_FOR_EACH_WORKER if ranges else 0
    ahead = ReadAhead(store.open, ranges, Purpose.BASE, workers)
    with store.serve_read_ahead(ahead):
        ahead.start()
        try:
            yield ahead
        except BaseException:
            ahead.stop()
            abort_requests(store)
            raise
        finally:
            ahead.close()
