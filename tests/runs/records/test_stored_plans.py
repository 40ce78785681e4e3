"""The plan that a resumed merge follows is the one that was stored, byte for byte, or none."""

from __future__ import annotations

from pathlib import Path
from random import Random

import mergepipe
from mergepipe.options import PlanOptions
from mergepipe.runs.stored_plan import STORED_PLAN_NAME, store_plan, stored_plan
from support.disk_families import make_models, write_family


def test_stored_plan__is_none_where_any_byte_was_changed(tmp_path: Path) -> None:
    family = write_family(tmp_path / "family", make_models(1))
    recipe = tmp_path / "recipe.yml"
    models = f"[{{model: {family.places[1]}, parameters: {{weight: 1, density: 0.5}}}}]"
    recipe.write_text(f"merge_method: ties\nbase_model: {family.places[0]}\nmodels: {models}\n")
    options = PlanOptions(block_elements=16384)
    plan = mergepipe.plan(recipe, everything=True, home=tmp_path / "home", allow_dropped=("*",), options=options)
    store_plan(tmp_path, "key", plan)
    stored = tmp_path / STORED_PLAN_NAME
    content, random = stored.read_bytes(), Random(5)
    in_a_path = content.index(str(family.places[1]).encode())
    for at in (in_a_path + 1, *random.sample(range(len(content)), 40)):
        stored.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert stored_plan(tmp_path, "key") is None
    stored.write_bytes(content)
    assert stored_plan(tmp_path, "key") == plan
