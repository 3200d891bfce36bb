"""What of a server runs searches and leads, without its pages; its searches are stand-ins."""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

from autotune.service.devices import groups_of
from autotune.service.leader import Leader
from autotune.service.other_servers import OtherServers
from autotune.service.retention import Retention
from autotune.service.settings import ServerSettings
from autotune.service.worker import Worker
from autotune.storage.searches import Searches
from autotune.storage.servers import Servers

STAND_IN = "tests.building.search_stand_in"


@contextmanager
def queue_server(database, log_folder, *, webhooks_of_people=dict, **settings):
    """Yield the `worker` and the `leader` of a server; a cancelled search may take a second."""
    of_server = ServerSettings(**settings)
    queue = Searches(database)
    groups = groups_of(of_server)
    others = OtherServers(Servers(database), of_server, groups=groups)
    others.begin()
    worker = Worker(
        queue,
        others,
        of_server,
        groups=groups,
        log_folder=log_folder,
        retention=Retention(folder=log_folder),
        module=STAND_IN,
        stop_seconds=1.0,
    )
    leader = Leader(queue, of_server, webhooks_of_people=webhooks_of_people)
    with ExitStack() as opened:
        opened.callback(others.end)
        opened.enter_context(worker)
        opened.enter_context(leader)
        yield SimpleNamespace(worker=worker, leader=leader)
