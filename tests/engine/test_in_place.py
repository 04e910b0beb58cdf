"""A model compiled in place: own classes and those of `torch.nn`, each with code of its own for Dynamo."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from harness import array, differences
from torch import nn
from zoo import floats

import chunkc
from chunkc.engine.in_place import compile_in_place
from chunkc.scalars import Scalars


def options() -> dict[str, object]:
    return {"memory_budget": "1MiB", "codegen": "eager"}


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def test_a_module_of_torch_nn_is_compiled_too() -> None:
    plain, model = stack(), stack()
    compile_in_place(model, options())
    x = floats(0, (4, 32))
    expected, found = plain(x).square().mean(), model(x).square().mean()
    found.backward()
    assert not differences(array(found), array(expected))
    assert chunkc.report(model).num_instructions > 0
    assert list(model.state_dict()) == list(plain.state_dict())
    clone = pickle.loads(pickle.dumps(copy.deepcopy(model)))  # both leave the compiled call behind, as PyTorch does
    assert not differences(array(clone(x)), array(model(x)))


@pytest.mark.second_tier
def test_many_modules_do_not_count_as_one_that_is_compiled_again_and_again() -> None:
    parts, shared = [stack() for _ in range(10)], options()  # Dynamo's limit is eight for one piece of code
    for part in parts:
        compile_in_place(part, shared)
        part(floats(0, (4, 32))).sum().backward()
    assert all(chunkc.report(part).num_instructions > 0 for part in parts)


def test_what_the_user_compiled_stays() -> None:
    model, graphs = stack(), []
    own = nn.Sequential()
    own.compile(backend=lambda gm, inputs: graphs.append(gm) or gm.forward)
    before = own._compiled_call_impl
    compile_in_place(own, options())
    assert own._compiled_call_impl is before
    with pytest.raises(chunkc.OptionsError, match="_orig_mod"):
        compile_in_place(torch.compile(model), options())


def test_scalars_count_since_the_last_reading() -> None:
    model, scalars = stack(), Scalars()
    assert scalars.read(model) == {}
    compile_in_place(model, options())
    sums = {"chunkc/compute_s": 0.0, "chunkc/wait_s": 0.0, "chunkc/to_device_bytes": 0.0}
    for step in range(3):
        model(floats(step, (4, 32))).sum().backward()
        found = scalars.read(model)
        sums = {name: total + found[name] for name, total in sums.items()}
    report = chunkc.report(model)
    assert sums["chunkc/compute_s"] == pytest.approx(report.time_s["compute"])
    assert sums["chunkc/to_device_bytes"] == report.traffic_nbytes["to_device"]
    assert 0 < found["chunkc/peak_bytes"] <= 2**20 or report.measured_peak_nbytes == found["chunkc/peak_bytes"]
    assert scalars.read(model)["chunkc/compute_s"] == 0.0


@pytest.mark.second_tier
def test_importing_chunkc_imports_no_library_of_loops_and_needs_no_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None; import chunkc, chunkc.kernels.elementwise_triton; "
        "found = {'transformers', 'lightning', 'trl', 'peft', 'accelerate', 'tensorboard'} & set(sys.modules); "
        "sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
