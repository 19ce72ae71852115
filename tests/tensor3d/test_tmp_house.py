import pytest
from cuboid.verify import SmallModel
from test_calls import calls_of_a_step
@pytest.mark.parametrize("axes", [(1,2,2),(1,1,1)], ids=str)
def test_calls(pool, checkpoint, axes):
    n = axes[0]*axes[1]*axes[2]
    out = [c.total() for c in pool.run(n, calls_of_a_step, checkpoint(SmallModel("llama", layers=2)), axes)]
    open("/tmp/house-calls.txt","a").write(f"{axes} {out}\n")
