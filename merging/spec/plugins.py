"""Modules that a spec names: imported since it names them, by module name or by file, never otherwise."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from merging.errors import MergingError
from merging.spec.findings import Findings
from merging.spec.paths import Paths, exists
from merging.spec.wording import shortened

_loaded: dict[str, tuple[Path, str]] = {}  # module name -> the file it came from, its SHA-256


def import_plugin(name: str, where: str, paths: Paths, findings: Findings) -> None:
    """Import it, so that its decorators register what it defines. A failure names the plug-in."""
    file = _file(name, paths)
    if file is None and (name.endswith(".py") or "/" in name):
        if paths.existing(Path(name), where, "file").is_file():
            what = f'"{shortened(name)}" is not called .py, and a plug-in is Python code'
            findings.add(where, what, "Give a file that ends in .py, or a module by its name.")
        return
    try:
        with _on_import_path(paths.folder):
            if file is not None:
                _load(name, file)
            else:
                importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            what = f'there is no module "{shortened(name)}", and no {shortened(name)}.py beside the spec'
        else:
            what = f'plug-in "{shortened(name)}" cannot be imported: {_cause(error)}'
        findings.add(where, what)


def plugin_file(name: str) -> Path | None:
    """The file that an imported plug-in came from, None for one that has none."""
    module = sys.modules.get(_module_name(name)) or sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return Path(file) if file is not None and Path(file).is_file() else None


def _module_name(name: str) -> str:
    """A name of its own: a plug-in called json.py must not become everybody's json."""
    return "merging_plugin_" + re.sub(r"\W", "_", name.removesuffix(".py"))


def _file(name: str, paths: Paths) -> Path | None:
    """The file of a plug-in that is given as one, or that lies beside the spec."""
    if name.endswith(".py"):
        path = paths.absolute(name)
        return path if exists(path) and path.is_file() else None
    if not name.isidentifier():  # "package.module" needs its package, and is imported the ordinary way
        return None
    candidates = (paths.folder / f"{name}.py", paths.folder / name / "__init__.py")
    return next((file for file in candidates if exists(file)), None)


def _load(name: str, file: Path) -> ModuleType:
    module_name = _module_name(name)
    state = (file, hashlib.sha256(file.read_bytes()).hexdigest())
    if _loaded.get(module_name) == state:
        return sys.modules[module_name]
    module_spec = importlib.util.spec_from_file_location(
        module_name, file, loader=_FromSource(module_name, str(file))
    )
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    _loaded.pop(module_name, None)
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    _loaded[module_name] = state
    return module


class _FromSource(SourceFileLoader):
    """Compiles the file that is there: compiled code beside it is told by the file's time and size alone."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


@contextmanager
def _on_import_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _cause(error: BaseException) -> str:
    if isinstance(error, MergingError):
        return " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        place = ""  # its own text has the place
    return f"{type(error).__name__}: {shortened(str(error), 200)}{place}"
