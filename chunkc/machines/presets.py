"""Load machines by name or from a file, as `--hardware` accepts them.

A preset is a device's peaks times the fractions of them that programs reach (`chunkc.machines.datasheets`). A file
states achievable figures, either all of them or changes to a preset:

    based_on: rtx3090
    name: my workstation
    host_memory_nbytes: 288GiB
    links:
      to_device: {bytes_per_s: 24GB/s, latency_s: 10us}
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from chunkc.ir.documents import parse_json, parse_yaml, read_text
from chunkc.ir.errors import OptionsError
from chunkc.ir.hardware import CPU, Hardware
from chunkc.ir.links import FROM_DISK, LINKS, TO_DEVICE, TO_DISK, TO_HOME, LinkSpec
from chunkc.ir.text import short
from chunkc.ir.units import BYTE_UNITS
from chunkc.machines.datasheets import DATASHEETS, KNOWN_CLUSTERS, KNOWN_HOSTS, Efficiency

PRESETS = ("cpu", *DATASHEETS)
"""Names of all presets."""

MAX_NUM_DEVICES = 999_999

RATE_KEYS = {
    "to_device_bytes_per_s": TO_DEVICE,
    "to_home_bytes_per_s": TO_HOME,
    "disk_read_bytes_per_s": FROM_DISK,
    "disk_write_bytes_per_s": TO_DISK,
}
"""Key in a hardware file for the rate of one link -> name of the link."""

_COUNTED = re.compile(r"(?:([0-9]{1,6})\s*x\s*)?([0-9]{1,6})\s*x\s*(.+)", re.IGNORECASE)
"""Groups: number of hosts (optional), devices of each, name of the device."""
_FILE_ENDINGS = (".json", ".yaml", ".yml")
_ALLOWED_TEXT = (
    f"a preset ({', '.join(PRESETS)}), a count of one such as 8xv100-32g, hosts of these such as 2x8xh100, "
    f"{', '.join(KNOWN_CLUSTERS)}, or a file that ends in .json, .yaml or .yml"
)


def preset(name: str, efficiency: Efficiency | None = None) -> Hardware:
    """Return the preset of that name; `cpu` has no datasheet and states achievable figures itself.

    Args:
        efficiency: fractions of the datasheet's peaks; None: the default ones.

    Raises:
        OptionsError: there is no such preset.
    """
    wanted = name.strip().lower()
    if wanted == "cpu":
        return CPU
    if wanted in DATASHEETS:
        return DATASHEETS[wanted].hardware(wanted, efficiency or Efficiency())
    nearest = [known for known in PRESETS if wanted and wanted in known]
    nearest = nearest or difflib.get_close_matches(wanted, PRESETS, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(known) for known in nearest)}? " if nearest else ""
    raise OptionsError(f"no hardware is called {short(name)}; {hint}allowed: {_ALLOWED_TEXT}")


def load_hardware(text: str) -> Hardware:
    """Load a machine by name: a preset, a count of one (`8xv100-32g`), hosts of these (`2x8xh100`), or a file.

    A count multiplies the host's RAM, CPU and disks as well as the devices, since a preset has one device's part of
    them. Hosts in `KNOWN_HOSTS` have the RAM that is stated there.

    Raises:
        OptionsError: there is no such machine, or the file is wrong; one line that says what is allowed.
    """
    text = text.strip()
    if text.lower().endswith(_FILE_ENDINGS):
        return read_hardware(_expanded(Path(text)))
    return named_hardware(text)


def named_hardware(text: str) -> Hardware:
    """Return a preset, a count of one (`8xv100-32g`), or hosts of these (`2x8xh100`).

    Raises:
        OptionsError: there is none of that name, or a count is out of range.
    """
    known = text.strip().lower()
    if known in KNOWN_CLUSTERS:
        return replace(named_hardware(KNOWN_CLUSTERS[known]), name=known)
    counted = _COUNTED.fullmatch(text)
    if counted is None:
        return preset(text)
    num_hosts, count = int(counted[1] or 1), int(counted[2])
    if count < 1 or num_hosts < 1:
        raise OptionsError(f"hardware {text!r} has no device; a count is at least 1")
    if num_hosts * count > MAX_NUM_DEVICES:
        raise OptionsError(f"hardware {text!r} has more than {MAX_NUM_DEVICES:,} devices")
    host = preset(counted[3]).times(count)
    if host.name in KNOWN_HOSTS:
        host = replace(host, host_memory_nbytes=KNOWN_HOSTS[host.name])
    return host.on_hosts(num_hosts)


def usual_host_nbytes(name: str) -> int | None:
    """Return the RAM of a host with the machine of this name, as presets have it; None: it is none of theirs."""
    with suppress(OptionsError):
        return named_hardware(name).host_memory_nbytes
    return None


def read_hardware(path: Path) -> Hardware:
    """Read a machine from a JSON or YAML file: fields of `Hardware` by name, and `based_on` for a preset to change.

    Sizes, rates and times may have units: `288GiB`, `24GB/s`, `71TFLOPS`, `10us`. `links` maps a link's name to its
    rate and latency; a missing one is the preset's, and without a preset the latency is 0. A link's rate may instead be
    given by its key in `RATE_KEYS`. `save_hardware` writes this format, in JSON.

    Raises:
        OptionsError: the file is missing or no mapping; a key is unknown, has a wrong value, or is required and
            missing; or the file is YAML and PyYAML is not installed.
    """
    content = _parse(path)
    if not isinstance(content, dict):
        raise OptionsError(f"{path}: a hardware file maps names to figures; this one holds {short(content)}")
    unknown = [key for key in content if key not in KEYS]
    if unknown:
        raise OptionsError(f"{path}: " + "; ".join(_unknown_key(key) for key in unknown))
    stated: dict[str, Any] = {}
    wrong = []
    for key, value in content.items():
        parse, allowed = KEYS[key]
        try:
            stated[key] = parse(value)
        except ValueError:
            wrong.append(f"{key} is {short(value)}; allowed: {allowed}")
    if wrong:
        raise OptionsError(f"{path}: " + "; ".join(wrong))
    base = stated.pop("based_on", None)
    try:
        known = None if base is None else named_hardware(base.strip())
        links = _links(stated, () if known is None else known.links)
        if known is not None:
            stated = {"both_links_bytes_per_s": _both_links(known, links), **stated}
            return replace(known, links=links, **stated)
        stated |= {key: link for link in links for key, name in RATE_KEYS.items() if name == link.name}
        if missing := [key for key in _REQUIRED if key not in stated]:
            raise OptionsError(f"{', '.join(missing)} missing; give all of {', '.join(_REQUIRED)}, or based_on")
        return Hardware(links=links, **{key: value for key, value in stated.items() if key not in RATE_KEYS})
    except OptionsError as error:
        raise OptionsError(f"{path}: {error}") from None


def _links(stated: dict[str, Any], known: Sequence[LinkSpec]) -> tuple[LinkSpec, ...]:
    """Remove the links from a file's figures (`stated`), and return them merged over those of its preset (`known`)."""
    found = {link.name: {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s} for link in known}
    listed = stated.pop("links", {})
    for key, name in RATE_KEYS.items():
        if key in stated:
            if "bytes_per_s" in listed.get(name, {}):
                raise OptionsError(f"{key} and links say the rate of {name!r} twice; leave out {key}")
            listed.setdefault(name, {})["bytes_per_s"] = stated.pop(key)
    for name, figures in listed.items():
        found[name] = found.get(name, {}) | figures
        if "bytes_per_s" not in found[name]:
            raise OptionsError(f"links: {name} has no bytes_per_s; give one")
    return tuple(LinkSpec(name, **found[name]) for name in LINKS if name in found)


def _both_links(known: Hardware, links: Sequence[LinkSpec]) -> float | None:
    """Return the preset's `both_links_bytes_per_s` if `links` have the preset's rates; else None."""
    rates = {link.name: link.bytes_per_s for link in links}
    same = all(link.bytes_per_s == rates[link.name] for link in known.links if link.name in (TO_DEVICE, TO_HOME))
    return known.both_links_bytes_per_s if same else None


def default_hardware_path() -> Path:
    """Return the file that `chunkc calibrate` saves: `chunkc/hardware.json` in `$XDG_CONFIG_HOME`, else in `~/.config`.

    A relative `XDG_CONFIG_HOME` is ignored, as the XDG base directory specification says.
    """
    configured = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    folder = configured if configured.is_absolute() else Path.home() / ".config"
    return folder / "chunkc" / "hardware.json"


def save_hardware(hardware: Hardware, path: Path) -> None:
    """Write a machine as JSON, which `load_hardware` reads back as an equal one; create the folder if missing.

    Raises:
        OptionsError: the file cannot be written.
    """
    stated = {key: value for key, value in asdict(hardware).items() if value is not None}
    stated["links"] = {link.pop("name"): link for link in stated["links"]}
    if hardware.capability is not None:
        stated["capability"] = "{}.{}".format(*hardware.capability)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(stated, indent=2) + "\n")
    except OSError as error:
        raise OptionsError(f"cannot write {path}: {error.strerror}") from error


_RATES = {f"{unit}/s": factor for unit, factor in BYTE_UNITS.items()}
_FLOPS = {f"{p}flop{s}": 10**power for p, power in (("g", 9), ("t", 12), ("p", 15)) for s in ("s", "/s")}
_TIMES = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_FIGURE = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([a-z/]*)", re.IGNORECASE)


def _figure(value: object, units: Mapping[str, float]) -> float:
    """Convert a number, or text of a number with one of the units; a YAML reader gives `1e9` as text."""
    if isinstance(value, str):
        match = _FIGURE.fullmatch(value.strip())
        if match is None or not (match[2] == "" or match[2].lower() in units):
            raise ValueError("no such figure")
        value = float(match[1]) * units.get(match[2].lower(), 1)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number")
    if not 0 < value <= sys.float_info.max:
        raise ValueError("not positive and finite")
    return float(value)


def _size(value: object) -> int:
    """Convert to whole bytes; 0 is allowed, as for a context or page tables."""
    return 0 if type(value) is int and value == 0 else int(_figure(value, BYTE_UNITS))


def _latency(value: object) -> float:
    """Convert to seconds; 0 is allowed."""
    return 0.0 if type(value) in (int, float) and value == 0 else _figure(value, _TIMES)


def _capability(value: object) -> tuple[int, int]:
    """Parse a compute capability in the text form of NVIDIA's tables, such as "8.6"."""
    match = re.fullmatch(r"([0-9]{1,2})\.([0-9])", value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("no compute capability")
    return int(match[1]), int(match[2])


def _text(value: object, at_least: int = 1) -> str:
    if not isinstance(value, str) or len(value) < at_least:
        raise ValueError("no text")
    return value


def _kind(value: object) -> str:
    if value not in ("cpu", "cuda"):
        raise ValueError("no kind of device")
    return str(value)


def _count(value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_NUM_DEVICES:
        raise ValueError("no count")
    return value


def _by_link(value: object) -> dict[str, dict[str, float]]:
    """Convert the figures of each link that the file states."""
    if not isinstance(value, dict) or not all(isinstance(figures, dict) for figures in value.values()):
        raise ValueError("no links")
    if not value.keys() <= set(LINKS) or any(figures.keys() - _LINK_FIGURES.keys() for figures in value.values()):
        raise ValueError("no such link, or figure of a link")
    return {link: {key: _LINK_FIGURES[key](figures[key]) for key in figures} for link, figures in value.items()}


_LINK_FIGURES: Mapping[str, Callable[[object], float]] = {
    "bytes_per_s": partial(_figure, units=_RATES),
    "latency_s": _latency,
}

_COUNT = (_count, f"a whole number from 1 to {MAX_NUM_DEVICES:,}")
_PARSERS: Mapping[str, tuple[Callable[[object], Any], str]] = {
    "based_on": (_text, "a preset or a count of one"),
    "name": (_text, "a text"),
    "source": (partial(_text, at_least=0), "a text"),
    "kind": (_kind, '"cpu" or "cuda"'),
    "capability": (_capability, 'a text such as "8.6"'),
    "links": (
        _by_link,
        f'links by name ({", ".join(LINKS)}), each such as {{"bytes_per_s": "24GB/s", "latency_s": "10us"}}',
    ),
    **dict.fromkeys(("num_devices", "num_hosts", "num_copies", "devices_per_layer"), _COUNT),
    "_nbytes": (_size, 'bytes, or a size such as "24GiB" or "24GB"'),
    "_nbytes_per_gib": (_size, 'bytes, or a size such as "24GiB" or "24GB"'),
    "flops_per_s": (partial(_figure, units=_FLOPS), 'operations per second, or a rate such as "71TFLOPS"'),
    "_bytes_per_s": (partial(_figure, units=_RATES), 'bytes per second, or a rate such as "24GB/s"'),
}
"""Key, or its ending -> the conversion of its value, which raises ValueError, and the values that are allowed."""

KEYS: Mapping[str, tuple[Callable[[object], Any], str]] = {
    key: next(parser for ending, parser in _PARSERS.items() if key.endswith(ending))
    for key in ("based_on", *(field.name for field in fields(Hardware)), *RATE_KEYS)
}
"""Keys of a hardware file, with their entries of `_PARSERS`: fields of `Hardware`, `based_on`, and rates of links."""

_REQUIRED = (
    *(field.name for field in fields(Hardware) if field.default is MISSING and field.name != "links"),
    *(key for key, name in RATE_KEYS.items() if name in (TO_DEVICE, TO_HOME)),
)


def _unknown_key(key: object) -> str:
    nearest = difflib.get_close_matches(short(key), KEYS, n=1, cutoff=0.5)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"unknown key {short(key)}{hint}; allowed: {', '.join(KEYS)}"


def _expanded(path: Path) -> Path:
    """Return the path with a home directory in place of `~`, or unchanged where none is known."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def _parse(path: Path) -> Any:
    """Parse a JSON or YAML file."""
    is_json = path.suffix.lower() == ".json"
    try:
        text = read_text(path, what="the hardware file", language="JSON" if is_json else "YAML")
    except OptionsError as error:
        raise OptionsError(f"{error}; allowed: {_ALLOWED_TEXT}") from None
    return parse_json(text, str(path), finite=False) if is_json else parse_yaml(text, str(path))
