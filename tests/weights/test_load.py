"""`chunkc.load`: files of several formats, reported as `load_state_dict` reports them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from built_modules import WIDTH, Tied, encoder
from harness import array, differences, segmented
from torch import Tensor, nn

import chunkc
from chunkc.runtime.storage.unassigned import unassigned_memory_of

Write = Callable[[dict[str, Tensor], Path], Path]


def as_safetensors(state: dict[str, Tensor], folder: Path) -> Path:
    safetensors.torch.save_file({k: v.clone() for k, v in state.items()}, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def as_torch(state: dict[str, Tensor], folder: Path) -> Path:
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


def as_directory(state: dict[str, Tensor], folder: Path) -> Path:
    parts = {f"part-{i}.safetensors": {k: v.clone() for k, v in list(state.items())[i::3]} for i in range(3)}
    for name, part in parts.items():
        safetensors.torch.save_file(part, folder / name)
    weight_map = {key: name for name, part in parts.items() for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


FORMATS: dict[str, Write] = {"safetensors": as_safetensors, "torch": as_torch, "sharded": as_directory}


def values(model: nn.Module) -> dict[str, object]:
    return {name: array(tensor) for name, tensor in model.state_dict().items()}


def other(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build()


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("home", ["none", "cpu", "disk"])
def test_weights_come_as_they_were_saved(tmp_path: Path, write: Write, home: str) -> None:
    saved = other(encoder)
    path = write(saved.state_dict(), tmp_path)
    if home == "none":
        model = encoder()
    else:
        with chunkc.init(home=home):
            model = encoder()
    where = [p.data_ptr() for p in model.parameters()]
    missing, unexpected = chunkc.load(model, path)
    assert (missing, unexpected) == ([], [])
    assert not differences(values(model), values(saved))
    assert [p.data_ptr() for p in model.parameters()] == where
    assert (unassigned_memory_of(model.layers[0].linear1.weight) is not None) == (home != "none")


def test_a_model_that_is_placed_or_compiled_is_loaded_where_it_is(tmp_path: Path) -> None:
    saved = other(Tied)
    path = as_torch(saved.state_dict(), tmp_path)
    model = chunkc.place(Tied(), home=f"disk:{tmp_path}", chunk_size="16KiB")
    call = segmented(model, "256KiB")
    tokens = torch.randint(100, (2, 4))
    call(tokens)
    where = [p.data_ptr() for p in model.parameters()]
    chunkc.load(call, path)
    assert not differences(values(model), values(saved))
    assert [p.data_ptr() for p in model.parameters()] == where
    assert call(tokens).item() == pytest.approx(saved(tokens).item())


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("dtype", "masters"),
    [(torch.bfloat16, "split"), (torch.bfloat16, "float32"), (torch.float16, "float32")],
    ids=["split", "bf16", "fp16"],
)
@pytest.mark.parametrize("budget", ["128KiB", "1GiB"])
def test_the_optimizer_goes_on_from_what_was_loaded(
    tmp_path: Path, dtype: torch.dtype, masters: str, budget: str
) -> None:
    """Masters, or their lower halves, belong to the former values."""
    model = chunkc.place(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(dtype), chunk_size="8KiB")
    call = segmented(model, budget)
    optimizer = chunkc.optim.SGD(model.parameters(), lr=0.0, master_weights=masters)
    x = torch.randn(2, WIDTH, dtype=dtype)
    path = as_torch({name: torch.full_like(t, 1.0) for name, t in model.state_dict().items()}, tmp_path)
    for _ in range(2):
        call(x).square().mean().backward()
        optimizer.step()
        chunkc.load(model, path)
    call(x).square().mean().backward()
    optimizer.step()
    assert all(bool((p == 1.0).all()) for p in model.parameters())


def test_dtypes_are_converted(tmp_path: Path) -> None:
    saved = other(encoder)
    model = encoder().bfloat16()
    chunkc.load(model, as_safetensors(saved.state_dict(), tmp_path))
    assert not differences(values(model), values(saved.bfloat16()))


@pytest.mark.parametrize("through_data", [False, True])
def test_one_name_of_a_shared_weight_is_enough(tmp_path: Path, through_data: bool) -> None:
    saved, model = other(Tied), Tied()
    for tied in (saved, model) if through_data else ():
        tied.head.weight = nn.Parameter(torch.empty(0))
        tied.head.weight.data = tied.embedding.weight.data
    for left_out in ("head.weight", "embedding.weight"):
        state = {name: tensor for name, tensor in saved.state_dict().items() if name != left_out}
        assert chunkc.load(model, as_safetensors(state, tmp_path)) == ([], [])
        assert (model.head.weight is model.embedding.weight) != through_data
        assert not differences(values(model), values(saved))
        nn.init.zeros_(model.head.weight)
    chunkc.save(saved, tmp_path / "saved")  # writes one of them
    assert chunkc.load(model, tmp_path / "saved") == ([], [])
    assert not differences(values(model), values(saved))


def test_names_of_compiled_modules(tmp_path: Path) -> None:
    saved = other(encoder)
    path = as_torch(torch.compile(saved).state_dict(), tmp_path)
    model = encoder()
    model.layers[1] = torch.compile(model.layers[1])
    chunkc.load(model, path)
    assert not differences(array(model.layers[1].linear1.weight), array(saved.layers[1].linear1.weight))
    chunkc.load(torch.compile(model), path)


@pytest.mark.parametrize("strict", [True, False])
def test_missing_and_unexpected_names_as_load_state_dict(tmp_path: Path, strict: bool) -> None:
    state = dict(Tied().state_dict())
    del state["body.bias"], state["mask"]
    state["extra.weight"] = torch.zeros(3)
    path = as_safetensors(state, tmp_path)
    if not strict:
        expected = Tied().load_state_dict(state, strict=False)
        assert tuple(chunkc.load(Tied(), path, strict=False)) == tuple(expected)
        return
    with pytest.raises(RuntimeError) as ours:
        chunkc.load(Tied(), path)
    with pytest.raises(RuntimeError) as theirs:
        Tied().load_state_dict(state)
    assert str(ours.value) == str(theirs.value)


def test_another_shape_as_load_state_dict(tmp_path: Path) -> None:
    state = dict(Tied().state_dict())
    state["body.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for body\.weight"):
        chunkc.load(Tied(), as_safetensors(state, tmp_path))


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    path = as_torch(Tied().state_dict(), tmp_path)
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(chunkc.UnsupportedError, match=r"scale is on the meta device.*chunkc\.init"):
        chunkc.load(model, path)


class Unwelcome:
    """What a pickle may do, and a file of weights may not."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("executed",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("weights.safetensors", b"", "damaged, or no safetensors"),
        ("weights.safetensors", (1 << 60).to_bytes(8, "little") + b"{}", "damaged, or no safetensors"),
        ("weights.pt", b"not a file of torch", "neither safetensors nor data"),
        ("weights.pt", {"model": {"weight": torch.zeros(1)}}, "no `state_dict`, since it has entries such as 'model'"),
        ("weights.pt", [torch.zeros(1)], "no mapping"),
        ("weights.pt", {"weight": Unwelcome()}, "neither safetensors nor data"),
        ("x.index.json", b"[]", "no index of weights"),
        ("x.index.json", b'{"weight_map": {"a": "../elsewhere.safetensors"}}', "lie in the directory of their index"),
        ("x.index.json", b'{"weight_map": {"a": "absent.safetensors"}}', "cannot read|damaged"),
    ],
)
def test_bad_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: object, message: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    model = Tied()
    before = values(model)
    with pytest.raises(chunkc.FileError, match=message):
        chunkc.load(model, path)
    assert not differences(values(model), before)
    assert "executed" not in capsys.readouterr().out


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(chunkc.FileError, match=r"nothing\.pt: No such file"):
        chunkc.load(Tied(), tmp_path / "nothing.pt")
    with pytest.raises(chunkc.FileError, match=r"nothing\.safetensors"):
        chunkc.load(Tied(), tmp_path / "nothing.safetensors")
    with pytest.raises(chunkc.FileError, match=r"has none of model\.safetensors"):
        chunkc.load(Tied(), tmp_path)
