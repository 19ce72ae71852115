"""`cuboid verify --arch` of every model type of transformers: right, or refused with a reason."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from cuboid.errors import CuboidError
from cuboid.verify import Plan, SmallModel, WorkerError, verify

TIMEOUT_S = 120
MESH = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1, "sequence": 2, "hidden": 2}}}
STAGES = {"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2}}
#: What amplifies rounding: differences of attention; gradients of 1e-9 in norms of small latents, that AdamW divides by
#: (in the first step all gradients agree within 2e-12, on an even `batch` axis too).
AMPLIFYING = {"diffllama": 1e-8, "muse_spark_text": 1e-7}
#: Why the mistake is the comparison's.
EXCEPTIONS = {"mra": "without its CUDA kernels its attention is zero, so that ranks with other parts look alike"}


@pytest.mark.slow
@pytest.mark.parametrize("config", [MESH, STAGES], ids=["mesh", "stages"])
@pytest.mark.parametrize("name", CONFIG_MAPPING_NAMES)
def test_a_type_is_right_or_refused_with_a_reason(pool, tmp_path, name, config):
    if name in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[name])
    try:
        SmallModel(name).write(tmp_path)
        plan = Plan(str(tmp_path), batch=4, accumulate=2)
        report = verify(plan, config, passes=("core",), tolerance=AMPLIFYING.get(name), pool=pool, timeout_s=TIMEOUT_S)
    except WorkerError:
        raise
    except CuboidError:
        return  # in a sentence
    assert report.passed, report.passes[0].first_difference
