"""A program: asks the CUDA driver for its devices and prints the answer as JSON.

It stands alone, so that Python can run it by its path before anything of this package is imported.
"""

import ctypes
import json

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
NAME_LENGTH = 256


def read_devices(driver):
    """What the driver says: ``devices`` as CUDA would show them, ``supports`` and ``error``.

    Args:
        driver: ``libcuda`` as ctypes loads it (CUDA's driver API).
    """
    code = driver.cuInit(0)
    answer = {"devices": [], "supports": _supported(driver), "error": None}
    if code == NO_DEVICE:
        return answer
    if code:
        return answer | {"error": _error(driver, "cuInit", code)}
    count = ctypes.c_int()
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return answer | {"error": _error(driver, "cuDeviceGetCount", code)}
    return answer | {"devices": [_device(driver, number) for number in range(count.value)]}


def _device(driver, number):
    """Name, compute capability and bytes of memory of one device."""
    handle, name, size = ctypes.c_int(), ctypes.create_string_buffer(NAME_LENGTH), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(handle), number)
    driver.cuDeviceGetName(name, NAME_LENGTH, handle)
    driver.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, handle)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, handle)
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
    return [name.value.decode(errors="replace"), major.value, minor.value, size.value]


def _supported(driver):
    """The newest CUDA that the driver runs; it gives 13000 for 13.0."""
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _error(driver, call, code):
    text = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(text))
    return f"{call} gives {(text.value or b'an unknown error').decode()} ({code})"


if __name__ == "__main__":
    print(json.dumps(read_devices(ctypes.CDLL(LIBRARY))))
