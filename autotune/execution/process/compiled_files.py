"""Lets inductor's C++ compiler leave only complete files in its cache.

inductor lets the compiler write to the final name, and takes whatever has that name for compiled
code. A training that is killed while it compiles, by Ctrl-C, a deadline or the kernel, would leave
an empty or half-written library, on which every later trial with the same graph would crash. If it
was the library by which inductor tests the vector instructions of the CPU, later trials would be
compiled without them, and be slower than they are elsewhere, without a word.

Here the compiler writes to another name, which becomes the final one in one step once the compiler
has succeeded. Triton, and inductor's caches of graphs, do the same themselves.
"""

import functools
import os

from torch._inductor.cpp_builder import CppBuilder


def keep_incomplete_files_out() -> None:
    """Replaces `CppBuilder.build` in this process and in those that are forked from it."""
    build = CppBuilder.build

    @functools.wraps(build)
    def build_elsewhere(self: CppBuilder) -> None:
        target = self.get_target_file_path()
        incomplete = f"{target}.{os.getpid()}"
        command = self.get_command_line().replace(target, incomplete)
        self.get_command_line = lambda: command  # type: ignore[method-assign]
        try:
            build(self)
        finally:
            del self.get_command_line
        os.replace(incomplete, target)

    CppBuilder.build = build_elsewhere  # type: ignore[method-assign]
