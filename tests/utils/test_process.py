"""Start and end of a process that imports torch are those of any Python process, but faster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # printed in the end
PROGRAM = """
import atexit, sys, threading, types
if {torch}:
    sys.modules["torch"] = types.ModuleType("torch")
from steepen.utils.process import exit_process
atexit.register(print, "registered")
if {thread}:
    threading.Timer(0.2, print, ["thread"]).start()
print("printed")
exit_process(3)
"""


def end(output: Path, torch: bool, thread: bool = False) -> tuple[int, str]:
    program = PROGRAM.format(torch=torch, thread=thread)
    with output.open("w") as stream:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=ENVIRONMENT,
        )
    return done.returncode, done.stderr


@pytest.mark.parametrize("torch", [False, True])
@pytest.mark.parametrize("thread", [False, True])
def test_what_was_printed_and_registered_is_kept(tmp_path: Path, torch: bool, thread: bool) -> None:
    output = tmp_path / "output"
    assert end(output, torch, thread) == (3, "")
    assert output.read_text().split() == ["printed", *(["thread"] if thread else []), "registered"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("torch", [False, True])
def test_output_that_cannot_be_written_is_an_error(torch: bool) -> None:
    code, message = end(Path("/dev/full"), torch)
    assert code != 3 and "No space left on device" in message


def test_a_reader_that_has_ended_is_no_error() -> None:
    program = PROGRAM.format(torch=True, thread=False)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 3


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_collected_while_torch_is_imported(tmp_path: Path, fails: bool) -> None:
    line = "raise ImportError('broken')" if fails else ""
    (tmp_path / "torch.py").write_text(f"import gc\nprint(gc.isenabled())\n{line}\n")
    program = """
import gc, sys
from steepen.utils.process import import_torch
try:
    import_torch()
except ImportError as error:
    print(error)
print("torch" in sys.modules, gc.isenabled(), gc.get_freeze_count() > 0)
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**ENVIRONMENT, "PYTHONPATH": path},
    )
    expected = ["False", "broken", "False", "True", "False"] if fails else ["False", "True", "True", "True"]
    assert (done.stdout.split(), done.stderr) == (expected, "")
