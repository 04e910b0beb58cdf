"""Compile Inductor's C++ kernels that wait for the compiler as one file; each is still found under its own name.

Of the second that g++ takes for a kernel, two thirds go to the header that all kernels include, and to linking. So
kernels are compiled several at a time. Inductor looks a kernel up by the name of its shared library, a hash of its
source and flags. Each gets a copy of the common library under its name, and the library tells by the name under which
it is imported which kernel is meant (PEP 489). So this process, later ones and Inductor without chunkc find each kernel
as if it had been compiled alone. (Links instead of copies would go wrong: what overwrites one name in place, such as a
cache that is copied over another, would replace the other kernels too.)
"""

from __future__ import annotations

import functools
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeGuard

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import LOCK_TIMEOUT, _worker_compile_cpp
from torch._inductor.cpp_builder import CppBuilder
from torch.utils._filelock import FileLock

_DIRECTIVES = (
    "#pragma ",
    "#if",
    "#else",
    "#endif",
    "#define PY_SSIZE_T_CLEAN",
    "#define likely(x)",
    "#define unlikely(x)",
)
"""Directives that may stand in a namespace, and several times in a file; `#include` lines are moved to its top.

PyTorch 2.11 defines `likely` and `unlikely` in each binding, all times alike.
"""

_BATCH = 4
"""Kernels in a file. With more, a first start of 22 kernels on 2 cores takes as many processor seconds, and longer."""

_KERNEL = """
#define kernel kernel_{key}
#define PyInit_kernel PyInit_kernel_{key}
namespace {key} {{
{source}
}}
#undef kernel
#undef PyInit_kernel
"""

_IMPORT = """
static PyObject* create_module(PyObject* spec, PyModuleDef*) {{
    PyObject* origin = PyObject_GetAttrString(spec, "origin");
    PyObject* encoded = origin ? PyUnicode_EncodeFSDefault(origin) : nullptr;
    const char* path = encoded ? PyBytes_AsString(encoded) : nullptr;
    PyObject* module = nullptr;
    if (path) {{
        const std::string whole = path, name = whole.substr(whole.rfind('/') + 1);
        {choices}
        else PyErr_Format(PyExc_ImportError, "no kernel of this name was compiled into %s", path);
    }}
    Py_XDECREF(encoded);
    Py_XDECREF(origin);
    return module;
}}

static PyModuleDef_Slot slots[] = {{
    {{Py_mod_create, reinterpret_cast<void*>(create_module)}},
#ifdef Py_GIL_DISABLED
    {{Py_mod_gil, Py_MOD_GIL_NOT_USED}},
#endif
    {{0, nullptr}}}};
static PyModuleDef all = {{PyModuleDef_HEAD_INIT, "kernel", nullptr, 0, nullptr, slots, nullptr, nullptr, nullptr}};
PyMODINIT_FUNC PyInit_kernel(void) {{ return PyModuleDef_Init(&all); }}
"""
_CHOICE = 'if (name == "{name}") module = {key}::PyInit_kernel_{key}();'


@dataclass(frozen=True)
class _Build:
    """A library of a kernel, as Inductor has a worker build it."""

    builder: CppBuilder

    @property
    def library(self) -> Path:
        return Path(self.builder.get_target_file_path())

    @property
    def command(self) -> str:
        """Return the compiler's command line, without the names of files."""
        return self._builder_of("o", "i", "").get_command_line()

    def build_from(self, source: Path) -> Path:
        """Build another source with this kernel's flags, next to it, and return the library."""
        builder = self._builder_of(source.stem, str(source), str(source.parent))
        builder.build()
        return Path(builder.get_target_file_path())

    def _builder_of(self, name: str, source: str, folder: str) -> CppBuilder:
        return CppBuilder(name, source, self.builder._build_option, folder)


class WaitingKernels:
    """C++ kernels of one graph that wait for a compiler: until a batch is complete, or one of them is asked for.

    Errors are dropped: a caller that needs a kernel has Inductor build it again, which does nothing where the library
    exists, and otherwise builds it alone and raises.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Kernel] = []
        self._is_over = False

    def add(self, build: functools.partial[None]) -> Future[None]:
        """Return a future of a kernel's library; `build` is what `AsyncCompile.submit` is given for it."""
        kernel = _Kernel(build, self.begin)
        with self._lock:
            self._waiting.append(kernel)
            is_complete = len(self._waiting) == _BATCH
        if is_complete:
            self.begin()
        return kernel

    def begin(self) -> None:
        """Have a worker compile all kernels that wait."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        try:
            if taken:
                AsyncCompile.pool().submit(self._compile, taken)
        except BaseException as error:  # also an interrupt: a caller would wait for these kernels without end
            _end(taken)
            if not isinstance(error, Exception):
                raise

    def give_up(self) -> None:
        """Compile no further kernel; a caller that asks for one compiles it."""
        self._is_over = True
        self.begin()

    def _compile(self, taken: Sequence[_Kernel]) -> None:
        try:
            if not self._is_over:
                with suppress(Exception):
                    build_together([kernel.build for kernel in taken])
        finally:
            _end(taken)


class _Kernel(Future[None]):
    """A kernel's library. Another thread may need the same kernel, and ask for it before the batch is complete."""

    def __init__(self, build: functools.partial[None], begin: Callable[[], None]) -> None:
        super().__init__()
        self.build = build
        self._begin = begin

    def result(self, timeout: float | None = None) -> None:
        self._begin()
        super().result(timeout)


def _end(kernels: Sequence[_Kernel]) -> None:
    for kernel in kernels:
        with suppress(InvalidStateError):  # ended by an interrupt that came once they were under way
            kernel.set_result(None)


def is_kernel_build(task: Callable[..., Any]) -> TypeGuard[functools.partial[None]]:
    """Whether a task of Inductor's workers builds a C++ kernel out of one source."""
    return isinstance(task, functools.partial) and task.func is _worker_compile_cpp and len(task.args[1]) == 1


def build_together(tasks: Sequence[functools.partial[None]]) -> None:
    """Build libraries of kernels, those with the same flags from one file. Other processes may build the same ones.

    Raises:
        CppCompileError: a file cannot be compiled.
    """
    alike: dict[str, list[_Build]] = defaultdict(list)
    builds = {lock_path: _Build(*builders) for lock_path, builders in (task.args for task in tasks)}
    with ExitStack() as locks:
        for lock_path in sorted(builds):  # in one order, so that no two processes wait for each other
            locks.enter_context(FileLock(lock_path, timeout=LOCK_TIMEOUT))
        for build in builds.values():
            if not build.library.exists():
                alike[build.command].append(build)
        for several in alike.values():
            _build_one_file(several)


def _build_one_file(builds: Sequence[_Build]) -> None:
    sources = {build.library.name: build.library.with_suffix(".cpp").read_text() for build in builds}
    text = in_one_file(sources) if len(sources) > 1 else None
    if text is None:
        for build in builds:
            build.builder.build()
        return
    with TemporaryDirectory(dir=builds[0].library.parent) as folder:
        source = Path(folder, "kernels.cpp")
        source.write_text(text)
        library = builds[0].build_from(source)
        for build in builds:
            copy = Path(folder, build.library.name)
            shutil.copy(library, copy)
            copy.replace(build.library)  # others see all of it or nothing


def in_one_file(sources: Mapping[str, str]) -> str | None:
    """Return one source for all kernels, each in a namespace; None: one has directives that cannot stand there.

    Args:
        sources: name of a kernel's library -> its source, with Inductor's Python binding.
    """
    includes: dict[str, None] = {"#define PY_SSIZE_T_CLEAN": None}
    kernels, choices = [], []
    for name, source in sources.items():
        kept, depth = [], 0
        for line in source.splitlines():
            bare = line.strip()
            depth += bare.startswith("#if") - bare.startswith("#endif")
            if bare.startswith("#include ") and not depth:
                includes[bare] = None
                continue
            if bare.startswith("#") and not bare.startswith(_DIRECTIVES):
                return None
            kept.append(line)
        key = name.partition(".")[0]
        kernels.append(_KERNEL.format(key=key, source="\n".join(kept)))
        choices.append(_CHOICE.format(key=key, name=name))
    return "\n".join([*includes, *kernels, _IMPORT.format(choices="\n        else ".join(choices))])
