"""A real nginx in front of servers of a test, and the lines that the documentation gives for it."""

import os
import re
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

from tests.building.queued_searches import wait_until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
MISSING = "there is no nginx: apt-get install nginx"
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "service.md"

_CONFIGURATION = """
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {content}
}}
"""


def free_port():
    """Returns a port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def documented(heading, *, port, servers, name="127.0.0.1"):
    """Returns the lines for nginx below a heading of the documentation, for servers of a test.

    They listen on `port` in plain http, as `name`, and lead to the ports of `servers`.
    """
    section = DOCUMENTATION.read_text("utf-8").split(f"# {heading}\n")[1]
    blocks = re.findall(r"(?:^    .*\n|^\n)+", section, re.MULTILINE)
    lines = next(block for block in blocks if "proxy_pass" in block)
    lines = re.sub(r"listen [0-9]+ ssl;", f"listen 127.0.0.1:{port};", lines)
    lines = re.sub(r"server_name .*;", f"server_name {name};", lines)
    lines = re.sub(r"ssl_certificate.*;\n", "\n", lines)
    backends = iter(servers)
    return re.sub(r"[a-z0-9.-]+:8321", lambda _: f"127.0.0.1:{next(backends)}", lines)


@contextmanager
def nginx(folder, content, *, port):
    """Runs nginx with the content of its `http` block, until the end of the `with`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""
    file.write_text(_CONFIGURATION.format(user=user, folder=folder, content=content))
    command = [NGINX, "-p", str(folder), "-c", str(file), "-e", f"{folder}/error.log"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as running:
        try:
            wait_until(lambda: running.poll() is not None or _answers(port))
            assert running.poll() is None, running.stderr.read().decode()
            yield
        finally:
            running.terminate()


def _answers(port):
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
