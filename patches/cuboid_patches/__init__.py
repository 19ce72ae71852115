"""All of Cuboid's patches of other packages; nothing outside this package assigns to a foreign attribute.

``import cuboid`` registers them, and they are applied before a script can call what they replace: at once if one of
these packages is imported already, otherwise when the first of them has been. So that ``import cuboid`` stays light,
the modules with the patches aren't imported before that either.
"""

from __future__ import annotations

from cuboid_patches.registration import Registration

#: Those whose attributes are replaced, and Cuboid's own, while whose modules are imported nothing is replaced.
_PATCHED, _OURS = ("transformers", "accelerate", "deepspeed", "peft"), ("cuboid", "cuboid_patches")
_registration = Registration("cuboid_patches.all_patches:PATCHES", _PATCHED, _OURS)

#: Make frameworks accept Cuboid's keys. ``import cuboid`` calls it; more calls do nothing.
register = _registration.register
#: Apply what is registered now, whether or not the packages have been imported.
apply_registered = _registration.apply
#: Restore all patched packages exactly as they were. Sharded models can't run before another :func:`register`.
unregister = _registration.unregister
