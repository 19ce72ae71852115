"""When patches are applied: after the first import of a package that they change, which this waits for."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Marks a loader that is watched, since other finders may hand the same one out twice.
_MARK = "watched_by_cuboid"


class Registration:
    """Patches that are registered, and then applied as soon as a package that they change has been imported.

    The modules with the patches import that package, others, and most of Cuboid. So that none of them is met half
    imported, patches are applied when the *outermost* import of a module of these packages ends, which is still before
    the import statement of a script returns.

    Args:
        patches: list of all patches, as ``module:attribute``; imported when they are applied.
        packages: packages that they change.
        ours: packages that the patches' modules belong to or import, beside these.
    """

    def __init__(self, patches: str, packages: Sequence[str], ours: Sequence[str]) -> None:
        self._patches, self._packages = patches, packages
        self._finder = _Finder({*packages, *ours}, self._after_import)
        self._registered, self._applied = False, False
        self._lock = threading.Lock()
        #: Threads that import the patches now; whether there were several at a time.
        self._applying: set[int] = set()
        self._raced = False

    def register(self) -> None:
        """Apply all patches, now if a package that they change is imported already, or after its import."""
        self._registered = True
        if not self._applied:
            self._finder.install()
            self._after_import()

    def unregister(self) -> None:
        """Revert all patches."""
        self._registered = False
        self._finder.remove()
        with self._lock:
            # Also if one of them couldn't be applied: those before it are in place.
            if self._patches.partition(":")[0] in sys.modules:
                for patch in reversed(self._found()):
                    patch.revert()
            self._applied = False

    def apply(self) -> None:
        """Apply all patches, if they are registered, whether or not the packages that they change are imported."""
        if not self._registered or self._applied:
            return
        # Not under the lock: another thread may be importing these modules, and would wait for it at their end.
        patches = self._imported()
        with self._lock:
            if not self._registered or self._applied:
                return
            for patch in patches:
                patch.apply()
            self._applied = True
        # Not earlier: if a patch can't be applied, the next import has to fail too.
        self._finder.remove()

    def _after_import(self) -> None:
        if any(package in sys.modules for package in self._packages):
            self.apply()

    def _imported(self) -> list[Any]:
        """All patches, after the import of what they stand on.

        Raises:
            ImportError: another thread does the same, each waiting for a module that the other one is importing; Python
                then hands out unfinished modules. Going on would leave packages unpatched for a while.
        """
        self._applying.add(threading.get_ident())
        self._raced |= len(self._applying) > 1
        try:
            return self._found()
        except (ImportError, AttributeError, RuntimeError) as error:  # also importlib's _DeadlockError
            if not self._raced:
                raise
            raise ImportError(
                f"several threads import {', '.join(self._packages)} at once, so that Cuboid can't adapt them before "
                "they are used; import them, or use one of cuboid's names, before the threads start"
            ) from error
        finally:
            self._applying.discard(threading.get_ident())

    def _found(self) -> list[Any]:
        module, _, name = self._patches.partition(":")
        return list(getattr(importlib.import_module(module), name))


class _Finder:
    """A finder that finds modules by asking the others, and calls back after the outermost import of some packages.

    Args:
        packages: packages, with all modules inside.
        after: called after each outermost import, also if it failed, since it may have imported others.
    """

    def __init__(self, packages: Iterable[str], after: Callable[[], None]) -> None:
        self._packages, self._after = frozenset(packages), after
        self._thread = _Depth()

    def install(self) -> None:
        """Put it before the other finders."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Take it away."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the others find, with a loader that is watched."""
        if fullname.partition(".")[0] not in self._packages:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self and hasattr(finder, "find_spec"))
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:
        if getattr(loader, _MARK, False) or not hasattr(loader, "exec_module"):
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._thread.depth += 1
            try:
                execute(module)
            except BaseException as error:
                # What failed here is what a reader needs. Patches that fail for the same reason are tried again after
                # the next import.
                with contextlib.suppress(Exception):
                    self._leave(is_ending=not isinstance(error, Exception))
                raise
            self._leave(is_ending=False)

        # Of this loader alone, not of its class, so that it stays what others look for.
        loader.exec_module = exec_module
        setattr(loader, _MARK, True)

    def _leave(self, *, is_ending: bool) -> None:
        self._thread.depth -= 1
        # Ctrl-C needn't wait for more imports.
        if self._thread.depth == 0 and not is_ending:
            self._after()


class _Depth(threading.local):
    """How many watched modules a thread is importing."""

    depth = 0
