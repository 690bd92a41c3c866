"""The part of oneDNN's C API that its peers use: objects that free themselves, memory, primitives.

Values and signatures are those of dnnl.h and dnnl_types.h of oneDNN 3, which keeps them stable.
"""

import ctypes
import weakref
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from benchmarks.sites.peers import _dnnl_library

CPU: Final = 1
FORWARD_TRAINING: Final = 64
BACKWARD: Final = 128
USE_SCALE: Final = 0x2
USE_SHIFT: Final = 0x4
FUSE_NORM_RELU: Final = 0x8
FUSE_NORM_ADD_RELU: Final = 0x10
ELTWISE_RELU: Final = 0x20
ELTWISE_RELU_USE_DST: Final = 0x100
BINARY_ADD: Final = 0x1FFF0
TAG_OF_VECTORS: Final = 2
DATA_TYPES: Final = {"float16": 1, "bfloat16": 2, "float32": 3}

# Arguments of primitives.
SRC: Final = 1
SRC_1: Final = 2
DST: Final = 17
MEAN: Final = 49
VARIANCE: Final = 50
SCALE: Final = 51
SHIFT: Final = 52
WORKSPACE: Final = 64
DIFF_SRC: Final = 129
DIFF_SRC_1: Final = 130
DIFF_DST: Final = 145
DIFF_SCALE: Final = 255
DIFF_SHIFT: Final = 256

_UNIMPLEMENTED: Final = 3
_QUERY_IMPLEMENTATION: Final = 8
_QUERY_WORKSPACE: Final = 135
_IN_ORDER: Final = 1


class UnimplementedError(Exception):
    """oneDNN has no implementation of this primitive for these arrays on this processor."""


class Object:
    """Something that oneDNN made, destroyed when nothing refers to it any more."""

    def __init__(self, library: ctypes.CDLL, kind: str, handle: ctypes.c_void_p) -> None:
        self._as_parameter_ = (
            handle  # where ctypes looks for the argument that an object stands for
        )
        weakref.finalize(self, getattr(library, f"dnnl_{kind}_destroy"), handle)


class _ExecutionArgument(ctypes.Structure):
    """dnnl_exec_arg_t."""

    _fields_ = (("arg", ctypes.c_int), ("memory", ctypes.c_void_p))


class Memory:
    """An array, and oneDNN's view of it."""

    def __init__(self, dnnl: "Dnnl", array: np.ndarray, descriptor: Any) -> None:
        self.array = array
        pointer = ctypes.c_void_p(array.ctypes.data)
        self.handle = dnnl.create("memory", descriptor, dnnl.engine, pointer)


class Primitive:
    """A primitive with its arguments; calling it runs it, and does not wait for it."""

    def __init__(self, dnnl: "Dnnl", descriptor: Object, arguments: Mapping[int, Memory]) -> None:
        self._dnnl = dnnl
        self._handle = dnnl.create("primitive", descriptor)
        self._memories = dict(arguments)  # oneDNN only refers to them
        self._arguments = (_ExecutionArgument * len(arguments))(
            *(
                _ExecutionArgument(name, memory.handle._as_parameter_)
                for name, memory in self._memories.items()
            )
        )

    def __call__(self) -> None:
        self._dnnl.call(
            "primitive_execute",
            self._handle,
            self._dnnl.stream,
            len(self._arguments),
            self._arguments,
        )


class Dnnl:
    """oneDNN with an engine for the CPU and a stream, which executes primitives in order."""

    def __init__(self) -> None:
        self._library = _dnnl_library.load()
        self._library.dnnl_primitive_desc_query_md.restype = ctypes.c_void_p
        self._library.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
        self.engine = self.create("engine", CPU, ctypes.c_size_t(0))
        self.stream = self.create("stream", self.engine, _IN_ORDER)

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function without its prefix.

        Raises:
            UnimplementedError: oneDNN has no implementation of what the function creates.
        """
        status = getattr(self._library, f"dnnl_{function}")(*arguments)
        if status == _UNIMPLEMENTED:
            raise UnimplementedError(function)
        if status:
            raise RuntimeError(f"oneDNN's dnnl_{function} failed with status {status}")

    def create(self, kind: str, *arguments: Any, by: str = "create") -> Object:
        """What dnnl_KIND_create makes, or another function that makes one."""
        handle = ctypes.c_void_p()
        self.call(f"{kind}_create" if by == "create" else by, ctypes.byref(handle), *arguments)
        return Object(self._library, kind, handle)

    def primitive_descriptor(self, operation: str, *arguments: Any) -> Object:
        by = f"{operation}_primitive_desc_create"
        return self.create("primitive_desc", self.engine, *arguments, by=by)

    def array_descriptor(self, dims: tuple[int, ...], dtype: str, tag: int) -> Object:
        sizes = (ctypes.c_int64 * 12)(*dims)  # DNNL_MAX_NDIMS
        given = (len(dims), sizes, DATA_TYPES[dtype], tag)
        return self.create("memory_desc", *given, by="memory_desc_create_with_tag")

    def implementation(self, descriptor: Object) -> str:
        """The name of the implementation that oneDNN has chosen."""
        name = ctypes.c_char_p()
        self.call("primitive_desc_query", descriptor, _QUERY_IMPLEMENTATION, 0, ctypes.byref(name))
        return (name.value or b"").decode()

    def workspace(self, descriptor: Object) -> ctypes.c_void_p:
        """The descriptor of what forward keeps for backward; it belongs to `descriptor`."""
        query = self._library.dnnl_primitive_desc_query_md
        return ctypes.c_void_p(query(descriptor, _QUERY_WORKSPACE, 0))

    def size(self, memory_descriptor: Any) -> int:
        """The number of bytes that an array of this description takes."""
        return self._library.dnnl_memory_desc_get_size(memory_descriptor)

    def tag_name(self, tag: int) -> str:
        self._library.dnnl_fmt_tag2str.restype = ctypes.c_char_p
        return self._library.dnnl_fmt_tag2str(tag).decode()

    def wait(self) -> None:
        self.call("stream_wait", self.stream)
