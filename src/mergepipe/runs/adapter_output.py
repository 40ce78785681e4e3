"""Publish an adapter as a snapshot: its weights, its configuration, a card, and the record of how it was made."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import mergepipe
from mergepipe.core.linear_algebra import linear_algebra_build, one_blas_thread
from mergepipe.core.outcome import published_but
from mergepipe.options import AdapterOptions, home_of
from mergepipe.recipes.yaml_source import recipe_text
from mergepipe.runs.adapters import WrittenWeights
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.model_card import adapter_card
from mergepipe.snapshots.manifest import (
    CARD_NAME,
    LINEAR_ALGEBRA_KEY,
    MANIFEST_NAME,
    SUMMARY_KEY,
    InputRecord,
    Manifest,
    RealizedBytes,
    relative_reference,
    with_changed_paths,
)
from mergepipe.snapshots.object_upload import published_snapshot
from mergepipe.snapshots.shards import BLOCKS_NAME, table_of
from mergepipe.snapshots.whole_output import WholeOutput, check_place, open_output
from mergepipe.storage.contract import Digested, Store
from mergepipe.storage.location import Location
from mergepipe.storage.output import write_all_durably, write_durably


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """What is recorded of an adapter: the operator, its options as a recipe, its inputs, and what its card says.

    `quality` is a sentence on what the adapter leaves out; `base_model` is the id of the base on the Hub, empty where
    it is unknown.
    """

    operator: str
    method: str
    summary: str
    recipe: str
    inputs: tuple[InputRecord, ...]
    quality: str
    base_model: str = ""
    seed: int = 0


@dataclass(slots=True)
class AdapterOutput:
    """An adapter that grows in the folder `path` and is published by `publish`."""

    store: Store
    place: Location
    output: WholeOutput
    link: CatalogLink
    started: float

    @property
    def path(self) -> Path:
        """The folder to write the weights into."""
        return self.output.path

    def publish(self, weights: WrittenWeights | Digested, facts: AdapterFacts, files: Mapping[str, bytes]) -> Manifest:
        """Write the small files, the record last, and make the adapter visible; return the record.

        `files` are those that belong to the adapter beside its weights, by name. Weights in another format than
        safetensors are recorded as a whole.
        """
        whole: tuple[Digested, ...] = ()
        if isinstance(weights, Digested):
            whole = (weights,)
            blocks = table_of((), ()).to_bytes()
        else:
            self.link.notices.extend(weights.notices)
            blocks = weights.table.to_bytes()
        manifest = self._manifest(weights, facts, blocks)
        small = {**files, CARD_NAME: adapter_card(manifest, facts.method, facts.quality, facts.base_model)}
        sidecars = tuple(Digested.of(name, content) for name, content in sorted(small.items()))
        manifest = replace(manifest, sidecars=(*whole, *sidecars))
        written = {self.path / name: content for name, content in {**small, BLOCKS_NAME: blocks}.items()}
        write_all_durably(written, self.store.ledger)
        folder = self.place.local_path if self.place.is_local else None
        stored = with_changed_paths(manifest, lambda text: relative_reference(text, folder))
        write_durably(self.path / MANIFEST_NAME, stored.to_json(), self.store.ledger)
        content = None
        if folder is None:
            manifest, content = published_snapshot(self.store, self.path)
        self.output.publish(content)
        if folder is not None:
            made = folder.absolute()
            self.link.use(lambda catalog: catalog.record_snapshot(manifest, made, created=datetime.now(UTC)))
        return manifest

    def _manifest(self, weights: WrittenWeights | Digested, facts: AdapterFacts, blocks: bytes) -> Manifest:
        return Manifest(
            version=mergepipe.__version__,
            operator=facts.operator,
            recipe=facts.recipe,
            seed=facts.seed,
            inputs=facts.inputs,
            files=() if isinstance(weights, Digested) else (weights.file,),
            tensors=() if isinstance(weights, Digested) else weights.tensors,
            dropped=(),
            realized=RealizedBytes.of(self.store.ledger.usage()),
            plan_digest=None,
            plan=None,
            coverage=None,
            run={
                "seconds": round(time.perf_counter() - self.started, 3),
                LINEAR_ALGEBRA_KEY: linear_algebra_build(),
                SUMMARY_KEY: facts.summary,
            },
            blocks=Digested.of(BLOCKS_NAME, blocks),
        )


@contextmanager
def adapter_output(
    store: Store, place: Location, inputs: Sequence[Location], options: AdapterOptions, started: float
) -> Iterator[AdapterOutput]:
    """Open the place of an adapter: a folder, a bucket, or a repository of the Hub; refuse one that is none."""
    check_place(place, inputs, force=options.force)
    home = home_of(options.home)
    link = CatalogLink(home if options.catalog else None)
    published_at = place.local_path if place.is_local else place
    with (
        published_but(published_at),
        open_output(place, force=options.force, home=home) as output,
        np.errstate(over="ignore", invalid="ignore"),  # what is not finite is found as it is written
        one_blas_thread(),
    ):
        yield AdapterOutput(store, place, output, link, started)


def relative_name(name: str, place: Location) -> str:
    """Return the name of a model; an absolute path becomes one relative to the adapter at `place`."""
    return relative_reference(name, place.local_path if place.is_local else None)


def recorded_recipe(content: Mapping[str, object]) -> str:
    """Write the options of a job as a recipe."""
    return recipe_text(content, Location.local(Path.cwd())).text
