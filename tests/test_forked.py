"""A program that is forked does what it does as a process of its own."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest

PROGRAM = """
import os, sys
import beside
if __name__ == "__main__":
    print(sys.argv[1:], os.getcwd(), os.environ.get("GIVEN"), beside.NUMBER)
    print("to errors", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.second_tier
def test_arguments_streams_status_and_seconds(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NUMBER = 7")
    (program := tmp_path / "program.py").write_text(PROGRAM)
    for status in (0, 3):
        done = forked.run(program, status, "b", folder=tmp_path, environment={"GIVEN": "yes"})
        assert done.returncode == status
        assert done.stdout == f"['{status}', 'b'] {tmp_path} yes 7\n"
        assert done.stderr == "to errors\n"
    program.write_text("import os\nos.kill(os.getpid(), 9)")
    assert forked.run(program).returncode == -9
    program.write_text("raise ValueError('its own')")
    done = forked.run(program)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: its own\n")
    program.write_text(
        "import os, time\nif os.fork():\n    os.wait()\nelse:\n    while time.process_time() < 0.3:\n        pass"
    )
    before = forked.processor_seconds
    assert forked.run(program).returncode == 0
    assert forked.processor_seconds - before > 0.25, "of what it started, too"


STARTS = """
import os, subprocess, sys
for arguments in (["-u", "rank.py", "3"], ["rank.py", "-9"], ["-m", "rank", "-15"], ["-c", "print('itself')"]):
    environment = os.environ | {"GIVEN": "yes"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    print(done.returncode, done.stdout, end="")
for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
    with subprocess.Popen([sys.executable, "rank.py", "0"], stdout=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        end(child)
        print(child.wait(), child.stdout.read())  # which ends when the program has
"""
RANK = """
import os, sys, time
assert "this" in sys.modules, "it is no fork"
print(sys.argv[1:], os.environ.get("GIVEN", ""), flush=True)
if (status := int(sys.argv[1])) < 0:
    os.kill(os.getpid(), -status)
elif status == 0:
    time.sleep(600)
sys.exit(status)
"""


@pytest.mark.second_tier
def test_what_a_program_starts_is_forked_too(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(STARTS)
    (tmp_path / "rank.py").write_text(RANK)
    done = forked.run(program, folder=tmp_path, starts=["this"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.partition("!\n")[2].splitlines()  # after the Zen that the import prints
    assert lines == ["3 ['3'] yes", "-9 ['-9'] yes", "-15 ['-15'] yes", "0 itself", "-15 ", "-9 "]
