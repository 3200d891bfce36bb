"""Another process that uses a device on command: `python intruder.py [cuda:0]`.

Reads commands from stdin, one per line, and answers each with a line. Needs only the driver, not
torch.

    context        creates a context on the device
    take 512       allocates 512 MiB
    give           frees everything that it allocated
    leave          ends, so that the driver frees its memory
"""

import ctypes
import sys

MIB = 1024**2


def _check(error: int) -> None:
    if error:
        name = ctypes.c_char_p()
        _driver.cuGetErrorString(error, ctypes.byref(name))
        print(f"error {error}: {(name.value or b'').decode()}", flush=True)
        sys.exit(1)


_driver = ctypes.CDLL("libcuda.so.1")
_blocks: list[ctypes.c_void_p] = []


def _create_context(ordinal: int) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver.cuInit(0))
    _check(_driver.cuDeviceGet(ctypes.byref(device), ordinal))
    _check(_driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check(_driver.cuCtxSetCurrent(context))


def _take(mebibytes: int) -> None:
    block = ctypes.c_void_p()
    _check(_driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(mebibytes * MIB)))
    _blocks.append(block)


def _give() -> None:
    for block in _blocks:
        _check(_driver.cuMemFree_v2(block))
    _blocks.clear()


def main() -> None:
    ordinal = int(sys.argv[1].removeprefix("cuda:")) if len(sys.argv) > 1 else 0
    has_context = False
    for line in sys.stdin:
        command, *values = line.split()
        if command == "leave":
            return
        if not has_context:
            _create_context(ordinal)
            has_context = True
        if command == "take":
            _take(int(values[0]))
        elif command == "give":
            _give()
        print("done", flush=True)


if __name__ == "__main__":
    main()
