"""One model on several GPUs that are not there: what the device decides, and nothing else, differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch
from torch import Tensor, nn

import chunkc
from chunkc.explaining.cuda_offline import overhead_on
from chunkc.ir.errors import UnsupportedError
from chunkc.ir.explanation import Explanation
from chunkc.machines.presets import load_hardware
from chunkc.models import MODELS
from chunkc.passes.graphs.cuda_memory import default_workspaces_nbytes

LIBRARIES = "others"
"""The kind of content that libraries' workspaces are."""


def explained(hardware: str, *, checkpointed: bool, **changes: object) -> Explanation:
    spec = MODELS["gpt2-small"]
    small = replace(spec, config=replace(spec.config, num_layers=2))  # type: ignore[call-arg]
    with torch.device("meta"):
        model = small.build(activation_checkpointing=checkpointed, dtype=torch.bfloat16)
        args, kwargs = small.example(2, 64)
    machine = replace(load_hardware(hardware), **changes)  # type: ignore[arg-type]
    return chunkc.explain(model, *args, hardware=machine, memory_budget="1GiB", **kwargs)


def bytes_of(explanation: Explanation) -> list[tuple[str, str, int]]:
    """Of each moment, without libraries."""
    return [
        (moment.call, moment.op, sum(nbytes for kind, nbytes in moment.contents.items() if kind != LIBRARIES))
        for moment in explanation.moments
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_hopper_computes_attention_by_cudnn_and_the_rest_as_an_ampere(checkpointed: bool) -> None:
    ampere, hopper = (explained(name, checkpointed=checkpointed) for name in ("a100-80g", "h100"))
    pairs = list(zip(bytes_of(ampere), bytes_of(hopper), strict=True))
    assert any("cudnn_attention_backward" in op for _, (_, op, _) in pairs)
    for explanation in (ampere, hopper):
        assert explanation.fits
        assert explanation.activation_checkpointing == checkpointed
        assert sum(explanation.peak.contents.values()) == explanation.predicted_peak_nbytes
    for (call, flash, less), (same_call, cudnn, more) in pairs:
        assert same_call == call
        assert cudnn == flash.replace("flash", "cudnn")
        if "attention" in flash or flash.startswith("run_"):  # with the random state, where it is checkpointed
            assert less < more, "cuDNN's workspace"
        else:
            assert more == less
    libraries = overhead_on(load_hardware("h100")) - overhead_on(load_hardware("a100-80g"))
    assert libraries == default_workspaces_nbytes((9, 0)) - default_workspaces_nbytes((8, 0))
    last = [moment.contents[LIBRARIES] for moment in (ampere.moments[-1], hopper.moments[-1])]
    assert last[1] - last[0] == libraries


def test_hardware_that_does_not_say_what_it_is_takes_what_most_devices_take() -> None:
    unknown = explained("h100", checkpointed=False, capability=None)
    assert bytes_of(unknown) == bytes_of(explained("a100-80g", checkpointed=False))
    assert overhead_on(replace(load_hardware("a100-80g"), capability=None)) == overhead_on(load_hardware("h100"))


class Attention(nn.Module):
    """Four heads of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(128, 384, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (4, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return nn.functional.scaled_dot_product_attention(*parts, is_causal=True).float().sum()


@pytest.mark.parametrize(("dimension", "other"), [(0, (5, 64)), (1, (2, 200))])
def test_cudnn_s_attention_in_symbols(dimension: int, other: tuple[int, int]) -> None:
    """A dimension that varies guards nothing, and bytes at another size are those of a plan for that size."""

    def attended(*sizes: int, dynamic: bool = False) -> Explanation:
        x = torch.zeros(*sizes, 128, dtype=torch.bfloat16)
        if dynamic:
            torch._dynamo.mark_dynamic(x, dimension)
        return chunkc.explain(Attention(), x, memory_budget="1GiB", hardware="h100")

    symbolic, static = attended(2, 64, dynamic=True), attended(*other)
    (note,) = [note for note in symbolic.notes if f": dimension {dimension} of " in note]
    symbol = note.partition(":")[0]
    for moment, same in zip(symbolic.moments, static.moments, strict=True):
        assert moment.op == same.op
        if moment.phase != "update":
            nbytes = int(sympy.sympify(moment.expression).subs(symbol, other[dimension]))
            assert nbytes == same.contents["activations"] + same.contents["temporaries"], moment
    assert sum("cudnn" in moment.op for moment in symbolic.moments) == 2


class SharedKeys(nn.Module):
    """Four heads that share two heads' keys and values."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.query, self.rest = nn.Linear(64, 64, dtype=dtype), nn.Linear(64, 64, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 16)).transpose(1, 2)
        key, value = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.rest(x).chunk(2, dim=-1))
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum()


@pytest.mark.parametrize(
    ("hardware", "dtype", "has_kernel"),
    [
        ("a100-80g", torch.bfloat16, True),
        ("a100-80g", torch.float32, False),
        ("rtx2060-6g", torch.bfloat16, False),
        ("rtx2060-6g", torch.float16, False),
    ],
)
def test_attention_without_a_kernel_is_taken_apart(hardware: str, dtype: torch.dtype, has_kernel: bool) -> None:
    """Heads that share keys have FlashAttention's only, which is not for fp32, and not for a Turing card."""
    found = chunkc.explain(
        SharedKeys(dtype), torch.empty(2, 128, 64, dtype=dtype), hardware=hardware, memory_budget="1GiB"
    )
    ops = {moment.op for moment in found.moments}
    assert any("attention" in op for op in ops) == has_kernel
    assert any("softmax" in op for op in ops) != has_kernel


def test_a_model_that_insists_on_a_kernel_is_refused() -> None:
    class Insists(SharedKeys):
        def forward(self, x: Tensor) -> Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                return super().forward(x)

    with pytest.raises(UnsupportedError, match=r"SDPBackend\.MATH"):
        chunkc.explain(Insists(torch.float32), torch.empty(2, 128, 64), hardware="a100-80g", memory_budget="1GiB")
