"""StreamCalls: what a launch asks of the driver, by ctypes: copies, a graph, events, all on one stream.

torch's own calls for these look up device, stream, allocator and generators each time. Between two sleeps of a
millisecond nothing of that is left in a core's caches, and what takes 4 us in a loop takes 30. These calls keep the
interpreter's lock: none of them waits for the device.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from engine.errors import DeviceError

LIBRARY = "libcuda.so.1"


class StreamCalls:
    """See the module. For the thread whose current device has the stream. Each call raises DeviceError."""

    def __init__(self, stream: int) -> None:
        """`stream`: as torch has it in `cuda_stream`."""
        self._stream = stream
        self._copy, self._launch, self._record = _load()

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """From one address to another; on the host pinned memory."""
        if status := self._copy(target, source, num_bytes, self._stream):
            raise DeviceError(f"a copy of {num_bytes} bytes failed in the CUDA driver ({status})")

    def launch(self, graph: int) -> None:
        """A graph, as torch has it in `raw_cuda_graph_exec`."""
        if status := self._launch(graph, self._stream):
            raise DeviceError(f"the launch of a graph failed in the CUDA driver ({status})")

    def record(self, event: int) -> None:
        """An event, as torch has it in `cuda_event`."""
        if status := self._record(event, self._stream):
            raise DeviceError(f"an event failed in the CUDA driver ({status})")


@functools.cache
def _load() -> tuple[Any, Any, Any]:
    try:
        library = ctypes.PyDLL(LIBRARY)
    except OSError as error:
        raise DeviceError(f"the CUDA driver is missing: {error}") from None
    pointer = ctypes.c_void_p
    library.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, pointer)
    library.cuGraphLaunch.argtypes = (pointer, pointer)
    library.cuEventRecord.argtypes = (pointer, pointer)
    return library.cuMemcpyAsync, library.cuGraphLaunch, library.cuEventRecord
