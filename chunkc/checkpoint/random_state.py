"""Save and restore the process's random generators: torch's on the CPU and on CUDA devices, Python's, NumPy's."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Collect the states of all generators, as data (see `checkpoint.data`)."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the states of all generators; CUDA's only if there are as many devices as were saved, else warn."""
    torch.set_rng_state(state["torch"].clone())
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    saved = state.get("cuda", [])
    if saved and torch.cuda.device_count() != len(saved):
        warnings.warn(
            f"the checkpoint has random generators of {len(saved)} CUDA devices, here are {torch.cuda.device_count()}: "
            "theirs are left as they are, and what is drawn on a device will differ",
            stacklevel=3,
        )
    elif saved:
        torch.cuda.set_rng_state_all([of_device.clone() for of_device in saved])
