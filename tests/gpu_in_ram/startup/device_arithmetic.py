"""Let CUDA tensors whose memory is RAM be computed, by the CPU's kernels, in stream order.

Each operator of the CUDA key first runs its own CUDA code: it allocates results and temporaries as on a GPU, and its
kernels do nothing. What it is to compute is then queued on the current stream: the CPU's operator, on the same bytes.
So allocations, their order and their streams are the real ones, and values appear when a stream is that far.

What reads values on the host (a shape that depends on data, a number) waits for the stream, as on a GPU. Random
numbers are drawn from a CPU generator seeded by the CUDA generator's seed and offset: not those of a GPU, but the
same wherever a GPU's would be.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import cuda_in_ram
import device_math
import device_triton
import torch
from torch import Tensor

_CPU = torch.device("cpu")

NOT_COMPUTED = (
    "empty", "new_empty", "set_", "resize", "view", "as_strided", "_local_scalar_dense", "record_stream", "is_pinned",
    "_pin_memory", "alias", "reshape", "_reshape_alias", "unfold", "cudnn", "_cudnn", "miopen", "is_set_to", "is_same",
    "_has_same_storage", "_coalesce", "sparse", "_sparse", "_nested", "_to_sparse", "to_sparse", "_to_copy", "_assert",
    "_thnn_fused", "_scaled_mm", "_cslt", "_transformer", "_triton", "_fused_sdp_choice", "_foobar", "_has_compatible",
)  # fmt: skip
"""Operators that compute nothing, or that this device does not have: by how their names begin."""

_ALSO = (
    torch.ops.aten.copy_.default, torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
)  # fmt: skip
"""Not under CUDA's key. Of convolutions, what is under it is no operator of the CPU's, or is called past the
dispatcher."""

_depth = 0  # of operators within operators: only the outermost's results count

_keep: list[torch.library.Library] = []


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor over the bytes of a CUDA tensor. It keeps nothing alive: like a kernel's pointer."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    found = torch.empty(0, dtype=tensor.dtype, device=_CPU)
    if tensor.numel() == 0:
        return found.as_strided_(tensor.shape, tensor.stride()) if tensor.dim() else found
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), _CPU, span * tensor.itemsize)
    return found.set_(storage, 0, tensor.shape, tensor.stride())


def launch(work: Callable[[], None]) -> None:
    """Queue a computation on the current stream."""
    cuda_in_ram.enqueue(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()), _guarded(work))


def _guarded(work: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        # A collection here could free CUDA tensors, and wait for an allocator whose owner waits for this stream.
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.no_grad():
                work()
        except BaseException:
            traceback.print_exc()
            print("cuda_in_ram: this kernel failed, and with it the device", file=sys.stderr, flush=True)
            cuda_in_ram.break_device()
        finally:
            if collecting:
                gc.enable()

    return run


class _Arguments:
    """What an operator was given, as the CPU's kernel takes it."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator

    def on_cpu(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return alias(value) if value.is_cuda else value.detach().clone()  # passed by value, as to a kernel
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.on_cpu, value))
        if isinstance(value, torch.device):
            return _CPU
        if isinstance(value, torch.Generator):
            return self._generator
        return value


def _seeded() -> torch.Generator:
    """A CPU generator for what the CUDA generator would draw next."""
    state = torch.cuda.default_generators[torch.cuda.current_device()].get_state()
    seed, offset = state[:16].view(torch.int64).tolist()
    return torch.Generator().manual_seed(device_math.combined(seed, offset))


def _fill(found: Any, computed: Any) -> None:
    """Write what was computed where the results are."""
    if isinstance(found, Tensor):
        if isinstance(computed, Tensor) and found.data_ptr() != computed.data_ptr():
            wider = found.shape != computed.shape  # attention's logarithms of sums are padded
            (found[..., : computed.shape[-1]] if wider else found).copy_(computed)
    elif isinstance(found, (list, tuple)):
        for one, other in zip(found, computed, strict=True):
            _fill(one, other)


def _boxed(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> list[Any]:
    """Arguments as the dispatcher takes them: a number in a tensor's place came here as a Python number.

    Of the right dtype, so that it promotes nothing; its value matters to the computation alone, which has `args`.
    """
    tensors = [value for value in args if isinstance(value, Tensor)]
    return [
        torch.tensor(value, dtype=torch.result_type(tensors[0], value), device=_CPU)
        if isinstance(value, (bool, int, float)) and isinstance(argument.type, torch.TensorType) and tensors
        else value
        for value, argument in zip(args, op._schema.arguments)
    ]


def _computing(op: torch._ops.OpOverload, original: Any) -> Callable[..., Any]:
    schema = op._schema
    random = torch.Tag.nondeterministic_seeded in op.tags
    takes_generator = any(argument.name == "generator" for argument in schema.arguments)
    compute = device_math.OPERATORS.get(op.name(), op)
    takes_numbers = compute is not op or torch._C._should_allow_numbers_as_tensors(schema.name.removeprefix("aten::"))
    outermost_only = not schema.name.endswith("::copy_")

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        global _depth
        if _depth and outermost_only:
            return original.call_boxed(keys, *_boxed(op, args), **kwargs)
        generator = _seeded() if random else None
        _depth += outermost_only
        try:
            found = original.call_boxed(keys, *_boxed(op, args), **kwargs)
        finally:
            _depth -= outermost_only
        if not outermost_only and not (args[0].is_cuda and args[1].is_cuda):
            return found  # between host and device: the runtime's copies have done it
        given = _Arguments(generator)
        cpu_args = given.on_cpu(args if takes_numbers else tuple(_boxed(op, args)))
        cpu_kwargs = {name: given.on_cpu(value) for name, value in kwargs.items()}
        results = given.on_cpu(found)
        if random and (takes_generator or compute is not op):
            cpu_kwargs["generator"] = generator

        def work() -> None:
            _fill(results, compute(*cpu_args, **cpu_kwargs))

        launch(work)
        return found

    return run


def _reading(op: torch._ops.OpOverload, original: Any, *, of_values: bool) -> Callable[..., Any]:
    """An operator whose result the host needs at once; `of_values`: within other operators too."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _depth and not of_values:
            return original.call_boxed(keys, *_boxed(op, args), **kwargs)
        torch.cuda.current_stream().synchronize()
        given = _Arguments(None)
        computed = op(*given.on_cpu(args), **{name: given.on_cpu(value) for name, value in kwargs.items()})
        return _to_device(computed)

    return run


def _to_device(computed: Any) -> Any:
    if isinstance(computed, Tensor):
        return torch.empty_strided(
            computed.shape, computed.stride(), dtype=computed.dtype, device="cuda"
        ).copy_(computed)  # fmt: skip
    if isinstance(computed, (list, tuple)):
        return type(computed)(map(_to_device, computed))
    return computed


def _replacement(op: torch._ops.OpOverload, original: Any) -> Callable[..., Any] | None:
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    if name.startswith(NOT_COMPUTED):
        return None
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return None  # a view
    if op.name() in device_math.OPERATORS:
        return _computing(op, original)
    needs_values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(op.tags)
    if needs_values or any("Tensor" not in str(r.type) for r in schema.returns):
        return _reading(op, original, of_values=bool(needs_values))
    return _computing(op, original)


def _overloads(names: Sequence[str]) -> list[torch._ops.OpOverload]:
    split = [name.removeprefix("aten::").partition(".") for name in names if name.startswith("aten::")]
    return [getattr(getattr(torch.ops.aten, base), overload or "default") for base, _, overload in split]


def install() -> None:
    """Compute from now on, in this process. Threads of the CPU's kernels: one, so that bits do not depend on them."""
    if _keep or not cuda_in_ram.is_here():
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    library = torch.library.Library("aten", "IMPL")
    _keep.append(library)
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    for op in [*_overloads(names), *_ALSO]:
        run = _replacement(op, torch.library.get_kernel(op, "CUDA"))
        if run is not None:
            name = op.name().removeprefix("aten::")
            library.impl(name, run, "CUDA", with_keyset=True, allow_override=True)
    device_triton.install(launch, alias)
