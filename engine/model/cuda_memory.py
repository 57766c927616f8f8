"""Cuda memory: pieces of a GPU's memory that outlive their owner while others map them, through the driver.

Memory of the driver's virtual memory management, by ctypes: torch's own allocations can not be named by a descriptor.
What is mapped has an address on one device, the mapper's; it may lie on another. Every call raises `DeviceError` with
the driver's name for what went wrong.
"""

from __future__ import annotations

import ctypes
import functools
import os

import torch
from torch import Tensor

from engine.errors import DeviceError

LIBRARY = "libcuda.so.1"
_POSIX_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_DEVICE, _PINNED, _READ_AND_WRITE = 1, 1, 3


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp; flags are those of compression, remote access and usage, all 0."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class CudaMapping:
    """Memory that a device reaches at `address`, until `close`.

    Attributes:
        address: for kernels of this device.
        num_bytes: mapped, a multiple of the driver's granularity.
    """

    def __init__(self, handle: int, num_bytes: int, device: int) -> None:
        """Takes `handle` over, also when it fails: what is mapped stays as long as it is mapped anywhere."""
        self.num_bytes = num_bytes
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(num_bytes)
        nothing, no_flags = ctypes.c_size_t(0), ctypes.c_uint64(0)
        about = f"{num_bytes} bytes for cuda:{device}"
        try:
            _call("cuMemAddressReserve", about, ctypes.byref(address), size, nothing, no_flags, no_flags)
            try:
                _call("cuMemMap", about, address, size, nothing, ctypes.c_uint64(handle), no_flags)
                try:
                    access = Access(Location(_DEVICE, device), _READ_AND_WRITE)
                    _call("cuMemSetAccess", about, address, size, ctypes.byref(access), ctypes.c_size_t(1))
                except DeviceError:
                    _call("cuMemUnmap", about, address, size)
                    raise
            except DeviceError:
                _call("cuMemAddressFree", about, address, size)
                raise
        finally:
            _call("cuMemRelease", about, ctypes.c_uint64(handle))
        self.address: int = address.value
        self._device = device

    def close(self) -> None:
        """No kernel may touch it from now on. A second time does nothing."""
        if self.address:
            address, self.address = ctypes.c_uint64(self.address), 0
            about, size = f"{self.num_bytes} bytes of cuda:{self._device}", ctypes.c_size_t(self.num_bytes)
            with torch.cuda.device(self._device):
                _call("cuMemUnmap", about, address, size)
                _call("cuMemAddressFree", about, address, size)

    def view(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] of its beginning, which does not keep it: not to be touched after `close`."""
        device = torch.device("cuda", self._device)
        tensor = torch.as_tensor(Window(self.address, num_bytes), device=device)
        if tensor.data_ptr() != self.address:
            raise DeviceError(f"torch has copied {num_bytes} bytes of shared memory of cuda:{self._device}")
        return tensor


class Window:
    """What torch is told of memory that is not its own."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def create(num_bytes: int, device: torch.device) -> tuple[CudaMapping, int]:
    """New memory of a device, mapped there, and a descriptor of it, which is the caller's to close."""
    gpu = _open_device(device)
    with torch.cuda.device(gpu):
        size = _round_up(num_bytes, gpu)
        about = f"{size} bytes on cuda:{gpu}"
        handle = ctypes.c_uint64()
        properties = _properties(gpu)
        no_flags = ctypes.c_uint64(0)
        _call("cuMemCreate", about, ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), no_flags)
        descriptor = ctypes.c_int(-1)
        try:
            _call(
                "cuMemExportToShareableHandle", about, ctypes.byref(descriptor), handle,
                ctypes.c_int(_POSIX_DESCRIPTOR), no_flags,
            )  # fmt: skip
        except DeviceError:
            _call("cuMemRelease", about, handle)
            raise
        try:
            return CudaMapping(handle.value, size, gpu), descriptor.value
        except DeviceError:
            os.close(descriptor.value)
            raise


def adopt(descriptor: int, num_bytes: int, device: torch.device) -> CudaMapping:
    """Maps another process's memory for `device`. The descriptor stays the caller's."""
    gpu = _open_device(device)
    with torch.cuda.device(gpu):
        handle = ctypes.c_uint64()
        about = f"descriptor {descriptor} for cuda:{gpu}"
        # The driver takes the number itself in place of a pointer.
        _call(
            "cuMemImportFromShareableHandle", about, ctypes.byref(handle), ctypes.c_void_p(descriptor),
            ctypes.c_int(_POSIX_DESCRIPTOR),
        )  # fmt: skip
        return CudaMapping(handle.value, _round_up(num_bytes, gpu), gpu)


def _open_device(device: torch.device) -> int:
    """The device's number, after its context, which is torch's, is there."""
    gpu = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.synchronize(gpu)
    return gpu


def _properties(gpu: int) -> Properties:
    return Properties(_PINNED, _POSIX_DESCRIPTOR, Location(_DEVICE, gpu), None, 0)


def _round_up(num_bytes: int, gpu: int) -> int:
    """To what is mapped at least. GPUs of one kind agree on it, so a peer need not be told."""
    granularity = ctypes.c_size_t()
    properties = _properties(gpu)
    _call(
        "cuMemGetAllocationGranularity", f"cuda:{gpu}", ctypes.byref(granularity), ctypes.byref(properties),
        ctypes.c_int(0),
    )  # fmt: skip
    return -(-num_bytes // granularity.value) * granularity.value


def _call(name: str, about: str, *arguments: object) -> None:
    """One call of the driver. Arguments are ctypes' values: plain integers would be passed with 32 bits."""
    library = _library()
    status = getattr(library, name)(*arguments)
    if status:
        words = [ctypes.c_char_p() for _ in range(2)]
        library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(words[0]))
        library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(words[1]))
        error, meaning = ((word.value or b"unknown").decode() for word in words)
        raise DeviceError(f"{about}: {name} gave {error} ({status}): {meaning}")


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DeviceError(f"the CUDA driver is missing: {error}") from None
