"""Describe the optimizer's updates in an explained step: where, when, and with how many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from chunkc.explaining.memory_timeline import StepPlans
from chunkc.ir.errors import OptionsError
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import GRAD, PARAM, Chunk, ChunkGroup, ChunkLayout, ParamSpec
from chunkc.ir.simulate import RESIDENT_UPDATE, HostUpdateTimes
from chunkc.ir.states import ELEMENTS_PER_SCALE, INT8, MASTER, MASTER_LOW, StateFormat
from chunkc.ir.units import format_nbytes
from chunkc.ir.updates import tile_traffic, update_traffic
from chunkc.optim.update_mode import AUTO, CPU, NONE, UpdateMode, resolved
from chunkc.passes.planning.update_seconds import cpu_update_s, group_update_nbytes, traffic_s
from chunkc.policy.host_memory import home_nbytes, shadow_copies_nbytes
from chunkc.runtime.store.checksums import SAMPLED
from chunkc.session.declared_states import state_format_of


@dataclass(frozen=True)
class Updates:
    """The updates of a model's optimizer, as far as plans depend on them.

    Attributes:
        mode: the optimizer's arguments `update_on`, `overlap` and `undoable`.
        optimizer: its name, for people.
        num_stages: of an update (see `chunkc.ir.updates`); the most if there are several optimizers.
        asked: dtype of parameters -> requested form; empty if the declarations of the model's own optimizer count.
    """

    mode: UpdateMode = field(default_factory=lambda: UpdateMode(AUTO))
    optimizer: str = "AdamW"
    num_stages: int = 1
    asked: Mapping[torch.dtype, StateFormat] = field(default_factory=dict)

    def state_format_of(self, parameter: torch.Tensor) -> StateFormat:
        """Return the form in which the optimizer keeps states for a parameter of the model."""
        return self.asked.get(parameter.dtype) or state_format_of(parameter)

    def on(self, hardware: Hardware, layout: ChunkLayout) -> Updates:
        """Return the updates of a model with this layout, with what `overlap="auto"` is for it."""
        over_ranks = hardware.num_devices > 1
        mode = resolved(self.mode, layout, hardware, num_stages=self.num_stages, over_ranks=over_ranks)
        return replace(self, mode=mode)

    def cpu_updated(self, groups: list[ChunkGroup], home: str, hardware: Hardware) -> frozenset[int]:
        """Return the groups that the CPU updates at home.

        Raises:
            OptionsError: all should be, but home is a disk, or the hardware does not state the CPU's rate.
        """
        by_cpu = self.mode.at_home(groups, hardware, home=home, num_stages=self.num_stages)
        if by_cpu and hardware.kind == "cuda" and hardware.cpu_update_bytes_per_s is None:
            raise OptionsError(
                f'hardware {hardware.name!r} does not say cpu_update_bytes_per_s, which update_on="{CPU}" is timed by'
            )
        return by_cpu

    def home_nbytes(self, step: StepPlans, counts: Callable[[str], bool] = lambda kind: True) -> int:
        """Return the home bytes for the kinds of data that count, with shadow copies if updates can be undone."""
        layout, resident = step.layout, step.resident
        if self.mode.undoable:
            copied = self.mode.shadow_copied(layout, resident)
            return home_nbytes(layout, resident, counts=counts) + shadow_copies_nbytes(layout, copied, counts)
        consumed = {group.index for group in layout.groups} - step.gradients_at_home
        return home_nbytes(layout, resident, consumed, counts)

    def nbytes(self, step: StepPlans) -> dict[str, int]:
        """Return the bytes that each update reads and writes where it runs, by the name of its event."""
        found = {
            str(Chunk(PARAM, index)): self._of_group(step.layout.groups[index]) for index in sorted(step.cpu_updated)
        }
        for name, tile in step.updates.items():
            found[name] = tile_traffic(step.layout.groups[tile.group], tile).nbytes
        found[RESIDENT_UPDATE] = sum(
            stage.nbytes
            for spec in resident_specs(step)
            for stage in update_traffic(spec.dtype, spec.states, spec.numel, self.num_stages)
        )
        return found

    def checksums_s(self, step: StepPlans, hardware: Hardware) -> float:
        """Return the seconds in which `step()` reads what the backward has updated, to see that it is unchanged."""
        if not self.mode.undoable or not (groups := step.updated_in_backward - step.resident):
            return 0.0
        params, grads = (sum(step.layout.groups[index].nbytes(kind) for index in groups) for kind in (PARAM, GRAD))
        return (params + grads / SAMPLED) / sum(hardware.home_read_rates)

    def simulated(self, at_home: frozenset[int], layout: ChunkLayout, hardware: Hardware) -> HostUpdateTimes:
        """Return the updates at home for the simulator. On a CPU they overlap nothing: the same cores compute."""
        seconds = {}
        for index in sorted(at_home):
            group = layout.groups[index]
            known = cpu_update_s([group], hardware, self.num_stages)
            seconds[index] = traffic_s(self._of_group(group), hardware) if known is None else known
        mode = self.mode if hardware.kind == "cuda" else UpdateMode()
        return HostUpdateTimes(seconds, mode.in_forward, mode.in_backward)

    def _of_group(self, group: ChunkGroup) -> int:
        """Return the bytes of a group's update by the CPU, which copies the data first if updates can be undone."""
        copied = [kind for kind in group.update_kinds if kind != GRAD] if self.mode.undoable else []
        return group_update_nbytes(group, self.num_stages) + 2 * sum(map(group.nbytes, copied))

    def notes(self, step: StepPlans, hardware: Hardware) -> Iterator[str]:
        """Yield the assumptions of the explanation."""
        if in_backward := step.updated_in_backward:
            num_resident = len(in_backward & step.resident)
            yield (
                f"the backward updates {len(in_backward) - num_resident} of {len(step.layout.groups)} chunks in slots"
                + (f", and {num_resident} that stay" if num_resident else "")
            )
        if self.mode.undoable:
            copied = self.mode.shadow_copied(step.layout, step.resident)
            of = "" if self.mode.backward_groups is None else f" of {len(copied)} of {len(step.layout.groups)} chunks"
            yield (
                f"no update is undone; home has room for parameters and states{of} twice, "
                f'{format_nbytes(shadow_copies_nbytes(step.layout, copied))} more than with overlap="none"'
            )
        if step.cpu_updated:
            yield f"the CPU updates {len(step.cpu_updated)} of {len(step.layout.groups)} chunks at home"
        if step.cpu_updated and self.mode.mode != NONE and hardware.kind != "cuda":
            yield f'overlap="{self.mode.mode}" hides nothing here: the cores that update are those that compute'
        specs = step.layout.specs()
        yield from dict.fromkeys(self._states_of(specs[name]) for name in sorted(step.trained))

    def _states_of(self, spec: ParamSpec) -> str:
        kinds, states, dtype = spec.states.dtypes(spec.dtype), spec.states, str(spec.dtype).removeprefix("torch.")
        if MASTER_LOW in kinds:
            masters = " and the lower 16 bits of masters"
        elif spec.dtype.itemsize < 4:
            masters = " and float32 masters" if MASTER in kinds else " and no masters"
        else:
            masters = ""
        block = update_traffic(spec.dtype, states, ELEMENTS_PER_SCALE, self.num_stages)
        read, written = (
            sum(nbytes) / ELEMENTS_PER_SCALE for nbytes in zip(*((s.read_nbytes, s.written_nbytes) for s in block))
        )
        kept = "no states"
        if states.kinds:
            moments = states.moments if states.moments == INT8 else str(kinds[states.kinds[0]]).removeprefix("torch.")
            what = "a {} " + states.kinds[0].replace("_", " ") if len(states.kinds) == 1 else "{} moments"
            kept = what.format(moments)
        return (
            f"{self.optimizer} keeps {kept}{masters} for {dtype} parameters: an update reads {read:.4g} "
            f"and writes {written:.4g} bytes of each"
        )


DEFAULT_UPDATES = Updates()
"""Updates of an optimizer with default arguments."""


def resident_specs(step: StepPlans) -> list[ParamSpec]:
    """Return the trained parameters that never move, small or in resident chunks, and that no backward updates."""
    group_of, specs = step.layout.group_of(), step.layout.specs()
    resident = {None, *(step.resident - step.updated_in_backward)}
    return [specs[name] for name in step.trained if group_of.get(name) in resident]
