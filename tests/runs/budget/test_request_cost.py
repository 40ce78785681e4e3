"""What a request of a remote store is worth does not depend on the link of today."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mergepipe.runs.budget.speeds import PriceRequest
from mergepipe.storage.contract import StoreTerms


@pytest.mark.parametrize(("given_bytes", "costs"), [(None, (3_000_000, 0)), (70_000, (70_000, 0))])
def test_request_cost__is_that_of_the_stores_terms_unless_it_is_given(
    given_bytes: int | None, costs: tuple[int, int]
) -> None:
    """Nothing is read for it: this store has no files that could be opened."""
    inputs: Any = SimpleNamespace(
        expert_models=(1, 2), checkpoints=tuple(SimpleNamespace(path=place) for place in ("base", "remote", "local"))
    )
    store: Any = SimpleNamespace(
        terms=lambda place: StoreTerms(
            granularity_bytes=1, most_requests=4, request_cost_bytes=3_000_000 if place == "remote" else 0
        )
    )
    assert PriceRequest(request_cost_bytes=given_bytes).request_bytes(inputs, store) == costs
