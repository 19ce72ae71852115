"""What the host waits for in a step on CUDA, seen on a device that isn't there (``fake_cuda/``).

Whatever blocks the host in the middle of a step lets the device run dry. A few reads per step or micro-batch, before
its first unit, are listed in docs/overlap.md and here.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fake_cuda"
TIMEOUT_S = 600

#: Before a pipeline's step: its label tokens, whether its numbers are in range, and whether boundaries of packed rows
#: are lost (4 numbers, read at once), and on the rank that reads the data how long its sequences are, which goes to the
#: others.
COUNTED = {("broadcast.py", "the host reads a number"): 4}
TOLD = {("broadcast.py", "a copy from cpu to cuda that blocks"): 1}
#: Once for each of two micro-batches, for masks: whether rows are padded, or packed.
PADDED = {("segments.py", "the host reads a number"): 4}
PACKED = {("masking_utils.py", "the host reads a number"): 2}
#: Of masks of attention "eager" beside these: for each micro-batch where it is padded, and for each of its three
#: segments whether some position sees nothing.
PADDED_EAGER = {
    **PADDED,
    ("certificate.py", "the host reads a number"): 4,
    ("segment_mask.py", "the host reads a number"): 12,
}
FOR_EVERY_CHANGE = {
    "layers": {},
    "padded stage": {**COUNTED, **PADDED},
    "optimizer with ZeRO-1": {},
    "save": {},
}
SLOW = {
    # A stage's units go through the same.
    "layers on the host": {},
    "stage on the host": COUNTED,
    "two chunks on the host": COUNTED,
    "experts": {},
    "last stage without a mesh": COUNTED,
    "stage with flash attention": COUNTED,
    "snapshot": {},
    "layers with whole rows": {},
    "layers whose weights are kept": {},
    # By transformers, for its mask.
    "encoder": {("masking_utils.py", "the host reads a number"): 1},
    "head for sequences": {},
    "stage that reduces once a step": COUNTED,
    "two chunks": COUNTED,
    "two chunks that reduce once a step": {**COUNTED, **TOLD},
    "stage of experts": COUNTED,
    "padded eager stage": {**COUNTED, **PADDED_EAGER},
    "layers with a head of keys for each rank": {},
    # By transformers, for its mask.
    "layers with a mask": {("masking_utils.py", "the host reads a number"): 1},
    "layers with positions": {("masking_utils.py", "the host reads a number"): 1},
    "packed layers": {("masking_utils.py", "the host reads a number"): 1},
    "first stage": {**COUNTED, **TOLD},
    "last stage": COUNTED,
    "packed stage": {**COUNTED, **PACKED},
    "optimizer": {},
}


def waits_of(steps):
    """For each step, how often the host waits, by file and operation. One process: the device must precede torch."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(SCRIPT), *steps]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    by_step = {}
    for line in done.stdout.splitlines():
        if not line.startswith("{"):  # DeepSpeed warns on stdout where DS_ACCELERATOR isn't set.
            continue
        step = json.loads(line)
        assert step["error"] is None, step["error"]
        by_step[step["step"]] = Counter((Path(wait["where"]).name, wait["what"]) for wait in step["waits"])
    assert set(by_step) == set(steps), done.stderr[-3000:]
    return by_step


pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++, which compiles the device")


@pytest.mark.ci
def test_no_unit_and_no_layer_makes_the_host_wait():
    assert waits_of(FOR_EVERY_CHANGE) == FOR_EVERY_CHANGE


@pytest.mark.slow
def test_no_unit_and_no_layer_of_the_others_does():
    assert waits_of(SLOW) == SLOW
