"""All random states that a rank's training draws from."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def capture(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, and of the device's.

    Args:
        device: of the model.

    Returns:
        Values that :func:`cuboid.checkpoint.format.state_file.write_state` takes.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        # 625 numbers of 32 bits, of which a document of many ranks shouldn't have to be full.
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(*_of(device))
    return states


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    """Bring the generators back to where they were; one that has no state here stays where it is.

    Args:
        states: as :func:`capture` gave them, perhaps on another kind of machine.
        device: of the model.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], *_of(device))
    elif device.type != "cpu":
        logger.warning("the checkpoint has no random state of a %s; what is drawn on it will differ", device.type)


def _of(device: torch.device) -> tuple[torch.device, ...]:
    """What a device's module wants to be told: Apple's has one generator only."""
    return () if device.type == "mps" else (device,)
