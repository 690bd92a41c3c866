# Builds the CUDA kernels if there is a compiler for them. Sets JAX_BNAR_HAS_CUDA and, if that
# is OFF, JAX_BNAR_WHY_NO_CUDA; otherwise JAX_BNAR_CUDA_PTX, the architectures of the PTX.

set(JAX_BNAR_CUDA AUTO CACHE STRING
    "CUDA kernels: AUTO (for a GPU or architectures, if nvcc works), ON (or fail), OFF, ONLY")
set_property(CACHE JAX_BNAR_CUDA PROPERTY STRINGS AUTO ON OFF ONLY)
if(NOT JAX_BNAR_CUDA MATCHES "^(AUTO|ON|OFF|ONLY)$")
  message(FATAL_ERROR "jax_bnar: JAX_BNAR_CUDA must be AUTO, ON, OFF or ONLY (the "
    "module of the CUDA kernels alone), got '${JAX_BNAR_CUDA}'.")
endif()
set(JAX_BNAR_HAS_CUDA OFF)
set(JAX_BNAR_WHY_NO_CUDA "")
if(JAX_BNAR_CUDA STREQUAL "OFF")
  set(JAX_BNAR_WHY_NO_CUDA "it was built with JAX_BNAR_CUDA=OFF")
  return()
endif()
set(bnar_cuda_required OFF)
if(JAX_BNAR_CUDA MATCHES "^(ON|ONLY)$")
  set(bnar_cuda_required ON)
elseif(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  # Compiling the kernels takes minutes, so AUTO builds them only on a machine with a GPU,
  # or if the architectures are named.
  execute_process(COMMAND nvidia-smi -L RESULT_VARIABLE failed
    OUTPUT_QUIET ERROR_QUIET)
  if(failed AND NOT EXISTS /proc/driver/nvidia/version)
    set(JAX_BNAR_WHY_NO_CUDA "no NVIDIA GPU was found when it was built")
    message(STATUS "jax_bnar: no CUDA kernels, ${JAX_BNAR_WHY_NO_CUDA}; "
      "JAX_BNAR_CUDA=ON builds them anyway")
    return()
  endif()
endif()

# nvcc comes from a toolkit, or from the CUDA 13 wheels (nvidia-cuda-nvcc and
# others), which all install into nvidia/cu13.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(bnar_nvcc nvcc PATHS ENV CUDA_PATH ENV CUDA_HOME /usr/local/cuda
    PATH_SUFFIXES bin)
  if(NOT bnar_nvcc)
    find_package(Python 3.11 COMPONENTS Interpreter QUIET)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
        "import importlib.util as u; s = u.find_spec('nvidia'); print(';'.join(s.submodule_search_locations) if s else '')"
      OUTPUT_VARIABLE nvidia_wheels OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_program(bnar_nvcc nvcc PATHS ${nvidia_wheels}
      PATH_SUFFIXES cu13/bin cuda_nvcc/bin NO_DEFAULT_PATH)
  endif()
  if(bnar_nvcc)
    # check_language, below, tries what this names, but not what CMAKE_CUDA_COMPILER does.
    set(ENV{CUDACXX} "${bnar_nvcc}")
  endif()
endif()

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  # Machine code for Ampere, Hopper and both Blackwells, and PTX for later GPUs.
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real 120)
  # nvcc itself would only say that it does not know an architecture.
  if(CMAKE_CUDA_COMPILER)
    set(bnar_nvcc "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX})
    set(bnar_nvcc "$ENV{CUDACXX}")
  endif()
  execute_process(COMMAND "${bnar_nvcc}" --version
    OUTPUT_VARIABLE bnar_nvcc_version ERROR_QUIET)
  if(bnar_nvcc_version MATCHES "release ([0-9.]+)" AND CMAKE_MATCH_1 VERSION_LESS 12.8)
    set(JAX_BNAR_WHY_NO_CUDA "nvcc was of CUDA ${CMAKE_MATCH_1} when it was built, and 12.8 \
is the first that knows the architectures 10.0 and 12.0")
    if(bnar_cuda_required)
      message(FATAL_ERROR "jax_bnar: ${bnar_nvcc} is of CUDA ${CMAKE_MATCH_1}, and 12.8 is "
        "the first that knows the architectures 10.0 and 12.0. Install a newer one, or name "
        "the architectures: CUDAARCHS='80-real;90'.")
    endif()
    message(STATUS "jax_bnar: no CUDA kernels, ${JAX_BNAR_WHY_NO_CUDA}")
    return()
  endif()
endif()
if(bnar_cuda_required)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    message(FATAL_ERROR "jax_bnar: JAX_BNAR_CUDA=${JAX_BNAR_CUDA}, but nvcc was not "
      "found on PATH, in CUDA_PATH, CUDA_HOME or /usr/local/cuda, or among the Python "
      "packages of ${Python_EXECUTABLE}. Install the CUDA toolkit (12.8 or "
      "newer), or `pip install nvidia-cuda-nvcc nvidia-cuda-runtime "
      "nvidia-cuda-cccl` and build with --no-build-isolation, or set CUDACXX.")
  endif()
  enable_language(CUDA)
else()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(JAX_BNAR_WHY_NO_CUDA "no working nvcc was found when it was built")
    message(STATUS "jax_bnar: no CUDA kernels, ${JAX_BNAR_WHY_NO_CUDA}")
    return()
  endif()
  enable_language(CUDA)
endif()
# FindCUDAToolkit does not support the layout of the wheels, so the runtime is
# searched for by hand.
get_filename_component(bnar_nvcc_path "${CMAKE_CUDA_COMPILER}" REALPATH)
get_filename_component(bnar_cuda_root "${bnar_nvcc_path}/../.." REALPATH)
find_library(bnar_cudart_static cudart_static
  HINTS "${bnar_cuda_root}" ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES}
  PATH_SUFFIXES lib64 lib targets/${CMAKE_SYSTEM_PROCESSOR}-linux/lib)
if(NOT bnar_cudart_static)
  set(JAX_BNAR_WHY_NO_CUDA
    "nvcc was found when it was built, but not the static CUDA runtime")
  if(bnar_cuda_required)
    message(FATAL_ERROR "jax_bnar: JAX_BNAR_CUDA=${JAX_BNAR_CUDA} and "
      "${CMAKE_CUDA_COMPILER} works, but libcudart_static.a was not found in "
      "${bnar_cuda_root}. Install "
      "cuda-cudart-dev, or `pip install nvidia-cuda-runtime`.")
  endif()
  message(STATUS "jax_bnar: no CUDA kernels, ${JAX_BNAR_WHY_NO_CUDA}")
  return()
endif()
set(JAX_BNAR_HAS_CUDA ON)
message(STATUS "jax_bnar: CUDA kernels with ${CMAKE_CUDA_COMPILER} "
  "${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}, several minutes of one "
  "core for each; JAX_BNAR_CUDA=OFF leaves them out")

# PTX is written for the architectures without a suffix and those with "-virtual". "all" and
# "all-major" write it for the newest major version that nvcc knows, and "native" writes none.
set(JAX_BNAR_CUDA_PTX "")
foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
  if(architecture MATCHES "^([0-9]+)(-virtual)?$")
    list(APPEND JAX_BNAR_CUDA_PTX ${CMAKE_MATCH_1})
  elseif(architecture MATCHES "^all" AND CMAKE_CUDA_ARCHITECTURES_ALL_MAJOR)
    list(GET CMAKE_CUDA_ARCHITECTURES_ALL_MAJOR -1 newest)
    list(APPEND JAX_BNAR_CUDA_PTX ${newest})
  endif()
endforeach()
list(JOIN JAX_BNAR_CUDA_PTX "," JAX_BNAR_CUDA_PTX)

set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
include(cmake/CudaSources.cmake)
add_library(bnar_cuda STATIC
  ${BNAR_CUDA_KERNELS} ${BNAR_CUDA_HOST} cuda/launch/build_info.cu)
target_include_directories(bnar_cuda PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_include_directories(bnar_cuda SYSTEM PUBLIC
  ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
# The runtime is linked statically, so that the module also loads on machines without
# CUDA. CMake must not add a second runtime to it.
set_target_properties(bnar_cuda PROPERTIES CUDA_RUNTIME_LIBRARY None)
target_link_libraries(bnar_cuda PUBLIC
  "${bnar_cudart_static}" Threads::Threads ${CMAKE_DL_LIBS} rt)
target_compile_options(bnar_cuda PRIVATE
  # A kernel that spills registers spends memory bandwidth on its own temporaries.
  "$<$<COMPILE_LANGUAGE:CUDA>:-O3;-Xcompiler=-Wall,-Wextra;-Xptxas=-v,-warn-spills>"
  "$<$<COMPILE_LANGUAGE:CXX>:-O2;-Wall;-Wextra>")
if(CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
  # For this machine only, as `make gpu` builds them: line numbers let a profiler point at
  # the source. They do not change the code, but would make wheels three times as large.
  target_compile_options(bnar_cuda PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>")
endif()
if(JAX_BNAR_WARNINGS_AS_ERRORS)
  target_compile_options(bnar_cuda PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror;-Xptxas=-Werror>"
    "$<$<COMPILE_LANGUAGE:CXX>:-Werror>")
endif()
