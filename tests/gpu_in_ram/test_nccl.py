"""NCCL in RAM: PyTorch's own ProcessGroupNCCL between processes, in stream order."""

from __future__ import annotations

import time

from device_ranks import all_well, on_ranks

_BEGIN = """
import os, time
import torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=os.environ["INIT_METHOD"], rank=rank, world_size=size)

def on_device(values, dtype=torch.float32):  # kernels do nothing here: values come by copies
    return torch.tensor(values, dtype=dtype).pin_memory().to("cuda", non_blocking=True)

def room(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="cuda")
"""

_COLLECTIVES = """
large = torch.arange(300_000.0).add_(rank).pin_memory()
for step in range(8):  # more than a socket holds, both ways at once, after late copies
    sent, received = large.to("cuda", non_blocking=True), room(300_000)
    messages = [(dist.isend, sent, (rank + 1) % size), (dist.irecv, received, (rank - 1) % size)]
    for work in dist.batch_isend_irecv([dist.P2POp(do, tensor, peer) for do, tensor, peer in messages]):
        work.wait()
    found = torch.empty(300_000).pin_memory()
    found.copy_(received, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert torch.equal(found, torch.arange(300_000.0) + (rank - 1) % size)

total = sum(range(1, size + 1))
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
    value = on_device([rank + 1, 1], dtype)
    dist.all_reduce(value)
    assert value.tolist() == [total, size], (dtype, value)
value = on_device([float(rank)])
dist.all_reduce(value, op=dist.ReduceOp.MAX)
assert value.tolist() == [size - 1]
value = on_device([float(rank + 1)])
dist.reduce(value, 1)
assert rank != 1 or value.tolist() == [total]
value = on_device([float(rank)] * 3)
dist.broadcast(value, 1)
assert value.tolist() == [1.0] * 3

group = dist.new_group(list(range(size)), backend="nccl")
parts = room(size, 2)
dist.all_gather_into_tensor(parts, on_device([rank, 10.0 + rank]), group=group)
assert parts.tolist() == [[other, 10.0 + other] for other in range(size)]
part = room(2)
dist.reduce_scatter_tensor(part, on_device([float(n) for n in range(2 * size)]), group=group)
assert part.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
pieces = room(size)
dist.all_to_all_single(pieces, on_device([10.0 * rank + other for other in range(size)]), group=group)
assert pieces.tolist() == [10.0 * other + rank for other in range(size)]
dist.destroy_process_group(group)
dist.barrier()
dist.destroy_process_group()
print("well")
"""


def test_messages_and_collectives_on_late_streams() -> None:
    assert all_well(on_ranks(_BEGIN + _COLLECTIVES, 3)) == ["well\n"] * 3


_KILLED = """
dist.all_reduce(on_device([1.0]))
torch.cuda.synchronize()
if rank == 1:
    os._exit(3)
dist.all_reduce(on_device([1.0]))
end = torch.cuda.Event()
end.record()
time.sleep(1.0)
assert not end.query()  # nobody has noticed
dist.group.WORLD._get_backend(torch.device("cuda")).abort()
end.synchronize()
print("aborted", flush=True)
os._exit(0)
"""


def test_who_waits_for_a_rank_that_was_killed_goes_on_when_aborted() -> None:
    start_s = time.monotonic()
    first, second = on_ranks(_BEGIN + _KILLED, TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
    assert (first.code, first.said, second.code) == (0, "aborted\n", 3), first.errors[-2000:]
    assert time.monotonic() - start_s < 60


_ONE_GPU = """
torch.cuda.set_device(0)
try:
    dist.all_reduce(on_device([1.0]))
except dist.DistBackendError as error:
    print("Duplicate GPU detected" in str(error))
"""


def test_two_ranks_on_one_device_are_refused() -> None:
    assert [ended.said for ended in on_ranks(_BEGIN + _ONE_GPU)] == ["True\n"] * 2
