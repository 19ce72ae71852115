"""``python tests/fake_cuda STEP ...``: load the device, and only then what imports torch."""

import importlib
import sys

import device

device.load()
importlib.import_module("steps").main(sys.argv[1:])
