"""Save and restore all random number generators that a rank's training draws from."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def capture(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, and of the model's device's.

    They are values that :func:`cuboid.checkpoint.format.state_file.write_state` accepts.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        # As an array, which goes into the tensor file; 625 numbers per rank would bloat the JSON.
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(*_device_args(device))
    return states


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the generators from :func:`capture`, perhaps on another kind of device.

    A generator whose state wasn't saved is left as it is.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], *_device_args(device))
    elif device.type != "cpu":
        logger.warning("the checkpoint has no random state of a %s; what is drawn on it will differ", device.type)


def _device_args(device: torch.device) -> tuple[torch.device, ...]:
    # ``torch.mps`` has a single generator and takes no device.
    return () if device.type == "mps" else (device,)
