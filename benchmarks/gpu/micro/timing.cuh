// Times what is enqueued on a stream, by events, in microseconds.

#ifndef JAX_BNAR_BENCHMARKS_GPU_MICRO_TIMING_CUH_
#define JAX_BNAR_BENCHMARKS_GPU_MICRO_TIMING_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace jax_bnar {
namespace micro {

// Ends the program with what failed. A microbenchmark has nothing to clean up.
inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

class Stopwatch {
 public:
  Stopwatch() {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    Check(cudaEventCreate(&begin_), "event");
    Check(cudaEventCreate(&end_), "event");
  }
  Stopwatch(const Stopwatch&) = delete;

  cudaStream_t stream() const { return stream_; }

  // The median of `repeats` times of what timed() enqueues. before() comes
  // before each, and does not count.
  template <typename Before, typename Timed>
  double Median(int repeats, Before before, Timed timed) const {
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) {
      before();
      Check(cudaEventRecord(begin_, stream_), "event");
      timed();
      Check(cudaEventRecord(end_, stream_), "event");
      Check(cudaEventSynchronize(end_), "what is timed");
      float milliseconds = 0;
      Check(cudaEventElapsedTime(&milliseconds, begin_, end_), "event");
      times.push_back(1e3 * milliseconds);
    }
    std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
    return times[static_cast<size_t>(repeats) / 2];
  }
  template <typename Timed>
  double Median(int repeats, Timed timed) const {
    timed();  // The first time, code is loaded.
    return Median(repeats, [] {}, timed);
  }

  // The time of one of `launches` launches in a CUDA graph.
  template <typename Launch>
  double OfGraph(int launches, Launch launch) const {
    launch();
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
          "capture");
    for (int i = 0; i < launches; ++i) launch();
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    Check(cudaStreamEndCapture(stream_, &graph), "capture");
    Check(cudaGraphInstantiate(&executable, graph, 0), "graph");
    const double time = Median(
        20, [&] { Check(cudaGraphLaunch(executable, stream_), "graph"); });
    Check(cudaGraphExecDestroy(executable), "graph");
    Check(cudaGraphDestroy(graph), "graph");
    return time / launches;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_;
  cudaEvent_t end_;
};

}  // namespace micro
}  // namespace jax_bnar

#endif  // JAX_BNAR_BENCHMARKS_GPU_MICRO_TIMING_CUH_
