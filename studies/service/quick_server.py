"""A server whose searches have quick trials: `python studies/service/quick_server.py PORT URL`.

The token is in AUTOTUNE_TOKEN, and SEARCH_MODULE names another process of searches.
"""

import logging
import os
import socket
import sys

from autotune.service.settings import ServerSettings
from autotune.service.web_server import run_server


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = ServerSettings(
        storage=sys.argv[2],
        port=int(sys.argv[1]),
        token=os.environ["AUTOTUNE_TOKEN"],
        most_devices=8,
    )
    listening = socket.create_server(("127.0.0.1", settings.port), backlog=512)
    module = os.environ.get("SEARCH_MODULE", "studies.service.quick_search")
    run_server(settings, [listening], when_ready=lambda: None, search_module=module)


if __name__ == "__main__":
    main()
