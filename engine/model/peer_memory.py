"""Peer memory: memory of this process that other processes of the host map, by a descriptor that a socket carries.

What is mapped stays as long as anyone maps it. So the owner may be killed while kernels of its peers put something
there: they see no error, and nobody reads it. On a GPU it is memory of the driver (`cuda_memory`); on a CPU a file
without a name, so that everything around it is the same and runs without a GPU.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import DeviceError
from engine.model import cuda_memory


class Mapping(Protocol):
    """Memory at an address of this process, or of its device."""

    address: int

    def close(self) -> None:
        """A second time does nothing."""


class SharedMemory:
    """Memory that peers may map.

    Attributes:
        memory: uint8[num_bytes], zeros at first. Not to be touched after `close`.
        descriptor: names it to a peer: to be sent by SCM_RIGHTS, and open until `close`.
        num_bytes: as asked for.
        layout: what lies where in it, in words.
    """

    def __init__(self, memory: Tensor, descriptor: int, mapping: Mapping, layout: str) -> None:
        """See `allocate`."""
        self.memory = memory
        self.descriptor = descriptor
        self.layout = layout
        self.num_bytes = memory.nbytes
        self._mapping = mapping

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.memory.device

    @property
    def address(self) -> int:
        """For kernels of the own device; 0 after `close`."""
        return self._mapping.address

    def close(self) -> None:
        """Peers that have mapped it keep it. All kernels that touch it have ended. A second time does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self._mapping.close()


class PeerMapping:
    """Another process's memory, as this one reaches it.

    Attributes:
        address: for kernels of the device that it was opened for; 0 after `close`.
        num_bytes: as its owner said.
    """

    def __init__(self, mapping: Mapping, num_bytes: int) -> None:
        """See `open_peer`."""
        self._mapping = mapping
        self.num_bytes = num_bytes

    @property
    def address(self) -> int:
        """See the class."""
        return self._mapping.address

    def close(self) -> None:
        """All kernels that touch it have ended. A second time does nothing."""
        self._mapping.close()


def allocate(num_bytes: int, device: torch.device, layout: str = "") -> SharedMemory:
    """New memory of `device`, zeros. Never inside a capture.

    Args:
        num_bytes: at least 1.
        device: of this process.
        layout: what lies where in it, in words: peers that swap memory refuse one another's of another layout.

    Raises:
        DeviceError: the driver or the kernel has refused it.
        ValueError: no bytes.
    """
    if num_bytes < 1:
        raise ValueError(f"{num_bytes} bytes can not be shared")
    if device.type == "cpu":
        return _allocate_host(num_bytes, layout)
    mapping, descriptor = cuda_memory.create(num_bytes, device)
    memory = mapping.view(num_bytes)
    # Rows that never came are read along with others, so they must not look like NaN.
    memory.zero_()
    torch.cuda.synchronize(memory.device)
    return SharedMemory(memory, descriptor, mapping, layout)


def open_peer(descriptor: int, num_bytes: int, device: torch.device) -> PeerMapping:
    """Maps what a peer shares, for kernels of `device`. Never inside a capture.

    Args:
        descriptor: as it was received; stays the caller's, and is not needed once this has returned.
        num_bytes: of the peer's memory.
        device: of this process; with CUDA another one than the peer's, or the same.

    Raises:
        DeviceError: it is no such memory, smaller, or not to be reached by this device.
    """
    if device.type == "cpu":
        return PeerMapping(_HostMapping(descriptor, num_bytes), num_bytes)
    return PeerMapping(cuda_memory.adopt(descriptor, num_bytes, device), num_bytes)


class _HostMapping:
    """A file's bytes. Whoever still has a view keeps them, also after `close`."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        try:
            # A file that is shorter would kill whoever touches what is missing.
            size = os.fstat(descriptor).st_size
            if size < num_bytes:
                raise DeviceError(f"descriptor {descriptor} has {size} bytes, and should have {num_bytes}")
            self.bytes: mmap.mmap | None = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED)
        except OSError as error:
            raise DeviceError(f"{num_bytes} bytes of descriptor {descriptor} can not be mapped: {error}") from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))

    def close(self) -> None:
        self.address = 0
        self.bytes = None


def _allocate_host(num_bytes: int, layout: str) -> SharedMemory:
    descriptor = os.memfd_create("mailbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapping = _HostMapping(descriptor, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise DeviceError(f"{num_bytes} bytes of shared memory: {error}") from error
    except DeviceError:
        os.close(descriptor)
        raise
    assert mapping.bytes is not None
    return SharedMemory(torch.frombuffer(mapping.bytes, dtype=torch.uint8), descriptor, mapping, layout)
