"""Says in which order the searches of a queue begin, and when: the one order of claims.

A worker asks `Queue.next_for` which search begins on a group of its devices that is free. `places`
asks the same while it moves the clock on, a discrete-event simulation: running searches
end, pauses end, and device hours become free. So people are told what will happen, as far as it is
known how long each search runs.

A search of which that is not known is taken to run for an hour, for the order alone: of searches
that begin after its end no time is said.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.errors import InvalidInput
from autotune.spec.limits import Number
from autotune.spec.queued_search import QueuePlace
from autotune.spec.schema import Schema
from autotune.units import format_duration, parse_duration

DEFAULT_GROUP = "default"
_ROUND_SECONDS = 1.0
"""How often a server looks whether hours have become free."""
_UNKNOWN_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class DeviceHours:
    """A limit of the hours of devices that one person uses within a time that moves on."""

    hours: float
    window_seconds: float
    text: str
    """As it was given, such as 40/7d."""

    @classmethod
    def parse(cls, text: str) -> "DeviceHours":
        """Returns the limit of a text such as `40/7d`. Raises InvalidInput and InvalidSize."""
        hours, _, window = text.partition("/")
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", hours) or not float(hours) or not window:
            raise InvalidInput(
                repr(text), hint="give hours and for which time: 40/7d is 40 hours in 7 days"
            )
        return cls(hours=float(hours), window_seconds=parse_duration(window), text=text)


NO_LIMIT = DeviceHours(hours=math.inf, window_seconds=1.0, text="")


@dataclass(frozen=True, kw_only=True)
class DeviceGroup(Schema):
    """Devices of one machine, on which a worker runs one search at a time."""

    machine: str = ""
    """As `SearchProcess` has it."""
    name: str = DEFAULT_GROUP
    type: str = ""
    """cpu or cuda; empty where that is not known, as of `kind`."""
    kind: str = ""
    """The vendor's name of the devices, such as `NVIDIA H200`."""
    devices: str | None = None
    """As of `--devices`; None: one device."""
    number: Number = 1
    """How many devices a search has for itself."""
    slots: Number = 1
    """How many trials may run at once on CPUs, else how many devices a search may ask for."""
    is_cluster: bool = False
    """Whether it is a Ray cluster, whose trials may use several nodes."""


@dataclass(frozen=True, kw_only=True)
class QueueRules:
    """The groups of devices of all workers, and how much of them one person may have."""

    groups: tuple[DeviceGroup, ...] = (DeviceGroup(),)
    """In the order in which they are given searches."""
    most_running: int | None = None
    """Searches of one person at once."""
    most_hours: DeviceHours = NO_LIMIT


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a search needs to run."""

    group: str = ""
    """Empty: any."""
    kind: str = ""
    """The type of device, or words of its name; empty: any."""
    model: str = ""
    """The name of the device that its study was begun on; empty: it has not begun."""
    devices: int = 1
    """How many it uses."""
    nodes: int = 1
    """How many a trial of it uses together."""
    slots: int = 1
    """How many trials it runs at once, which share devices with `trials_per_device`."""

    def fits(self, group: DeviceGroup) -> bool:
        """Whether it can run on the devices of a group, as far as their kind is known."""
        # Several trials on one GPU share it.
        number = self.slots if group.type == "cpu" else self.devices
        has_nodes = self.nodes == 1 or group.is_cluster
        return self.is_for(group) and has_nodes and number <= group.slots

    def is_for(self, group: DeviceGroup) -> bool:
        """Whether it is for the devices of a group, however many they are.

        A study may have begun on devices of a kind that is not known, and goes on there.
        """
        if self.group not in ("", group.name):
            return False
        if self.model:
            # A slice of a GPU, and a CPU with its threads, have the name of the whole before that.
            wholes = tuple(group.kind + separator for separator in (" MIG ", ", "))
            is_same = self.model == group.kind or self.model.startswith(wholes)
            return is_same or not group.kind
        if not self.kind or self.kind.casefold() == group.type:
            return True
        return f" {_words(self.kind)} " in f" {_words(group.kind)} "


def kind_of(request: Mapping[str, Any]) -> str:
    """Returns the kind of device that the settings of a search name; empty: any."""
    kind = request.get("kind")
    return kind.strip() if isinstance(kind, str) else ""


@dataclass(frozen=True, kw_only=True)
class Waiting(Needs):
    """A search in the queue; moments are seconds since 1970 by the clock of the database."""

    id: int
    person: str
    priority: int
    is_begun: bool
    """Whether an earlier process has begun it."""
    not_before: float
    seconds: float | None
    """How long it runs; None: unknown."""


def _words(name: str) -> str:
    """Returns the words of a device's name, which have letters, digits and dots."""
    return " ".join(re.findall(r"[\w.]+", name.casefold()))


@dataclass(frozen=True, kw_only=True)
class Running:
    """A search that runs."""

    id: int
    person: str
    machine: str = ""
    group: str
    seconds: float | None
    """How long it goes on; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """A time for which a search had the devices of its group."""

    search: int
    person: str
    devices: int
    began_at: float
    ended_at: float = math.inf


_Line = tuple[bool, int, str]
_Turn = tuple[bool, int, int, tuple[float, int], int]


class Queue:
    """The searches that wait and run, and what people have used, at the moment `now`."""

    def __init__(
        self,
        rules: QueueRules,
        *,
        now: float,
        waiting: Sequence[Waiting] = (),
        running: Sequence[Running] = (),
        last_starts: Mapping[str, float] | None = None,
        uses: Sequence[Use] = (),
    ) -> None:
        self.rules = rules
        self.now = now
        self.running = {search.id: search for search in running}
        self._lines: dict[_Line, list[Waiting]] = defaultdict(list)
        """Of each person the searches of a priority, the oldest first; begun ones apart."""
        for search in sorted(waiting, key=lambda each: each.id):
            self._lines[_line(search)].append(search)
        self._last_starts = {person: (at, 0) for person, at in (last_starts or {}).items()}
        """The last start of each person; simulated ones, of which several have one moment, are
        numbered."""
        self._starts = itertools.count(1)
        self._uses: dict[str, list[Use]] = defaultdict(list)
        for use in uses:
            self._uses[use.person].append(use)

    def waiting(self) -> list[Waiting]:
        """Returns the searches that wait, in the order of their turns now."""
        turns = [turn for line in self._lines for turn in self._turns(line)]
        return [search for _, search in sorted(turns, key=lambda each: each[0])]

    def next_for(self, group: DeviceGroup, *, except_for: Collection[int] = ()) -> Waiting | None:
        """Returns the search that begins now on a group that is free; None where none may begin.

        `except_for` are searches whose files its machine does not have.

        One that was begun goes on before new ones begin, then the highest priority is first. Within
        a priority people take turns: who has fewer searches running and before it goes first, and
        of those who has waited longest for a start.
        """
        first: tuple[_Turn, Waiting] | None = None
        for line in self._lines:
            if self._has_most_running(line[2]) or self._is_out_of_hours(line[2]):
                continue
            for turn, search in self._turns(line):
                may_begin = search.not_before <= self.now and search.id not in except_for
                if may_begin and self._fits(search, group):
                    if first is None or turn < first[0]:
                        first = turn, search
                    break
        return None if first is None else first[1]

    def reason_to_wait(self, search: Waiting) -> str:
        """Returns what a search waits for, as the end of a sentence."""
        groups = [group for group in self.rules.groups if self._fits(search, group)]
        if not groups:
            return f"{self._missing_worker(search)}, and none is there"
        person, rules = search.person, self.rules
        if self._has_most_running(person):
            return (
                f"the end of a search of {person}: at most {rules.most_running} of a person run "
                "at once"
            )
        if self._is_out_of_hours(person):
            seconds = self._seconds_until_hours(person)
            when = "after what runs" if seconds == math.inf else f"in {format_duration(seconds)}"
            used = self._used(person, self.now) / 3600.0
            limit = rules.most_hours.text
            return f"device hours of {person}, who has used {used:.1f} of {limit}: the next {when}"
        if search.not_before > self.now:
            return "its next start after a loss"
        names = {group.name for group in groups}
        return "a group of devices" if len(names) > 1 else f"the group {names.pop()}"

    def _fits(self, search: Waiting, group: DeviceGroup) -> bool:
        """Whether a search can run on a group, which of an unknown kind is the last resort.

        A study that has begun goes on there only while no group is known to have its model.
        """
        if not search.fits(group):
            return False
        if not search.model or group.kind:
            return True
        return not any(each.kind and search.fits(each) for each in self.rules.groups)

    def _missing_worker(self, search: Waiting) -> str:
        """Returns what a worker needs to have to run a search that no present one can run."""
        groups = self.rules.groups
        if search.group and all(group.name != search.group for group in groups):
            return f"a worker with a group of devices {search.group}"
        in_any_group = replace(search, group="")
        of_kind = [group for group in groups if in_any_group.is_for(group)]
        kind = search.model or search.kind
        if kind and not of_kind:
            return f"a worker with {kind}"
        if search.nodes > 1 and not any(group.is_cluster for group in of_kind):
            return "a worker with a Ray cluster"
        on_cpus = all(group.type == "cpu" for group in of_kind)
        number = search.slots if on_cpus else search.devices
        return f"a worker with {number} devices" if number > 1 else "a worker"

    # -- the simulation ----------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether no search waits."""
        return not self._lines

    def begin(self, search: Waiting, group: DeviceGroup) -> Running:
        """Lets a search run from now on."""
        line = self._lines[_line(search)]
        line.remove(search)
        if not line:
            del self._lines[_line(search)]
        running = Running(
            id=search.id,
            person=search.person,
            machine=group.machine,
            group=group.name,
            seconds=search.seconds,
        )
        self.running[search.id] = running
        if not search.is_begun:
            self._last_starts[search.person] = (self.now, next(self._starts))
        use = Use(search=search.id, person=search.person, devices=group.number, began_at=self.now)
        self._uses[search.person].append(use)
        return running

    def end(self, number: int) -> None:
        """Lets a running search end now."""
        uses = self._uses[self.running.pop(number).person]
        for place, use in enumerate(uses):
            if use.search == number and use.ended_at == math.inf:
                uses[place] = replace(use, ended_at=self.now)

    def later_moments(self) -> Iterator[float]:
        """Yields when a search that waits may begin that may not now, with what runs going on."""
        for line, searches in self._lines.items():
            yield from (each.not_before for each in searches if each.not_before > self.now)
            if self._is_out_of_hours(line[2]):
                yield self.now + self._seconds_until_hours(line[2])

    # -- turns and limits --------------------------------------------------------------------------

    def _turns(self, line: _Line) -> Iterator[tuple[_Turn, Waiting]]:
        is_new, priority, person = line
        running = self._running_of(person)
        last_start = self._last_starts.get(person, (0.0, 0))
        for index, search in enumerate(self._lines[line], start=running):
            yield (is_new, priority, index, last_start, search.id), search

    def _running_of(self, person: str) -> int:
        return sum(search.person == person for search in self.running.values())

    def _has_most_running(self, person: str) -> bool:
        most = self.rules.most_running
        return most is not None and self._running_of(person) >= most

    def _used(self, person: str, moment: float) -> float:
        """Returns the device seconds of a person in the window up to a moment."""
        begin = moment - self.rules.most_hours.window_seconds
        return sum(
            use.devices * max(0.0, min(moment, use.ended_at) - max(begin, use.began_at))
            for use in self._uses[person]
        )

    def _is_out_of_hours(self, person: str) -> bool:
        limit = self.rules.most_hours
        return limit != NO_LIMIT and self._used(person, self.now) >= 3600.0 * limit.hours

    def _seconds_until_hours(self, person: str) -> float:
        """Returns when a person who is out of hours has some; infinite where a search must end.

        What is used changes linearly between the moments at which the window leaves a begin or an
        end behind.
        """
        limit = self.rules.most_hours
        left_behind = {
            moment + limit.window_seconds
            for use in self._uses[person]
            for moment in (use.began_at, use.ended_at)
        }
        before, used_before = self.now, self._used(person, self.now)
        for moment in sorted(each for each in left_behind if self.now < each < math.inf):
            used = self._used(person, moment)
            if used < 3600.0 * limit.hours:
                share = (used_before - 3600.0 * limit.hours) / (used_before - used)
                seconds = before + share * (moment - before) - self.now
                return _ROUND_SECONDS * (math.floor(seconds / _ROUND_SECONDS) + 1)
            before, used_before = moment, used
        return math.inf


def _line(search: Waiting) -> _Line:
    return not search.is_begun, -search.priority, search.person


def places(queue: Queue) -> dict[int, QueuePlace]:
    """Returns where each search that waits stands, in the order in which they will begin.

    It moves the queue on to the last begin.
    """
    waits_for = {search.id: queue.reason_to_wait(search) for search in queue.waiting()}
    return {
        number: QueuePlace(position=position, begins_in_seconds=after, waits_for=waits_for[number])
        for position, (number, after) in enumerate(_begins(queue), start=1)
    }


def _begins(queue: Queue) -> Iterator[tuple[int, float | None]]:
    """Yields the searches in the order in which they begin, and after how many seconds."""
    start, known_until = queue.now, math.inf
    ends: dict[int, float] = {}
    begun = list(queue.running.values())
    while not queue.is_empty:
        busy = {(search.machine, search.group) for search in queue.running.values()}
        for group in queue.rules.groups:
            is_busy = (group.machine, group.name) in busy
            search = None if is_busy else queue.next_for(group)
            if search is not None:
                yield search.id, queue.now - start if queue.now < known_until else None
                begun.append(queue.begin(search, group))
        for running in begun:
            if running.seconds is None:
                known_until = min(known_until, queue.now + _UNKNOWN_SECONDS)
            seconds = _UNKNOWN_SECONDS if running.seconds is None else running.seconds
            ends[running.id] = queue.now + seconds
        begun = []
        later = [*ends.values(), *queue.later_moments()]
        if not later:
            break
        queue.now = min(later)
        for number in [each for each, end in ends.items() if end <= queue.now]:
            queue.end(number)
            del ends[number]
    for search in queue.waiting():
        yield search.id, None
