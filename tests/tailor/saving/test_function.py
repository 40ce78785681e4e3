"""What `save_partial` refuses of a loop's own state, without torch."""

from __future__ import annotations

import pytest

from mergepipe.errors import RecipeError
from mergepipe.tailor.saving.callback import LoopState


@pytest.mark.parametrize("key", ["model", "optim"])
def test_loop_state__refuses_the_keys_of_the_model_and_the_optimizer(key: str) -> None:
    with pytest.raises(RecipeError, match=key) as caught:
        LoopState(None, None, {"step": 1, key: 2}, 0)
    assert caught.value.code == "option.conflict"


def test_loop_state__takes_others() -> None:
    assert LoopState(None, None, {"step": 1}, 0).state == {"step": 1}
