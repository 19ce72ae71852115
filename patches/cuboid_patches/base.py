"""Patches as values: what each of them replaces, why, and for which versions of the package it was written."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version
from wrapt import register_post_import_hook

from cuboid.errors import CuboidError
from cuboid.requirements import OPTIONAL, RANGES, versions


class PatchError(CuboidError):
    """A patch's target isn't what it was written for."""


@dataclass
class Patch:
    """One replaced attribute of somebody else's module or class.

    Args:
        target: dotted name, ``module:attribute`` or ``module:Class.attribute``.
        package: distribution that owns it.
        reason: why this is needed.
        parameters: names of the target's parameters that the replacement relies on.
        replace: makes the replacement from the original.
        since: the first version of the package that has the target, if not all supported ones do. In an earlier one
            there is nothing to patch.

    A patch doesn't import its target: the Trainer and PEFT take two seconds, which ranks that don't use them save.
    Calling :meth:`apply` again has no effect. :meth:`revert` restores the identical object.
    """

    target: str
    package: str
    reason: str
    parameters: tuple[str, ...]
    replace: Callable[[Any], Any]
    since: str | None = None
    _original: Any = field(default=None, init=False, repr=False)
    #: The original that was replaced last, and what was made of it. Put in again it is the same object: for what is
    #: certified, another one would be other code, to be followed anew.
    _made: tuple[Any, Any] = field(default=(None, None), init=False, repr=False)
    _applied: bool = field(default=False, init=False, repr=False)
    _wanted: bool = field(default=False, init=False, repr=False)

    def apply(self) -> None:
        """Replace the target as soon as its module is imported, or now if it is.

        Raises:
            PatchError: the target is missing or has another signature. If its module isn't imported yet, that import
                raises it.
        """
        self._wanted = True
        register_post_import_hook(self._put_in_place, self._module)

    def _put_in_place(self, _: Any) -> None:
        if self._applied or not self._wanted:
            return
        # Looked up for few patches: a version is read from a file.
        if self.since is not None and self._installed < Version(self.since):
            return
        owner, name = self._owner()
        if name not in vars(owner):
            raise PatchError(self._mismatch("it does not exist"))
        # Not getattr, which would bind a classmethod: it couldn't be restored as it was.
        self._original = vars(owner)[name]
        self._check_signature(getattr(owner, name))
        if self._made[0] is not self._original:
            self._made = self._original, self.replace(self._original)
        setattr(owner, name, self._made[1])
        self._applied = True

    def revert(self) -> None:
        """Restore the original, if it has been replaced."""
        self._wanted = False
        if not self._applied:
            return
        owner, name = self._owner()
        setattr(owner, name, self._original)
        self._original, self._applied = None, False

    @property
    def _module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def _installed(self) -> Version:
        (installed,) = versions(self.package).values()
        return Version(installed)

    def _owner(self) -> tuple[Any, str]:
        *classes, name = self.target.partition(":")[2].split(".")
        owner: Any = sys.modules[self._module]
        for attribute in classes:
            owner = getattr(owner, attribute)
        return owner, name

    def _check_signature(self, target: Any) -> None:
        function: Any = target.fget if isinstance(target, property) else target
        parameters = inspect.signature(function).parameters
        missing = [name for name in self.parameters if name not in parameters]
        if missing:
            raise PatchError(self._mismatch(f"it takes ({', '.join(parameters)}), without {', '.join(missing)}"))

    def _mismatch(self, what: str) -> str:
        supported = {**RANGES, **OPTIONAL}.get(self.package, "")
        return (
            f"{self.target} of {self.package} {self._installed} can't be patched: {what}. The patch was written "
            f"for {self.package} {supported}, as published; install that. (It is needed to: {self.reason})"
        )
