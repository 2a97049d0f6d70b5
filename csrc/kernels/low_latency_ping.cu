// How long a signal takes there and back: a word in a peer's memory, answered by one in this
// rank's.
#include "kernels/low_latency_signals.cuh"

namespace moe_ep {
namespace {

// By one thread. The round before those that count waits until the peer is there.
__global__ void low_latency_ping_kernel(const __grid_constant__ LowLatencyView view, int peer,
                                        uint64_t first, int rounds, int64_t* nanoseconds) {
  const CommView& comm = view.comm;
  if (is_aborted(comm)) return;
  uint64_t* theirs = word_at(view, peer, view.layout.pings, comm.rank);
  const uint64_t* own = word_at(view, comm.rank, view.layout.pings, peer);
  const bool begins = comm.rank < peer;
  uint64_t start = 0;
  for (int i = 0; i <= rounds; ++i) {
    if (i == 1) start = ptx::global_nanoseconds();
    const uint64_t number = first + i;
    if (begins) release_word<OneHost>(view, theirs, number);
    uint64_t seen;
    const auto look = [&] {
      seen = ptx::load_acquire_system(own);
      return seen >= number;
    };
    const auto report = [&] { record_fault(comm, peer, kPhasePing, i, number, seen); };
    if (!poll(comm, look, report)) return;
    if (!begins) release_word<OneHost>(view, theirs, number);
  }
  *nanoseconds = static_cast<int64_t>(ptx::global_nanoseconds() - start) / rounds;
}

}  // namespace

cudaError_t launch_low_latency_ping(const LowLatencyView& view, int peer, uint64_t first,
                                    int rounds, int64_t* nanoseconds, cudaStream_t stream) {
  low_latency_ping_kernel<<<1, 1, 0, stream>>>(view, peer, first, rounds, nanoseconds);
  return cudaGetLastError();
}

}  // namespace moe_ep
