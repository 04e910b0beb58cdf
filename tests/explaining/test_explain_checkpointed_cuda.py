"""A checkpointed model on hardware that is not there: the random state, of unknown size, is saved and restored."""

from __future__ import annotations

import pytest

import chunkc
from chunkc.explaining.targets import ModelOptions, built_in


@pytest.mark.second_tier
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_checkpointed_gpt_on_a_gpu(checkpointed: bool) -> None:
    subject = built_in("gpt2-small", ModelOptions(None, checkpointed)).build(1, 64)
    found = chunkc.explain(subject.model, *subject.args, hardware="rtx3090", memory_budget="2GiB", **subject.kwargs)
    assert found.fits
    assert found.activation_checkpointing == checkpointed
    assert any("attention" in moment.op for moment in found.moments)
    assert sum(found.peak.contents.values()) == found.predicted_peak_nbytes  # with the libraries' workspaces
