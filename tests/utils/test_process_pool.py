"""Arms are judged in several processes with the same results as in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from steepen.utils.process_pool import map_in_processes, usable_cores

REPOSITORY = Path(__file__).resolve().parents[2]
# In a process of its own: where torch is loaded, as in the tests, nothing is forked.
PROGRAM = """
import os
import numpy as np
from steepen.laws.analysis import AnalysisRequest, analyse
from steepen.laws.ladder import make_ladder
from steepen.utils.process_pool import map_in_processes

flops = np.geomspace(3e17, 1e20, 6)
rng = np.random.default_rng(0)
ladders = {
    f"arm{i}": make_ladder(
        f"arm{i}", flops, 1.8 + 1.5 * (flops / 1e18) ** -(0.11 + 0.001 * i) + 1e-3 * rng.standard_normal(6)
    )
    for i in range(9)
}
request = AnalysisRequest("arm0", draws=100)
done = []
found = [analyse(ladders, request, progress=done.append, workers=w).to_dict() for w in (1, 2)]
assert repr(found[0]["arms"]) == repr(found[1]["arms"])
assert done == 2 * list(ladders)[1:]
pids = set(map_in_processes(lambda _: os.getpid(), [0], 2))
assert pids == {os.getpid()}, "one item is not worth a process"


def pid(_: int) -> int:
    return os.getpid()


assert os.getpid() not in set(map_in_processes(pid, range(40), 2))
"""


def test_two_processes_judge_as_one_does() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_results_keep_their_order() -> None:
    assert list(map_in_processes(abs, [-3, 2, -1], usable_cores())) == [3, 2, 1]
