"""The PostgreSQL server of the tests leaves nothing behind, however its process ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.building.postgres import unavailable

PROGRAM = """
import sys
from tests.building.postgres import PostgresServer
server = PostgresServer()
server.start()
print(server.folder, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_server_and_its_folder_are_gone_after_the_process_that_made_it_was_killed():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, **pipes) as maker:
        folder = Path(maker.stdout.readline().strip())
        process = Path("/proc", (folder / "data" / "postmaster.pid").read_text().split()[0])
        assert process.exists() or not Path("/proc/self").exists()
        maker.kill()
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not folder.exists()
    assert not process.exists() or "State:\tZ" in (process / "status").read_text()
