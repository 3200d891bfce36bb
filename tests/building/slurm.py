"""A cluster of Slurm with one node, this machine, whose daemons end with it.

    with SlurmCluster(folder) as cluster:
        job = cluster.submit("#!/bin/bash\nsleep 60\n")
        cluster.wait_for(job, "RUNNING")

From Debian: apt-get install slurmctld slurmd slurm-client. It needs neither systemd nor cgroups nor
munge: processes are found by their parents, and whoever reaches its ports may submit.
"""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Self

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "scontrol")
PATIENCE_SECONDS = 400.0

SETTINGS = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def unavailable() -> str | None:
    """Returns why no cluster can be started here; None if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"Slurm's {missing[0]} is not in PATH: apt-get install slurmctld slurmd slurm-client"
    if os.geteuid() != 0:
        return "slurmd starts jobs as root only"
    return None


class SlurmCluster:
    """A controller and a node with two CPUs; jobs have `variables` in their environment."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self._folder = folder
        self._variables = variables
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for name in ("state", "spool"):
            (self._folder / name).mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        settings = SETTINGS.format(folder=self._folder, host=host, ports=_free_ports())
        (self._folder / "slurm.conf").write_text(settings)
        for command in (["slurmctld", "-D", "-c"], ["slurmd", "-D"]):
            with (self._folder / f"{command[0]}.out").open("wb") as out:
                self._daemons.append(
                    subprocess.Popen(command, env=self._environment, stdout=out, stderr=out)
                )
        self.wait_until(lambda: "State=IDLE" in self._run("scontrol", "show", "node"))
        return self

    def __exit__(self, *_: object) -> None:
        self._run("scancel", "--state=RUNNING", "--full", "--signal=KILL")
        self._run("scancel", "--me")
        self.wait_until(lambda: "JobId" not in self._run("squeue", "--noheader", "-o", "JobId"))
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(60)

    def submit(self, script: str, *options: str) -> int:
        """Submits a job, whose output is in `output_of`; returns its number."""
        file = self._folder / "job.sh"
        file.write_text(script)
        output = f"--output={self._folder}/job-%j.out"
        said = self._run("sbatch", "--parsable", "--export=ALL", output, *options, str(file))
        return int(said)

    def cancel(self, job: int) -> None:
        self._run("scancel", str(job))

    def requeue(self, job: int) -> None:
        self._run("scontrol", "requeue", str(job))

    def field(self, job: int, name: str) -> str:
        """Returns a field of a job, such as its JobState; empty for one that is forgotten."""
        words = self._run("scontrol", "show", "job", str(job)).split()
        found = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
        return found[0] if found else ""

    def wait_for(self, job: int, *states: str) -> None:
        """Waits until a job is in one of these states."""
        self.wait_until(lambda: self.field(job, "JobState") in states)

    def output_of(self, job: int) -> str:
        return (self._folder / f"job-{job}.out").read_text()

    @property
    def _environment(self) -> dict[str, str]:
        settings = {"SLURM_CONF": f"{self._folder}/slurm.conf"}
        return {**os.environ, **self._variables, **settings}

    def _run(self, *command: str) -> str:
        ran = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=60
        )
        return ran.stdout

    def wait_until(self, is_so: Any) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            assert time.monotonic() < deadline, (self._folder / "slurmctld.log").read_text()
            time.sleep(0.2)


def _free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in (one, two)]
