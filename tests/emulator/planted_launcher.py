"""Launches kernels on the GPU through the driver: `python planted_launcher.py FOLDER NAME...`.

Uses only the standard library, so that a process under compute-sanitizer starts quickly. FOLDER
contains, for each NAME, NAME.cubin and NAME.pickle: entry, grid, block, dynamic shared bytes, and
the arguments: `("array", bytes)`, `("scalar", bytes)` or `("null", b"")`. Prints `launch NAME`
before each launch and `done` after the last. If the driver reports an error, prints
`failed CODE in FUNCTION` and exits, because all later launches would fail.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from pathlib import Path

_SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def main(folder: Path, names: list[str]) -> int:
    """Launches every kernel. Returns 0; exits with status 3 after a driver error."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        code = getattr(driver, name)(*arguments)
        if code != 0:
            print(f"failed {code} in {name}", flush=True)
            sys.exit(3)

    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    for name in names:
        print(f"launch {name}", flush=True)
        entry, grid, block, shared, arguments = pickle.loads(
            (folder / f"{name}.pickle").read_bytes()
        )
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        cubin = (folder / f"{name}.cubin").read_bytes()
        call("cuModuleLoadData", ctypes.byref(module), cubin)
        call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        call("cuFuncSetAttribute", function, _SHARED_LIMIT, shared)
        values, arrays = [], []
        for kind, data in arguments:
            if kind == "scalar":
                values.append(ctypes.create_string_buffer(data, len(data)))
                continue
            address = ctypes.c_uint64()
            if kind == "array":
                call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(data)))
                call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(len(data)))
                arrays.append(address)
            values.append(address)
        pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        call("cuLaunchKernel", function, *grid, *block, shared, None, pointers, None)
        call("cuCtxSynchronize")
        for address in arrays:
            call("cuMemFree_v2", address)
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
