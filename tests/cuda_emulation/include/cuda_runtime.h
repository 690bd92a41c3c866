// Stands in for CUDA's header of the same name; see cuda_emulation.h.

#ifndef CUDA_EMULATION_CUDA_RUNTIME_H_
#define CUDA_EMULATION_CUDA_RUNTIME_H_

#include "cuda_emulation.h"
#include "cuda_emulation/arithmetic.h"
#include "cuda_emulation/atomics.h"
#include "cuda_emulation/launch.h"
#include "cuda_emulation/memory.h"
#include "cuda_emulation/qualifiers.h"
#include "cuda_emulation/runtime_api.h"
#include "cuda_emulation/synchronization.h"
#include "cuda_emulation/vector_types.h"

#endif  // CUDA_EMULATION_CUDA_RUNTIME_H_
