"""`chunkc.place`: parameters go home before compilation, and stay what they were to everybody else. A model
without memory is made there, module by module.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from built_modules import Tied, sequential
from harness import array, differences, home_of, segmented, weights
from optim_models import is_managed
from torch import Tensor, nn

import chunkc
from chunkc.session.session import owner

WIDTH = 128


class Model(nn.Module):
    """Two tied weights, a frozen one, biases too small to move, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.frozen, self.last):
            x = torch.tanh(layer(x)) * self.scale
        return x.square().mean()


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def batch() -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))


def pointers(model: nn.Module) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, Any]:
    return {name: array(tensor) for name, tensor in model.state_dict().items()}


def compiled(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    options = {"memory_budget": "1MiB", "codegen": "eager", "whole_graph": "never", "activations": "keep"} | options
    return torch.compile(model, backend="chunkc", options=options)


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_the_model_is_the_same_to_everybody(home: str) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters, before, where = list(model.parameters()), values(model), pointers(model)
    expected = model(batch()).item()
    assert chunkc.place(model, home=home) is model
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert not differences(values(model), before)
    assert model.first.weight is model.last.weight
    assert [p.requires_grad for p in parameters] == [p.requires_grad for p in build().parameters()]
    moved = {name for name, pointer in pointers(model).items() if pointer != where[name]}
    assert moved == {"first.weight", "second.weight", "frozen.weight"}
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)
    loss = model(batch())
    assert loss.item() == expected
    loss.backward()
    assert model.frozen.weight.grad is None
    optimizer.step()
    assert differences(values(model), before)


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_gradients_that_exist_are_kept(home: str) -> None:
    model = build()
    model(batch()).backward()
    before = {name: array(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    chunkc.place(model, home=home)
    assert not differences({n: array(p.grad) for n, p in model.named_parameters() if p.grad is not None}, before)
    compiled(model, home=home)(batch()).backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, 2 * torch.from_numpy(before[name]))


def test_a_state_dict_can_be_loaded_into_a_placed_model() -> None:
    model, state = chunkc.place(build()), {k: v + 1 for k, v in build().state_dict().items()}
    where = pointers(model)
    model.load_state_dict(state)
    assert pointers(model) == where
    assert not differences(values(model), {k: array(v) for k, v in state.items()})


def test_the_report_of_a_placed_model() -> None:
    report = chunkc.report(chunkc.place(build(), chunk_size="64KiB"))
    assert report.chunk_size_nbytes == 64 * 1024
    assert (report.num_chunks, report.num_resident_chunks) == (3, 0)
    assert report.home_nbytes >= 3 * 4 * WIDTH * WIDTH
    assert report.predicted_peak_nbytes == 0
    assert (report.moments, report.plan_text) == ((), "")


def test_chunks_follow_the_order_of_the_parameters() -> None:
    model = chunkc.place(build(), chunk_size="64KiB")
    names = [s.spec.name for group in home_of(model.first.weight)[0].store.layout.groups for s in group.slices]
    assert names == ["first.weight", "second.weight", "frozen.weight"]


def test_the_compiler_takes_over_the_home() -> None:
    model = chunkc.place(build(), home="disk")
    where = pointers(model)
    call = compiled(model, memory_budget="400KiB")  # says nothing of a home
    call(batch()).backward()
    report = chunkc.report(model)
    assert (report.memory_budget_nbytes, report.num_resident_chunks) == (400 * 1024, 0)
    assert pointers(model) == where
    with pytest.raises(chunkc.OptionsError, match="home is 'disk'; use home=\"cpu\""):
        chunkc.optim.AdamW(model.parameters(), update_on="cpu").step()


@pytest.mark.parametrize("other", [{"home": "cpu"}, {"disk_holds": "states"}])
def test_another_home_is_refused(other: dict[str, str]) -> None:
    model = chunkc.place(build(), home="disk")
    before = values(model)
    with pytest.raises(chunkc.OptionsError, match=next(iter(other))):
        compiled(model, **other)(batch())
    assert not differences(values(model), before)


def test_a_disk_for_optimizer_states_alone(tmp_path: Path) -> None:
    """The same bits; parameters and gradients in memory, states in files."""
    results = []
    for where in ({}, {"home": f"disk:{tmp_path}"}, {"home": f"disk:{tmp_path}", "disk_holds": "states"}):
        model = chunkc.place(build(), **where)
        call = compiled(model, memory_budget="400KiB", **where)
        optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            call(batch()).backward()
            optimizer.step()
        states = {name: array(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters() if p.requires_grad}
        results.append([values(model), states])
        weight = model.first.weight
        found = [in_a_file(tensor) for tensor in (weight, weight.grad, optimizer.state[weight]["exp_avg"])]
        assert found == [bool(where) and "disk_holds" not in where] * 2 + [bool(where)]
    assert not differences(*results[:2])
    assert not differences(results[0], results[2])


def in_a_file(tensor: Any) -> bool:
    """Whether a tensor's memory is a map of a file, by what Linux says of this process."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line.split()[4] != "0"  # its inode
    raise AssertionError("no such memory")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"device": "cuda:99"}, chunkc.UnsupportedError, "no CUDA device|CUDA devices? that"),
        ({"device": "xpu"}, chunkc.UnsupportedError, "CUDA"),
        ({"device": "no such device"}, chunkc.OptionsError, "device"),
        ({"home": "attic"}, chunkc.OptionsError, "home"),
        ({"home": 3}, chunkc.OptionsError, "home"),
        ({"disk_holds": "nothing"}, chunkc.OptionsError, "disk_holds"),
        ({"chunk_size": 0}, chunkc.OptionsError, "chunk_size"),
        ({"chunk_size": "many"}, chunkc.OptionsError, "chunk_size"),
        ({"debug": "yes"}, chunkc.OptionsError, "debug"),
        ({"home": "disk:/proc/none"}, chunkc.HomeError, "none"),
    ],
)
def test_arguments_that_make_no_sense_move_nothing(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    model = build()
    where = pointers(model)
    with pytest.raises(error, match=match):
        chunkc.place(model, **arguments)
    assert pointers(model) == where
    chunkc.place(model)


def once_compiled() -> nn.Module:
    model = build()
    compiled(model)(batch())
    return model


def partly_on_meta() -> nn.Module:
    model = build()
    model.second = nn.Linear(WIDTH, WIDTH, device="meta")
    return model


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: chunkc.place(build()), chunkc.UnsupportedError, r"first\.weight is placed"),
        (lambda: nn.Sequential(nn.Linear(2, 2), chunkc.place(build())), chunkc.UnsupportedError, "placed"),
        (once_compiled, chunkc.UnsupportedError, r"compiled already: there is nothing to place.*anew"),
        (nn.ReLU, chunkc.OptionsError, "no parameters to place: compile it as it is"),
        (partly_on_meta, chunkc.UnsupportedError, r"second\.weight is on the meta device"),
    ],
    ids=["placed", "placed in part", "compiled", "nothing", "meta"],
)
def test_what_cannot_be_placed_is_refused(make: Callable[[], nn.Module], error: type[Exception], match: str) -> None:
    model = make()
    where = pointers(model)
    with pytest.raises(error, match=match):
        chunkc.place(model)
    assert pointers(model) == where


def test_a_model_without_large_parameters() -> None:
    model = nn.Linear(3, 3)
    chunkc.place(model, chunk_size="64KiB")
    assert chunkc.report(model).num_chunks == 0
    call = compiled(model)
    call(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model.bias.grad, torch.full((3,), 2.0))


def test_environment_variables_stand_in_for_home_and_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKC_HOME", f"disk:{tmp_path}")
    monkeypatch.setenv("CHUNKC_MEMORY_BUDGET", "2MiB")

    placed = chunkc.place(build())
    assert home_of(placed.first.weight)[0].options.home == f"disk:{tmp_path}"
    assert home_of(chunkc.place(build(), home="cpu").first.weight)[0].options.home == "cpu"

    model = build()
    model.compile(backend="chunkc", options={"codegen": "eager"})
    model(batch()).backward()
    assert home_of(model.first.weight)[0].options.home == f"disk:{tmp_path}"
    assert chunkc.report(model).memory_budget_nbytes == 2 * 2**20


# ---------------------------------------------------------------- models without memory


def on_meta(build: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_reset_parameters_gives_the_values_of_ordinary_construction(home: str) -> None:
    torch.manual_seed(0)
    expected = sequential()
    torch.manual_seed(0)
    model = chunkc.place(on_meta(sequential), home=home, init="reset_parameters", chunk_size="16KiB")
    assert not differences(weights(model), weights(expected))
    assert all(owner(p) is not None for p in model.parameters())
    assert is_managed(model[0].weight)


def test_a_function_initialises_module_by_module_and_ties_stay() -> None:
    seen = []

    def initialise(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(len(seen))

    model = chunkc.place(on_meta(Tied), init=initialise, chunk_size="16KiB")
    assert seen == ["Embedding", "Linear", "Tied"]  # the head has nothing of its own
    assert model.head.weight is model.embedding.weight
    assert [float(t.detach().flatten()[0]) for t in (model.embedding.weight, model.body.weight, model.mask)] == [
        1,
        2,
        3,
    ]
    assert not model.scale.requires_grad
    call = segmented(model, "512KiB")
    call(torch.zeros(1, 4).long()).backward()
    assert model.body.weight.grad is not None


class Assigns(nn.Linear):
    """Its initialisation makes a parameter, as some libraries' do."""

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.randn(self.weight.shape))
        self.bias = nn.Parameter(torch.zeros(self.bias.shape))


class OfAssigned(nn.Module):
    """Two of them; with `tied`, of one weight."""

    tied = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Assigns(WIDTH, WIDTH), Assigns(WIDTH, WIDTH)
        if self.tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def test_an_initialisation_may_assign_parameters() -> None:
    torch.manual_seed(0)
    expected = [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    torch.manual_seed(0)
    model = chunkc.place(on_meta(OfAssigned), init="reset_parameters", chunk_size="16KiB")
    for layer, values in zip((model.first, model.second), expected):
        assert is_managed(layer.weight)
        assert torch.equal(layer.weight, values)
    call = segmented(model, "512KiB")
    optimizer = chunkc.optim.SGD(model.parameters(), lr=1.0)
    call(torch.ones(1, WIDTH)).backward()
    optimizer.step()
    assert not any(torch.equal(layer.weight, values) for layer, values in zip((model.first, model.second), expected))


def test_assigned_parameters_that_cannot_stand_for_the_former_are_refused() -> None:
    class OfTied(OfAssigned):
        tied = True

    def half(module: nn.Module) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.zeros(parameter.shape).half()))

    with pytest.raises(chunkc.UnsupportedError, match=r"first\.weight, which is a tied weight"):
        chunkc.place(on_meta(OfTied), init="reset_parameters")
    with pytest.raises(chunkc.UnsupportedError, match=r"made first\.weight a Parameter of torch\.float16"):
        chunkc.place(on_meta(OfAssigned), init=half)


def test_parameters_with_values_keep_them() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, device="meta"))
    first = model[0].weight
    before = array(first)
    chunkc.place(model, init="reset_parameters")
    assert model[0].weight is first
    assert not differences(array(first), before)
    assert model[1].weight.abs().sum() > 0


def test_what_cannot_be_made_is_refused_before_anything_is() -> None:
    with pytest.raises(chunkc.UnsupportedError, match="scale is on the meta device"):
        chunkc.place(on_meta(Tied))
    model = on_meta(Tied)
    with pytest.raises(chunkc.UnsupportedError, match=r"scale is on the meta device, and Tied has no reset_parameters"):
        chunkc.place(model, init="reset_parameters")
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(chunkc.OptionsError, match="init is"):
        chunkc.place(on_meta(Tied), init="xavier")


def test_an_error_in_the_function_ends_the_session() -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.LSTM):
            raise ValueError("no such luck")

    model = on_meta(sequential)
    with pytest.raises(ValueError, match="no such luck"):
        chunkc.place(model, init=initialise)
    assert all(owner(p) is None for p in model.parameters())


@pytest.mark.second_tier
def test_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    chunkc.place(model, home=f"disk:{tmp_path}", init=model._init_weights)
    ordinary = transformers.LlamaForCausalLM(config)
    assert not [name for name, tensor in model.named_buffers() if tensor.is_meta]
    for (name, ours), theirs in zip(model.named_parameters(), ordinary.parameters(), strict=True):
        assert float(ours.detach().std()) == pytest.approx(float(theirs.detach().std()), rel=0.2, abs=1e-6), name
    ordinary.load_state_dict(model.state_dict())
    ids = torch.randint(128, (1, 8))
    torch.testing.assert_close(model(input_ids=ids).logits, ordinary(input_ids=ids).logits)
