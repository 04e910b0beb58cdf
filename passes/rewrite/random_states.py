"""Complete what AOTAutograd notes of operators that save and restore states of random generators."""

from __future__ import annotations

import operator

import torch
from torch import fx

from chunkc.passes.graphs.graphs import placeholders, value_of
from chunkc.torch_private.aot import run_and_save_rng_state, run_with_rng_state
from chunkc.torch_private.fake import detect_fake_mode


def fix_lengths_of_random_states(forward: fx.Graph) -> None:
    """Make numbers of the lengths of saved states: AOTAutograd makes symbols of them."""
    for node in forward.nodes:
        if node.target is operator.getitem and node.args[1] == 0 and node.args[0].target is run_and_save_rng_state:
            for length in node.meta["val"].shape:
                int(length)  # from now on the symbol is this number


def note_values_drawn_again(backward: fx.Graph) -> None:
    """Note the values of operators that draw again: AOTAutograd notes none, and not every result has a reader."""
    nodes = backward.find_nodes(op="call_function", target=run_with_rng_state)
    mode = detect_fake_mode([value_of(node) for node in placeholders(backward)]) if nodes else None
    for node in nodes:
        draw, *args = fx.map_arg(node.args[1:], value_of)
        assert mode is not None
        with mode, torch.no_grad():
            node.meta["val"] = draw(*args, **fx.map_arg(node.kwargs, value_of))
