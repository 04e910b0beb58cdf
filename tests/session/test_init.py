"""`chunkc.init`: built at home, one tensor at a time, and the same to everybody."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from built_modules import WIDTH, Tied, encoder, sequential
from harness import array, differences, segmented, take_step, weights
from torch import nn

import chunkc
from chunkc.runtime.storage import maps
from chunkc.runtime.storage.unassigned import SMALLEST_NBYTES, unassigned_memory_of
from chunkc.session.session import owner

BUILDERS: dict[str, Callable[[], nn.Module]] = {"tied": Tied, "copies": encoder, "sequence": sequential}


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def at_home(home: str, build: Callable[[], nn.Module]) -> nn.Module:
    """A model that is built in its home."""
    with chunkc.init(home=home):
        return built(build)


@pytest.fixture(params=["cpu", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "cpu" if request.param == "cpu" else f"disk:{tmp_path}"


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_random_numbers_are_those_of_ordinary_construction(home: str, build: Callable[[], nn.Module]) -> None:
    model = at_home(home, build)
    after = torch.rand(3)
    assert not differences(weights(model), weights(built(build)))
    assert torch.equal(after, torch.rand(3))
    assert all((unassigned_memory_of(p) is not None) == (p.nbytes >= 4096) for p in model.parameters())
    assert [type(p) for p in model.parameters()] == [nn.Parameter] * len(list(model.parameters()))
    assert all(unassigned_memory_of(buffer) is None for buffer in model.buffers())


def test_tied_weights_stay_tied_and_frozen_ones_frozen(home: str) -> None:
    model = at_home(home, Tied)
    assert model.head.weight is model.embedding.weight
    assert not model.scale.requires_grad
    assert model.body.weight.requires_grad


@pytest.mark.second_tier
def test_a_model_trains_as_one_that_was_built_as_usual(home: str) -> None:
    results = []
    tokens = torch.randint(100, (2, 8), generator=torch.Generator().manual_seed(1))
    for at_home in (True, False):
        torch._dynamo.reset()
        if at_home:
            with chunkc.init(home=home):
                model = built(Tied)
        else:
            model = built(Tied)
        options = {"memory_budget": "128KiB", "codegen": "eager", "whole_graph": "never"}
        call = torch.compile(model, backend="chunkc", options=options if at_home else options | {"home": home})
        optimizer = chunkc.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(3):
            take_step(call(tokens), optimizer)
        assert owner(model.body.weight)[0].options.home == home
        assert all(unassigned_memory_of(p) is None for p in model.parameters())
        results.append(weights(model))
    assert not differences(*results)


def test_what_stays_on_the_compute_tier_leaves_home(home: str) -> None:
    model = at_home(home, Tied)
    options = {"memory_budget": "1GiB", "codegen": "eager"}
    torch.compile(model, backend="chunkc", options=options)(torch.zeros(1, 2).long())
    assert all(unassigned_memory_of(p) is None for p in model.parameters())
    assert not differences(weights(model), weights(built(Tied)))


def test_a_compilation_that_fails_leaves_parameters_where_they_were_born(home: str) -> None:
    model = at_home(home, Tied)
    before, tokens = [p.data_ptr() for p in model.parameters()], torch.zeros(1, 2).long()
    with pytest.raises(chunkc.BudgetError):
        torch.compile(model, backend="chunkc", options={"memory_budget": 4096, "codegen": "eager"})(tokens)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_another_home_is_refused_when_it_is_compiled(tmp_path: Path) -> None:
    model = at_home(f"disk:{tmp_path}", Tied)
    call = torch.compile(model, backend="chunkc", options={"memory_budget": "1MiB", "home": "cpu"})
    with pytest.raises(chunkc.OptionsError, match=r"home is 'cpu', but the model's parameters already live .*init\(\)"):
        call(torch.zeros(1, 2).long())


def test_place_goes_on_where_the_model_was_built(home: str) -> None:
    model = at_home(home, encoder)
    chunkc.place(model)
    assert owner(next(model.parameters()))[0].options.home == home
    assert not differences(weights(model), weights(built(encoder)))


def test_a_tensor_that_others_have_moves_when_they_let_go(home: str) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kept = torch.randn(WIDTH, WIDTH)
            self.first = nn.Parameter(kept)
            assert unassigned_memory_of(self.first) is None
            del kept
            self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))

    with chunkc.init(home=home):
        model = Kept()
        shared = nn.Parameter(torch.ones(WIDTH, WIDTH))
        view = shared.data
        model.third = shared
    assert [unassigned_memory_of(p) is not None for p in model.parameters()] == [True, True, False]
    assert view.data_ptr() == shared.data_ptr()


def test_nothing_else_is_touched(home: str) -> None:
    before = nn.Linear(WIDTH, WIDTH)
    with chunkc.init(home=home):
        temporary = torch.randn(WIDTH, WIDTH) @ torch.randn(WIDTH, WIDTH)
        with torch.device("meta"):
            assert nn.Linear(WIDTH, WIDTH).weight.is_meta
    after = nn.Linear(WIDTH, WIDTH)
    assert unassigned_memory_of(temporary) is None
    assert all(unassigned_memory_of(p) is None for p in (*before.parameters(), *after.parameters()))


def test_home_memory_goes_with_the_model(tmp_path: Path) -> None:
    from chunkc.runtime.storage import unassigned as unassigned_memory

    before = len(unassigned_memory._memory_by_address)
    with chunkc.init(home=f"disk:{tmp_path}"):
        model = built(encoder)
        shadow = copy.deepcopy(model)
    assert not differences(weights(shadow), weights(model))
    assert len(unassigned_memory._memory_by_address) > before
    del model, shadow
    gc.collect()
    assert len(unassigned_memory._memory_by_address) == before


@pytest.mark.parametrize(("dtype", "moments"), [(torch.float32, "float32"), (torch.bfloat16, "int8")], ids=str)
@pytest.mark.parametrize("disk_holds", ["everything", "states"])
def test_states_that_are_loaded_before_the_first_call_are_at_home(
    tmp_path: Path, disk_holds: str, dtype: torch.dtype, moments: str
) -> None:
    """In RAM they would be several times what the model takes there."""

    def adamw(model: nn.Module) -> chunkc.optim.AdamW:
        return chunkc.optim.AdamW(model.parameters(), lr=1e-2, moments_dtype=moments)

    def step(model: nn.Module, optimizer: chunkc.optim.AdamW) -> None:
        take_step(model(torch.ones(2, WIDTH, dtype=dtype)).square().mean(), optimizer)

    def mlp() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    usual = built(mlp).to(dtype)
    before = adamw(usual)
    step(usual, before)
    with chunkc.init(home=f"disk:{tmp_path}", disk_holds=disk_holds):
        model = mlp().to(dtype)
    optimizer = adamw(model)
    model.load_state_dict(usual.state_dict())
    optimizer.load_state_dict(before.state_dict())
    large = [t for s in optimizer.state.values() for t in s.values() if t.nbytes >= SMALLEST_NBYTES]
    assert len(large) >= 4
    assert all(map(is_in_a_file, large))
    step(torch.compile(model, backend="chunkc", options={"memory_budget": "160KiB", "codegen": "eager"}), optimizer)
    step(usual, before)
    assert not differences(weights(model), weights(usual))
    found, expected = (o.state_dict()["state"] for o in (optimizer, before))
    for number, state in expected.items():
        assert not differences({k: array(v) for k, v in found[number].items()}, {k: array(v) for k, v in state.items()})


def is_in_a_file(tensor: torch.Tensor) -> bool:
    return any(first <= tensor.data_ptr() < first + nbytes for first, (nbytes, *_) in maps._live.items())


def test_a_full_home_is_an_error_at_the_constructor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(chunkc.HomeError, match="cannot reserve"), chunkc.init(home=f"disk:{tmp_path}"):
        nn.Linear(WIDTH, WIDTH)
    nn.Linear(WIDTH, WIDTH)  # nothing listens any more


@pytest.mark.parametrize("wrong", [{"home": "nowhere"}, {"disk_holds": "nothing"}, {"device": "toaster"}])
def test_bad_arguments(wrong: dict[str, str]) -> None:
    with pytest.raises(chunkc.ChunkcError), chunkc.init(**wrong):
        pass


@pytest.mark.second_tier
def test_from_pretrained_loads_into_home(home: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    saved = transformers.LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    with chunkc.init(home=home):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
        torch.manual_seed(0)
        fresh = transformers.LlamaForCausalLM(config)
    assert all(unassigned_memory_of(p) is not None for m in (model, fresh) for p in m.parameters() if p.nbytes >= 4096)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not differences(weights(model), weights(saved))
    assert not differences(weights(fresh), weights(saved))


def test_clones_are_what_they_are_elsewhere(home: str) -> None:
    copies = [
        lambda w: w[:, :5].clone(),
        lambda w: w.diagonal().clone(),
        lambda w: w[:0].clone(),
        lambda w: w[:1].expand(4, -1).clone(),
        lambda w: w.t().clone(memory_format=torch.contiguous_format),
    ]
    with chunkc.init(home=home):
        layer = nn.Linear(64, 64)
        found = [take(layer.weight) for take in copies]
        found[0].sum().backward()
    expected = [take(layer.weight) for take in copies]
    assert [(f.stride(), f.requires_grad) for f in found] == [(e.stride(), e.requires_grad) for e in expected]
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    assert layer.weight.grad is not None


def test_weights_tied_through_data_stay_tied(home: str) -> None:
    def losses(model: nn.Module, call: Callable[..., torch.Tensor]) -> list[float]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            loss = call(torch.linspace(-1, 1, 4 * 64).reshape(4, 64)).square().mean()
            take_step(loss, optimizer)
            found.append(float(loss))
        return found

    def tied() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        model[2].weight.data = model[0].weight.data
        return model

    torch._dynamo.reset()
    with chunkc.init(home=home):
        model = tied()
    compiled = segmented(model, 300_000)
    plain = tied()
    assert losses(model, compiled) == pytest.approx(losses(plain, plain), rel=1e-5)


def test_what_is_converted_inside_stays_at_home(home: str) -> None:
    torch.manual_seed(0)
    expected = encoder().half()
    torch.manual_seed(0)
    with chunkc.init(home=home):
        model = encoder().half()
    large = [p for p in model.parameters() if p.nbytes >= SMALLEST_NBYTES]
    assert len(large) > 1
    assert all(unassigned_memory_of(p) is not None for p in large)
    assert all(p.dtype == torch.float16 for p in model.parameters())
    assert not differences([array(p) for p in model.parameters()], [array(p) for p in expected.parameters()])


def test_what_is_converted_later_is_compiled_with_the_home_it_was_built_in(tmp_path: Path) -> None:
    with chunkc.init(home=f"disk:{tmp_path}"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model.bfloat16()
    assert all(unassigned_memory_of(p) is None for p in model.parameters())
    call = segmented(model, "1GiB")
    call(torch.randn(2, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
    assert owner(model[0].weight)[0].options.home == f"disk:{tmp_path}"


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def test_a_look_alike_built_in_another_home_is_refused(tmp_path: Path, fresh_dynamo: None) -> None:
    """Equal options are one budget and one home. Named, homes are options that differ."""
    unnamed = {"memory_budget": 1 << 26, "codegen": "eager"}
    x = torch.ones(2, WIDTH)
    models = []
    for home in ("cpu", f"disk:{tmp_path}"):
        with chunkc.init(home=home):
            models.append(two_layers())
    first, second = (torch.compile(model, backend="chunkc", options=dict(unnamed)) for model in models)
    first(x).sum().backward()
    before = weights(models[1]), [p.data_ptr() for p in models[1].parameters()]
    with pytest.raises(chunkc.OptionsError, match=r"several homes, 'cpu'.* and 'disk:"):
        second(x)
    assert not differences(before, (weights(models[1]), [p.data_ptr() for p in models[1].parameters()]))
    named = torch.compile(models[1], backend="chunkc", options=unnamed | {"home": f"disk:{tmp_path}"})
    torch.testing.assert_close(named(x), models[1](x))
    assert len({id(owner(p)[0]) for model in models for p in model.parameters()}) == 2


def test_one_that_is_gone_is_in_nobody_s_way(tmp_path: Path, fresh_dynamo: None) -> None:
    """A sweep over homes with one dictionary of options, in which cycles keep each model for a while."""
    options = {"memory_budget": 1 << 26, "codegen": "eager"}
    for home in ("cpu", f"disk:{tmp_path}"):
        with chunkc.init(home=home):
            model = two_layers()
        model.itself = [model]
        torch.compile(model, backend="chunkc", options=options)(torch.ones(2, WIDTH)).sum().backward()
        assert owner(next(model.parameters()))[0].options.home == home
        del model


def test_a_model_built_in_several_homes_is_refused(tmp_path: Path, fresh_dynamo: None) -> None:
    layers = []
    for home in ("cpu", f"disk:{tmp_path}"):
        with chunkc.init(home=home):
            layers.append(nn.Linear(WIDTH, WIDTH))
    options = {"memory_budget": 1 << 26, "codegen": "eager"}
    with pytest.raises(chunkc.OptionsError, match="several homes"):
        torch.compile(nn.Sequential(*layers), backend="chunkc", options=options)(torch.ones(2, WIDTH))
