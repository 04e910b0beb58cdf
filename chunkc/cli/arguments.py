"""Define the command line of `chunkc`: its commands and their arguments."""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path

from chunkc.explaining.formats import FORMATS
from chunkc.explaining.optimizer_choice import OPTIMIZERS
from chunkc.explaining.targets import DTYPES
from chunkc.ir.states import BFLOAT16, FLOAT32, INT8, SPLIT
from chunkc.ir.text import one_line, short
from chunkc.machines.datasheets import KNOWN_CLUSTERS
from chunkc.machines.presets import PRESETS, default_hardware_path
from chunkc.models import MODELS
from chunkc.optim.update_mode import AUTO, DEVICE, OVERLAP, UPDATE_ON

BAD_INPUT = 2
"""Exit code for invalid input."""

WHOLE = re.compile("[0-9]{1,18}")
"""A whole number on the command line: at most 18 digits, which fit 64 bits."""

MASTER_WEIGHTS: dict[str, bool | str] = {"true": True, "false": False, SPLIT: SPLIT, FLOAT32: FLOAT32}
"""Name on the command line -> the optimizer's `master_weights`."""

_HARDWARE = textwrap.fill(
    f"hardware: {', '.join(PRESETS)}, a count before one (8xv100-32g), hosts before a count (2x8xh100), "
    f"{', '.join(KNOWN_CLUSTERS)}, or a YAML or JSON file; list prints a table of all, with their sources",
    width=80,
    subsequent_indent="  ",
    break_on_hyphens=False,
)

EPILOG = f"""examples:
  chunkc explain gpt-18b --hardware rtx3090 --host-memory 288GiB --batch-size 4 --activation-checkpointing
  chunkc explain train.py:build --memory-budget 6GiB
  chunkc explain --module transformers:LlamaForCausalLM --config llama.json --batch-size 1 --seq-len 4096
  chunkc explain gpt-18b --hardware 8xv100-32g --largest batch_size
  chunkc explain gpt-18b --hardware 2x8xh100 --mesh 2x4
  chunkc explain gpt-18b --hardware 2x8xh100 --mesh 2x4x2
  chunkc explain gpt2-xl --dtype bfloat16 --optimizer adam --moments-dtype bfloat16

models: {", ".join(MODELS)}
{_HARDWARE}
exit code: 0 it fits, 3 it does not, 2 bad input, 1 a fault in chunkc itself, 130 interrupted"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """Exit with one line, without the usage."""
        self.exit(BAD_INPUT, f"chunkc: {one_line(message)}\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = _Parser(prog="chunkc", description="The command `chunkc`: `explain`, `diff` and `calibrate`.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    explain_parser = commands.add_parser(
        "explain",
        help="what a training step will need, before it runs",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_explain_arguments(explain_parser)
    diff_parser = commands.add_parser("diff", help="compare two explanations saved with --format json")
    diff_parser.add_argument("before", type=Path, metavar="BEFORE.json")
    diff_parser.add_argument("after", type=Path, metavar="AFTER.json")
    calibrate_parser = commands.add_parser("calibrate", help="measure this machine for --hardware")
    calibrate_parser.add_argument("--output", type=Path, metavar="FILE", help=f"default: {default_hardware_path()}")
    operators_help = "measure the scratch memory of this model's operators on the CPU, for training and explain"
    calibrate_parser.add_argument("--operators", dest="target", metavar="MODEL|FILE.py:FACTORY", help=operators_help)
    _add_model_arguments(calibrate_parser)
    return parser


def _add_explain_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", nargs="?", metavar="MODEL", help="a built-in model's name, or FILE.py:FACTORY")
    _add_model_arguments(command)
    command.add_argument(
        "--hardware", metavar="NAME|FILE|list", help="list prints all names; default: what calibrate saved, else cpu"
    )
    command.add_argument("--host-memory", metavar="SIZE", help="RAM of each host, in place of the hardware's")
    ranks_help = "devices that train the model together, each with a part of it; default: all that the hardware has"
    command.add_argument("--world-size", type=_positive, metavar="N", help=ranks_help)
    mesh_help = "the devices as A hosts of B each; with C, every C of A x B x C devices compute each layer together"
    command.add_argument("--mesh", metavar="AxB[xC]", help=mesh_help)
    command.add_argument(
        "--zero-stage", type=int, choices=(1, 2, 3), help="as of distribute; default: the plan's choice"
    )
    command.add_argument("--memory-budget", default="auto", metavar="SIZE", help='bytes, "6GiB", "80%%" or "auto"')
    command.add_argument("--home", default="cpu", help='"cpu", "disk" or "disk:DIR"')
    command.add_argument(
        "--disk-holds",
        default="auto",
        choices=("auto", "states", "everything"),
        help="what a disk home holds: optimizer states, everything, or (auto) everything on a CPU, states behind a GPU",
    )
    command.add_argument("--chunk-size", default="auto", metavar="SIZE", help='bytes, "4MiB" or "auto"')
    codegen_help = "how segments are compiled; default: eager, which takes other bytes than training's inductor"
    command.add_argument("--codegen", choices=["eager", "inductor"], default="eager", help=codegen_help)
    command.add_argument(
        "--activations",
        choices=("auto", "keep", "offload", "rerun"),
        default="auto",
        help="what becomes of the values that the forward saves; default: auto, all are kept where everything fits",
    )
    tiles_help = "a cross entropy in tiles of so many rows; never: whole; default: auto, tiles where logits are many"
    command.add_argument("--loss-tile-rows", type=_rows, default="auto", metavar="N", help=tiles_help)
    command.add_argument("--strict", action="store_true", help="refuse operators with a guess for inner memory")
    _add_optimizer_arguments(command.add_argument_group("the optimizer of chunkc.optim, by its own arguments"))
    command.add_argument("--largest", choices=["batch_size", "seq_len"], help="the largest that fits")
    why_help = "of a parameter, module, chunk or saved value: where it is at each moment, and what else would cost"
    command.add_argument("--why", metavar="NAME", help=why_help)
    command.add_argument("--exceptions", action="store_true", help="print where predicted bytes are not exact, and why")
    command.add_argument("--format", choices=list(FORMATS), default="text", help="default: text")
    command.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")


def _add_model_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--module", metavar="PACKAGE:CLASS", help="a model class of transformers, in place of MODEL")
    command.add_argument("--config", type=Path, metavar="FILE.json", help="the configuration for --module")
    command.add_argument("--batch-size", type=_positive, metavar="N", help="of the model's input")
    command.add_argument("--seq-len", type=_positive, metavar="N", help="of the model's input, in tokens")
    command.add_argument("--dtype", choices=sorted(DTYPES), help="of the model's parameters; default: its own")
    command.add_argument("--activation-checkpointing", action="store_true", help="recompute each block in the backward")


def _add_optimizer_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--optimizer", choices=list(OPTIMIZERS), help="default: adamw")
    group.add_argument("--moments-dtype", choices=[FLOAT32, BFLOAT16, INT8], help="default: float32")
    group.add_argument(
        "--master-weights", choices=list(MASTER_WEIGHTS), help="of 16-bit parameters; default: true unless stochastic"
    )
    group.add_argument("--stochastic-rounding", action="store_true", help="of what is kept in bfloat16")
    group.add_argument("--momentum", type=float, help="of sgd; default: 0")
    group.add_argument("--update-on", choices=list(UPDATE_ON), default=DEVICE, help="default: device")
    group.add_argument("--overlap", choices=list(OVERLAP), default=AUTO, help="default: auto")
    group.add_argument("--undoable", action="store_true", help="step() can undo what the backward has updated")


def _rows(text: str) -> int | str:
    return text if text in ("auto", "never") else _positive(text)


def _positive(text: str) -> int:
    if not WHOLE.fullmatch(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{short(text)} is not a whole number of at least 1 and at most 18 digits")
    return int(text)
