"""cuDNN's fused BatchNorm-Add-ReLU: a ctypes binding of the functions that one site needs.

These are NVIDIA's own kernels for the same problem, in the legacy API: BatchNorm alone, with ReLU,
or with add and ReLU, in one call forward and one backward, on NHWC tensors. cuDNN documents its
fast kernels only for float16, but every dtype is passed on, so that a refusal is cuDNN's own.
Operands are addresses on the device, whoever owns the memory. Prototypes and numbers are those of
cudnn_graph.h and cudnn_ops.h in cuDNN 9.
"""

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_size_t, c_void_p
from importlib import metadata
from typing import Any, Final, Self

from benchmarks.common.sites import Form, Site
from benchmarks.sites.problem import DType

_FILE: Final = "libcudnn.so.9"
_WHEELS: Final = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")

_DATA_TYPES: Final[dict[DType, int]] = {"float32": 0, "float16": 2, "bfloat16": 9}
_OPERATIONS: Final[dict[Form, int]] = {"batch_norm": 0, "bn_relu": 1, "bn_add_relu": 2}
_TENSOR_NHWC: Final = 1
_BATCHNORM_SPATIAL_PERSISTENT: Final = 2
_ACTIVATION_RELU: Final = 1
_NOT_PROPAGATE_NAN: Final = 0
_SUCCESS: Final = 0

# result = alpha * value + beta * what the result held before. The call reads both on the host.
_ALPHA_AND_BETA: Final = (byref(c_float(1)), byref(c_float(0)))

_HANDLE: Final = c_void_p
_DESCRIPTOR: Final = c_void_p
_DATA: Final = c_void_p
_ENUMERATION: Final = c_int
_FACTOR: Final = POINTER(c_float)
_TENSOR: Final = (_DESCRIPTOR, _DATA)
_HANDLE_MODE_OPERATION: Final = (_HANDLE, _ENUMERATION, _ENUMERATION)
_ACTIVATION_WORKSPACE_RESERVE: Final = (_DESCRIPTOR, _DATA, c_size_t, _DATA, c_size_t)

# The arguments of the functions that return a status.
PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "cudnnCreate": (POINTER(_HANDLE),),
    "cudnnDestroy": (_HANDLE,),
    "cudnnSetStream": (_HANDLE, c_void_p),
    "cudnnCreateTensorDescriptor": (POINTER(_DESCRIPTOR),),
    "cudnnDestroyTensorDescriptor": (_DESCRIPTOR,),
    "cudnnSetTensor4dDescriptor": (
        _DESCRIPTOR,
        *[_ENUMERATION] * 2,  # format, data type
        *[c_int] * 4,  # n, c, h, w
    ),
    "cudnnDeriveBNTensorDescriptor": (_DESCRIPTOR, _DESCRIPTOR, _ENUMERATION),
    "cudnnCreateActivationDescriptor": (POINTER(_DESCRIPTOR),),
    "cudnnDestroyActivationDescriptor": (_DESCRIPTOR,),
    "cudnnSetActivationDescriptor": (_DESCRIPTOR, _ENUMERATION, _ENUMERATION, c_double),
    "cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize": (
        *_HANDLE_MODE_OPERATION,
        *[_DESCRIPTOR] * 5,  # x, z, y, vectors, activation
        POINTER(c_size_t),
    ),
    "cudnnGetBatchNormalizationBackwardExWorkspaceSize": (
        *_HANDLE_MODE_OPERATION,
        *[_DESCRIPTOR] * 7,  # x, y, dy, dz, dx, vectors, activation
        POINTER(c_size_t),
    ),
    "cudnnGetBatchNormalizationTrainingExReserveSpaceSize": (
        *_HANDLE_MODE_OPERATION,
        *[_DESCRIPTOR] * 2,  # activation, x
        POINTER(c_size_t),
    ),
    "cudnnBatchNormalizationForwardTrainingEx": (
        *_HANDLE_MODE_OPERATION,
        *[_FACTOR] * 2,  # alpha, beta
        *_TENSOR * 3,  # x, z, y
        _DESCRIPTOR,  # of the vectors
        *[_DATA] * 2,  # scale, bias
        c_double,  # weight of this batch in the running statistics
        *[_DATA] * 2,  # running mean and var
        c_double,  # epsilon
        *[_DATA] * 2,  # saved mean and inverse standard deviation
        *_ACTIVATION_WORKSPACE_RESERVE,
    ),
    "cudnnBatchNormalizationBackwardEx": (
        *_HANDLE_MODE_OPERATION,
        *[_FACTOR] * 4,  # alpha, beta of the tensors, then of the vectors
        *_TENSOR * 5,  # x, y, dy, dz, dx
        _DESCRIPTOR,  # of the vectors
        *[_DATA] * 4,  # scale, bias, dscale, dbias
        c_double,  # epsilon
        *[_DATA] * 2,  # saved mean and inverse standard deviation
        *_ACTIVATION_WORKSPACE_RESERVE,
    ),
}


class CudnnError(RuntimeError):
    """cuDNN did not carry out a call; `status` is its cudnnStatus_t."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_not_supported(self) -> bool:
        """Whether the status is one of CUDNN_STATUS_NOT_SUPPORTED, 3000 to 3999."""
        return self.status // 1000 == 3


class Library:
    """The functions of libcudnn, checked.

    Without a path, this is the library that PyTorch has loaded into this process, or else that of
    NVIDIA's wheel or of the system. Raises OSError if there is none, or if it lacks a function.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        library = _load() if path is None else ctypes.CDLL(os.fspath(path))
        self._functions: dict[str, Callable[..., int]] = {
            name: _function(library, name, c_int, *arguments)
            for name, arguments in PROTOTYPES.items()
        }
        self._version = _function(library, "cudnnGetVersion", c_size_t)
        self._error_string = _function(library, "cudnnGetErrorString", c_char_p, _ENUMERATION)
        # This exists since cuDNN 9.
        name = "cudnnGetLastErrorString"
        self._last_error_string = (
            _function(library, name, None, c_char_p, c_size_t) if hasattr(library, name) else None
        )

    @property
    def version(self) -> int:
        """The version as cuDNN 9 has it: 10000 * major + 100 * minor + patch."""
        return self._version()

    def call(self, configuration: str, name: str, *arguments: Any) -> None:
        """Raises CudnnError, which names the configuration, unless the status is success."""
        status = self._functions[name](*arguments)
        if status == _SUCCESS:
            return
        raise CudnnError(
            f"{name} gave {self._error_string(status).decode()} ({status})"
            f" for {configuration}{self._last_error()}",
            status,
        )

    def _last_error(self) -> str:
        if self._last_error_string is None:
            return ""
        text = ctypes.create_string_buffer(1024)
        self._last_error_string(text, len(text))
        return f": {text.value.decode(errors='replace')}" if text.value else ""


def _load() -> ctypes.CDLL:
    attempts: dict[str, Callable[[], ctypes.CDLL]] = {
        "among the libraries of this process": functools.partial(
            ctypes.CDLL, _FILE, os.RTLD_NOLOAD | os.RTLD_NOW
        ),
        **{f"in the wheel {name}": functools.partial(_load_of_wheel, name) for name in _WHEELS},
        "where the system has its libraries": functools.partial(ctypes.CDLL, _FILE),
    }
    failures = []
    for place, attempt in attempts.items():
        try:
            return attempt()
        except (OSError, metadata.PackageNotFoundError) as error:
            failures.append(f"{place} ({error})")
    raise OSError(
        f"{_FILE} is not there: looked {', '.join(failures)}."
        f" Install {_WHEELS[0]}, or give the library's path."
    )


def _load_of_wheel(name: str) -> ctypes.CDLL:
    path = metadata.distribution(name).locate_file(f"nvidia/cudnn/lib/{_FILE}")
    return ctypes.CDLL(str(path))


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    try:
        function = library[name]
    except AttributeError as error:
        raise OSError(
            f"{library._name} has no {name}: expected cuDNN 9 with its legacy API."
        ) from error
    function.restype, function.argtypes = result, arguments
    return function


class BatchNormAddRelu:
    """Forward and backward of one site, in training.

    Attributes:
        forward_workspace_bytes: what `forward` needs in addition to operands and results.
        backward_workspace_bytes: the same for `backward`; both may use one workspace.
        reserve_space_bytes: what `forward` keeps for `backward`.

    `close`, the end of a `with`, or the end of the object destroys handle and descriptors.
    Raises CudnnError if cuDNN does not support the configuration.
    """

    def __init__(
        self,
        library: Library,
        site: Site,
        batch: int,
        dtype: DType,
        *,
        epsilon: float,
        average_factor: float,
    ) -> None:
        """The weight of a batch in the running statistics is `average_factor`."""
        if dtype not in _DATA_TYPES:
            raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(_DATA_TYPES)}.")
        if site.form not in _OPERATIONS:
            raise ValueError(
                f"cuDNN has no operation for {site.label},"
                f" expected one of {', '.join(_OPERATIONS)}."
            )
        self._epsilon, self._average_factor = epsilon, average_factor
        self._modes = (_BATCHNORM_SPATIAL_PERSISTENT, _OPERATIONS[site.form])
        self._call = call = functools.partial(library.call, f"{site.label}, batch {batch}, {dtype}")
        with contextlib.ExitStack() as made:

            def make(kind: str) -> c_void_p:
                pointer = c_void_p()
                call(f"cudnnCreate{kind}", byref(pointer))
                made.callback(call, f"cudnnDestroy{kind}", pointer)
                return pointer

            self._handle = make("")
            self._x = make("TensorDescriptor")
            n, h, w, c = site.shape(batch)
            call(
                "cudnnSetTensor4dDescriptor",
                *(self._x, _TENSOR_NHWC, _DATA_TYPES[dtype], n, c, h, w),
            )
            self._vector = make("TensorDescriptor")
            call(
                "cudnnDeriveBNTensorDescriptor",
                *(self._vector, self._x, _BATCHNORM_SPATIAL_PERSISTENT),
            )
            # Descriptors that the form does not use are NULL.
            self._z = self._x if site.form == "bn_add_relu" else None
            self._y = self._activation = None
            if site.form != "batch_norm":
                self._y = self._x
                self._activation = make("ActivationDescriptor")
                call(
                    "cudnnSetActivationDescriptor",
                    *(self._activation, _ACTIVATION_RELU, _NOT_PROPAGATE_NAN, 0.0),
                )
            self.forward_workspace_bytes = self._size(
                "cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize",
                *(self._x, self._z, self._x, self._vector, self._activation),
            )
            self.backward_workspace_bytes = self._size(
                "cudnnGetBatchNormalizationBackwardExWorkspaceSize",
                *(self._x, self._y, self._x, self._z, self._x, self._vector, self._activation),
            )
            self.reserve_space_bytes = self._size(
                "cudnnGetBatchNormalizationTrainingExReserveSpaceSize",
                *(self._activation, self._x),
            )
            self.close = weakref.finalize(self, made.pop_all().close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _size(self, name: str, *descriptors: c_void_p | None) -> int:
        size = c_size_t()
        self._call(name, self._handle, *self._modes, *descriptors, byref(size))
        return size.value

    def forward(
        self,
        *,
        x: int,
        z: int | None,
        y: int,
        scale: int,
        bias: int,
        running_mean: int,
        running_var: int,
        saved_mean: int,
        saved_inverse_std: int,
        workspace: int,
        reserve_space: int,
        stream: int,
    ) -> None:
        """Writes y, the saved statistics and the reserve space; updates the running statistics."""
        self._call("cudnnSetStream", self._handle, stream)
        self._call(
            "cudnnBatchNormalizationForwardTrainingEx",
            *(self._handle, *self._modes, *_ALPHA_AND_BETA),
            *(self._x, x, self._z, z, self._x, y),
            *(self._vector, scale, bias, self._average_factor, running_mean, running_var),
            *(self._epsilon, saved_mean, saved_inverse_std, self._activation),
            *(workspace, self.forward_workspace_bytes, reserve_space, self.reserve_space_bytes),
        )

    def backward(
        self,
        *,
        x: int,
        y: int,
        dy: int,
        dz: int | None,
        dx: int,
        scale: int,
        bias: int,
        dscale: int,
        dbias: int,
        saved_mean: int,
        saved_inverse_std: int,
        workspace: int,
        reserve_space: int,
        stream: int,
    ) -> None:
        """Writes dx, [dz], dscale and dbias."""
        self._call("cudnnSetStream", self._handle, stream)
        self._call(
            "cudnnBatchNormalizationBackwardEx",
            *(self._handle, *self._modes, *_ALPHA_AND_BETA, *_ALPHA_AND_BETA),
            *(self._x, x, self._y, None if self._y is None else y, self._x, dy),
            *(self._z, dz, self._x, dx),
            *(self._vector, scale, bias, dscale, dbias),
            *(self._epsilon, saved_mean, saved_inverse_std, self._activation),
            *(workspace, self.backward_workspace_bytes, reserve_space, self.reserve_space_bytes),
        )
