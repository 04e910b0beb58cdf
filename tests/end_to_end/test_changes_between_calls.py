"""What users do to a model between calls: as in plain PyTorch, or refused before anything changes."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch
from harness import HUGE, adamw, array, compile_case, differences, gradients, session_of, weights
from scripts import (
    CASE,
    assert_close,
    backward,
    compile_large,
    compile_small,
    run_three_ways,
    sgd,
    small_budget,
    train_steps,
)
from torch import Tensor, nn

import chunkc

pytestmark = pytest.mark.usefixtures("every_way")


def weight_of(model: nn.Module) -> nn.Parameter:
    """A parameter that lives in a chunk under a small budget."""
    return max(model.parameters(), key=lambda p: p.numel())


def two_alike(model: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    """Two large parameters of one shape."""
    shape = None
    for parameter in model.parameters():
        if parameter.dim() == 2 and parameter.numel() > 4096:
            if shape is not None and shape.shape == parameter.shape:
                return shape, parameter
            shape = shape if shape is not None else parameter
    raise AssertionError("no two parameters are alike")


# ---------------------------------------------------------------- replaced data


def test_replaced_data_is_trained() -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        optimizer, seen = sgd(model.parameters()), []
        seen += train_steps(call, optimizer, range(1))
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
        seen += [*train_steps(call, optimizer, range(1, 3)), weights(model)]
        return seen

    run_three_ways(script)


def test_replaced_data_under_chunked_updates() -> None:
    """Replaced before the step alone: the update begins from what the user sees."""

    def script(make: Callable[..., torch.optim.Optimizer], model: nn.Module, call: Callable[..., Tensor]) -> list:
        optimizer = make(model.parameters(), lr=1e-3, eps=1e-3)
        for step in range(2):
            backward(call, step)
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
            optimizer.step()
            optimizer.zero_grad()
        return [weights(model)]

    small = script(chunkc.optim.AdamW, *compile_small())
    plain = CASE.build(0)
    assert_close(small, script(torch.optim.AdamW, plain, plain))


def test_replaced_data_beside_an_update_that_has_begun_is_refused() -> None:
    model, compiled = compile_small("cpu")
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3, update_on="cpu", overlap="backward")
    train_steps(compiled, optimizer, range(2))
    backward(compiled, 2)
    parameter = two_alike(model)[0]
    parameter.data = parameter.data.clone()
    with pytest.raises(chunkc.UnsupportedError, match="after its update had begun"):
        optimizer.step()


def test_sharpness_aware_minimisation() -> None:
    """Each step goes up, computes a second gradient, and puts the old tensors back."""

    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        optimizer, seen = sgd(model.parameters()), []
        for step in range(2):
            seen.append(backward(call, step))
            old = {p: p.data for p in model.parameters()}
            for p in model.parameters():
                p.data = p.data + 0.01 * p.grad.sign()
            optimizer.zero_grad()
            seen.append(backward(call, step))
            for p in model.parameters():
                p.data = old[p]
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, weights(model)]

    small = script(*compile_small())
    assert not differences(small, script(*compile_large()))


def test_data_replaced_between_forward_and_backward() -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        loss = call(**CASE.batch(0))
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        loss.backward()
        return [gradients(model), weights(model)]

    run_three_ways(script)


def test_vector_to_parameters() -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        optimizer = sgd(model.parameters())
        train_steps(call, optimizer, range(1))
        vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.9
        nn.utils.vector_to_parameters(vector, model.parameters())
        return [*train_steps(call, optimizer, range(2)), weights(model)]

    run_three_ways(script)


def test_lower_bits_of_replaced_data_are_left_out() -> None:
    """A split master begins again from what the user put there."""
    torch._dynamo.reset()
    seen = []
    for replaced in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16()
        options = {"codegen": "eager", "memory_budget": 380_000, "whole_graph": "never"}
        compiled = torch.compile(chunkc.place(model), backend="chunkc", options=options)
        optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            torch.manual_seed(step)
            compiled(torch.randn(4, 64, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for p in model.parameters() if step == 1 else ():
                with torch.no_grad():
                    p.data = p.data * 2 if replaced else p.data
                    if not replaced:
                        p.mul_(2)
        seen.append({name: array(p) for name, p in model.named_parameters() if p.dim() == 2})  # what lives in chunks
    assert not differences(*seen)


def test_shared_memory_is_refused_until_the_parameter_has_its_own() -> None:
    model, compiled = compile_small()
    backward(compiled, 0)
    parameter = weight_of(model)
    before = array(parameter)
    parameter.share_memory_()
    with pytest.raises(chunkc.UnsupportedError, match=r"processes share"):
        compiled(**CASE.batch(0))
    assert parameter.is_shared()
    assert not differences(array(parameter), before)
    parameter.data = parameter.data.clone()
    backward(compiled, 0)


def test_a_model_in_shared_memory_stays_there() -> None:
    torch._dynamo.reset()
    model = CASE.build(0).share_memory()
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": HUGE, "codegen": "eager"})
    chunkc.place(other := CASE.build(0).share_memory())
    train_steps(compiled, adamw(model.parameters()), range(1))
    assert all(p.is_shared() for p in (*model.parameters(), *other.parameters()))


def test_memory_that_others_have_stays() -> None:
    """A `state_dict` from before the first call keeps following the parameters, and so does data that two share."""
    torch._dynamo.reset()
    model = CASE.build(0)
    state = model.state_dict()
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": HUGE, "codegen": "eager"})
    chunkc.place(model)
    train_steps(compiled, adamw(model.parameters()), range(1))
    now = model.state_dict()
    assert not differences({k: array(v) for k, v in state.items()}, {k: array(v) for k, v in now.items()})
    assert all(state[name].data_ptr() == p.data_ptr() for name, p in model.named_parameters())


def test_data_tied_before_the_first_call() -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        first, second = two_alike(model)
        second.data = first.data
        losses = train_steps(call, sgd(model.parameters()), range(2))
        assert torch.equal(first, second)
        return [*losses, weights(model)]

    torch._dynamo.reset()
    model = CASE.build(0)
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": 4 * small_budget(), "codegen": "eager"})
    plain = CASE.build(0)
    assert_close(script(model, compiled), script(plain, plain))


def test_data_tied_after_the_first_call_is_refused() -> None:
    model, compiled = compile_small()
    backward(compiled, 0)
    first, second = two_alike(model)
    second.data = first.data
    with pytest.raises(chunkc.UnsupportedError, match="the same memory"):
        compiled(**CASE.batch(0))


@pytest.mark.parametrize("budget", ["small", "large"])
def test_another_dtype_is_laid_out_anew(budget: str) -> None:
    model, compiled = compile_small() if budget == "small" else compile_large()
    optimizer = adamw(model.parameters())
    train_steps(compiled, optimizer, range(2))
    former = session_of(model)
    model.to(torch.bfloat16)
    backward(compiled, 2)
    assert all(p.dtype == torch.bfloat16 and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    before = weights(model)
    optimizer.step()
    assert differences(before, weights(model))
    assert session_of(model) is not former
    assert former.is_over


def test_a_step_right_after_a_conversion_refuses() -> None:
    model, compiled = compile_small()
    optimizer = adamw(model.parameters())
    backward(compiled, 0)
    model.to(torch.bfloat16)
    before = weights(model)
    with pytest.raises(chunkc.UnsupportedError, match=r"float32.*bfloat16"):
        optimizer.step()
    assert not differences(before, weights(model))


# ---------------------------------------------------------------- tied, frozen, written


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_tying_after_the_first_call(codegen: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))

    def script(model: nn.Sequential, call: Callable[[Tensor], Tensor]) -> list:
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 64)
        for step in range(3):
            if step == 1:
                model[2][0].weight = model[0][0].weight
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [weights(model)]

    seen = []
    for budget in (150_000, HUGE):
        torch._dynamo.reset()
        model = chunkc.place(build())
        options = {"memory_budget": budget, "codegen": codegen, "whole_graph": "never"}
        seen.append(script(model, torch.compile(model, backend="chunkc", options=options)))
    assert not differences(*seen)
    plain = build()
    assert_close(seen[0], script(plain, plain))


def test_frozen_between_forward_and_backward() -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        seen = []
        for step in range(2):
            loss = call(**CASE.batch(step))
            chosen = [p for i, p in enumerate(model.parameters()) if i % 2 == step]
            for parameter in chosen:
                parameter.requires_grad_(False)
            loss.backward()
            seen.append(gradients(model))
            for parameter in chosen:
                parameter.requires_grad_(True)
        return seen

    run_three_ways(script)


@pytest.mark.parametrize("room", [1.05, 20.0])
def test_a_write_between_forward_and_backward_is_refused(room: float) -> None:
    """By autograd, under every budget: it knows by version counters."""
    model, compiled = compile_small(room=room)
    for linear in [module for module in model.modules() if isinstance(module, nn.Linear)][1:2]:
        parameter = linear.weight
        loss = compiled(**CASE.batch(0))
        with torch.no_grad():
            parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize("view", ["detach", "view", "numpy", "grad"])
def test_views_of_a_gradient_keep_their_values(view: str, home: str) -> None:
    take = {
        "detach": lambda g: g.detach(),
        "view": lambda g: g.view(-1),
        "numpy": lambda g: g.numpy(),
        "grad": lambda g: g,
    }[view]
    model, compiled = compile_small(home)
    optimizer = adamw(model.parameters())
    for step in range(3):
        backward(compiled, step)
        kept = {name: take(p.grad) for name, p in model.named_parameters()}
        before = {name: array(torch.as_tensor(value)) for name, value in kept.items()}
        optimizer.step()
        optimizer.zero_grad()
        backward(compiled, step + 1)
        assert differences(before, {n: g.reshape(before[n].shape) for n, g in gradients(model).items()})
        assert not differences(before, {name: array(torch.as_tensor(value)) for name, value in kept.items()})
        optimizer.zero_grad()


def test_views_of_a_gradient_that_moved_home_keep_their_values() -> None:
    """The gradient is the user's own tensor when its parameter moves home, at the first call."""
    model, compiled = compile_case(CASE, memory_budget=small_budget(room=1.5), place=False, whole_graph="never")
    parameter, other = two_alike(model)
    parameter.grad = torch.full_like(parameter, 0.25)
    loss = compiled(**CASE.batch(0))
    kept = parameter.grad.detach()
    model.zero_grad()
    other.grad = torch.full_like(other, 0.5)
    loss.backward()
    assert (kept == 0.25).all()
    assert parameter.grad.data_ptr() != kept.data_ptr()


def test_views_of_a_gradient_follow_accumulation() -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        backward(call, 0)
        views = {name: p.grad.detach() for name, p in model.named_parameters()}
        backward(call, 1)
        assert all(torch.equal(views[name], p.grad) for name, p in model.named_parameters())
        return [{name: array(view) for name, view in views.items()}]

    run_three_ways(script)


def test_a_gradient_that_is_its_own_transposed_view() -> None:
    def script(make: Callable[..., torch.optim.Optimizer], model: nn.Module, call: Callable[[Tensor], Tensor]) -> list:
        optimizer = make(model.parameters(), lr=0.1, eps=1e-3)
        call(torch.linspace(-1, 1, 256).reshape(4, 64)).square().mean().backward()
        for linear in model:
            linear.weight.grad = linear.weight.grad.t()
        optimizer.step()
        return [weights(model)]

    torch._dynamo.reset()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    options = {"memory_budget": 200_000, "codegen": "eager", "whole_graph": "never"}
    compiled = torch.compile(chunkc.place(models[0]), backend="chunkc", options=options)
    small = script(chunkc.optim.AdamW, models[0], compiled)
    store = session_of(models[0]).store
    assert any(store.is_managed(name) for name in store.parameters())
    assert_close(small, script(torch.optim.AdamW, models[1], models[1]))


def test_kept_views_do_not_grow_home() -> None:
    model, compiled = compile_small()
    sizes = []
    for step in range(6):
        backward(compiled, step)
        kept = [p.grad.detach() for p in model.parameters()]
        model.zero_grad()
        sizes.append(session_of(model).store.arena.nbytes)
    assert len(kept) > 1
    assert len(set(sizes)) == 1


def test_one_tensor_as_the_gradient_of_several() -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.05), []
        first, second = two_alike(model)
        for step in range(2):
            first.grad = second.grad = shared = torch.ones_like(first)
            seen.append(backward(call, step))
            assert first.grad is shared
            assert second.grad is shared
            seen.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, weights(model)]

    run_three_ways(script, room=2.0)


def test_one_tensor_as_the_gradient_of_several_in_a_chunked_update() -> None:
    def script(make: Callable[..., torch.optim.Optimizer], model: nn.Module, call: Callable[..., Tensor]) -> list:
        optimizer = make(model.parameters(), lr=1e-3, eps=1e-3)
        first, second = two_alike(model)
        for step in range(2):
            if step == 0:
                first.grad = second.grad = torch.ones_like(first)
            backward(call, step)
            optimizer.step()
            assert first.grad is second.grad
        return [weights(model)]

    small = script(chunkc.optim.AdamW, *compile_small(room=2.0))
    plain = CASE.build(0)
    assert_close(small, script(torch.optim.AdamW, plain, plain))


# ---------------------------------------------------------------- processes and threads


def in_a_fork(check: Callable[[], bool]) -> bool:
    """What `check` says in a child of this process."""
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            ok = check()
        finally:
            os._exit(0 if ok else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def refuses(use: Callable[[], object]) -> bool:
    """Whether this raises the error that names forks."""
    try:
        use()
    except chunkc.UnsupportedError as error:
        return "os.fork" in str(error)
    return False


def test_a_child_neither_reads_nor_changes_a_disk_home() -> None:
    model, compiled = compile_small("disk")
    optimizer = adamw(model.parameters())
    train_steps(compiled, optimizer, range(1))
    backward(compiled, 1)
    parameter = weight_of(model)
    memory, before = parameter.detach().numpy(), weights(model)
    tensors = [parameter, parameter.grad, optimizer.state[parameter]["exp_avg"]]

    def check() -> bool:
        memory.fill(7.0)  # nobody can refuse what has an address
        uses = [torch.sum, torch.clone, lambda t: t + 1, lambda t: t.numpy(), lambda t: t.data, str]
        return all(refuses(lambda t=t, use=use: use(t)) for t in tensors for use in uses)

    assert in_a_fork(check)
    assert not differences(before, weights(model))
    optimizer.step()


def test_a_home_in_ram_is_a_snapshot_in_a_child() -> None:
    model, compiled = compile_small("cpu")
    backward(compiled, 0)
    before = weights(model)

    def check() -> bool:
        same = not differences(before, weights(model))
        for parameter in model.parameters():
            parameter.detach().numpy().fill(0)  # no threads: the parent's are not here
        return same

    assert in_a_fork(check)
    assert not differences(before, weights(model))


def run_in_threads(jobs: list[Callable[[], None]]) -> None:
    """Run all at once, and raise what one raised."""
    problems: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


@pytest.mark.parametrize("first", ["one thread", "all threads"])
def test_threads_call_one_model(first: str, short_switch_interval: None) -> None:
    model, compiled = compile_small(room=2.0)
    expected = {}
    reference = CASE.build(0)
    for step in range(4):
        with torch.no_grad():
            expected[step] = array(reference(**CASE.batch(step)))
    if first == "one thread":
        with torch.no_grad():
            compiled(**CASE.batch(0))

    def evaluate(step: int) -> None:
        for _ in range(8):
            with torch.no_grad():
                assert_close(array(compiled(**CASE.batch(step))), expected[step])

    run_in_threads([lambda step=step: evaluate(step) for step in range(4)])
    store = session_of(model).store
    assert len(store.resident) < len(store.layout.groups)


def test_a_thread_evaluates_while_another_trains(short_switch_interval: None) -> None:
    model, compiled = compile_small(room=2.0)
    losses: list = []
    done = threading.Event()

    def train() -> None:
        try:
            losses.extend(train_steps(compiled, adamw(model.parameters()), range(6)))
        finally:
            done.set()

    def evaluate() -> None:
        while not done.is_set():
            with torch.no_grad():
                assert torch.isfinite(compiled(**CASE.batch(9)))

    run_in_threads([train, evaluate])
    seen = weights(model)
    alone, compiled = compile_small(room=2.0)
    assert not differences(losses, train_steps(compiled, adamw(alone.parameters()), range(6)))
    assert not differences(seen, weights(alone))


def test_threads_train_models_that_share_a_session(short_switch_interval: None) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def train(model: nn.Module, call: Callable[[Tensor], Tensor], seen: dict, seed: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            call(torch.full((8, 64), float(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen[seed] = weights(model)

    results = []
    for together in (False, True):
        torch._dynamo.reset()
        options = {"memory_budget": 700_000, "codegen": "eager", "whole_graph": "never"}
        models = [build(seed) for seed in range(3)]
        compiled = [torch.compile(model, backend="chunkc", options=options) for model in models]
        seen: dict = {}
        jobs = [
            lambda m=m, c=c, s=s, seen=seen: train(m, c, seen, s)
            for s, (m, c) in enumerate(zip(models, compiled, strict=True))
        ]
        if together:
            run_in_threads(jobs)
        else:
            for job in jobs:
                job()
        results.append(dict(sorted(seen.items())))
        del models, compiled, jobs
        gc.collect()
    assert not differences(*results)


# ---------------------------------------------------------------- models that are gone


def test_a_model_that_is_gone_gives_everything_back(tmp_path: object) -> None:
    def num_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def num_threads() -> int:
        return sum(thread.name.startswith("chunkc-to") for thread in threading.enumerate())

    sessions = []
    gc.collect()
    before = num_files(), num_threads()
    for index in range(4):
        model = CASE.build(index)
        options = {"memory_budget": int((1.05 + index) * small_budget()), "home": "disk", "codegen": "eager"}
        compiled = torch.compile(model, backend="chunkc", options=options)
        train_steps(compiled, adamw(model.parameters()), range(1))
        sessions.append(session_of(model))
        del model, compiled
        gc.collect()
    assert all(session.is_over and not session.store.arena.chunks for session in sessions)
    for _ in range(50):
        if num_threads() <= before[1]:
            break
        threading.Event().wait(0.05)
    assert num_threads() <= before[1]
    assert num_files() <= before[0] + 2
