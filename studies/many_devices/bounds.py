"""The least time that any search could take on the recorded tables, with any number of devices.

    OMP_NUM_THREADS=1 python studies/many_devices/bounds.py

If every configuration began at once, each would end after its own training and compiling. Prints
when 99 % of the hypervolume would have ended, and how few trials have so much.
"""

from studies.many_devices.replay import ENOUGH
from studies.search_efficiency.replay import CAPS, the_table
from studies.search_efficiency.table import TABLES, ReplayExecutor, Table


def trials_under(cap_bytes: int, table: Table) -> list[tuple[float, str]]:
    """Returns seconds and fingerprint of each trial that fits, the shortest first.

    It shares its perplexity, is not predicted, and compiles its code itself.
    """
    definition = table.definition(cap_bytes=cap_bytes)
    found = []
    for name, config in table.configs.items():
        point = table.point_of(config)
        if point is not None and point.memory <= cap_bytes:
            executor = ReplayExecutor(table)
            executor.submit(definition, config, enforce_cap=True, shares_perplexity=True)
            found.append((executor.seconds, name))
    return sorted(found)


def share_of(names: list[str], table: Table, *, cap_bytes: int) -> float:
    points = [table.point_of(table.configs[name]) for name in names]
    return table.hypervolume_of([point for point in points if point], cap_bytes=cap_bytes)


def few_that_are_enough(names: list[str], table: Table, *, cap_bytes: int) -> list[str]:
    """Returns trials with 99 % of the hypervolume; each adds the most to those before it."""

    def share_with(name: str) -> float:
        return share_of([*few, name], table, cap_bytes=cap_bytes)

    few: list[str] = []
    while share_of(few, table, cap_bytes=cap_bytes) < ENOUGH:
        few.append(max(names, key=share_with))
    return few


def main() -> None:
    print("| table | cap | least seconds | trials that have so much | the longest of them, s |")
    print("|---|---|---|---|---|")
    for table_name in TABLES:
        table = the_table(table_name)
        for cap, fits in CAPS.items():
            cap_bytes = table.cap_bytes(fits)
            trials = trials_under(cap_bytes, table)
            names = [name for _, name in trials]
            count = 1
            while share_of(names[:count], table, cap_bytes=cap_bytes) < ENOUGH:
                count += 1
            few = few_that_are_enough(names, table, cap_bytes=cap_bytes)
            least = trials[count - 1][0]
            longest = max(seconds for seconds, name in trials if name in few)
            print(f"| {table_name} | {cap} | {least:.1f} | {len(few)} | {longest:.1f} |")


if __name__ == "__main__":
    main()
