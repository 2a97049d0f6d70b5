// peer_bandwidth [ROW_BYTES [ROWS [GPUS]]]: how fast the GPUs of this host read and write each
// other's memory, all at once, in JSON: by the copy engine, and by kernels of 8 to 64 blocks that
// pull (read from peers) or push (write to peers) rows as dispatch and combine do. GPUS may exceed
// the GPUs there are: then several share one, and "peers" are other buffers of the same memory.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "device/rows.cuh"

namespace moe_ep {
namespace {

constexpr int kThreads = 1024;
constexpr int kMaxPeers = 64;
constexpr int kIterations = 10;

struct Transfer {
  const char* source[kMaxPeers];
  char* target[kMaxPeers];
  int num_peers;
  int num_rows;  // to or from each peer
  int row_bytes;
};

// A warp copies a row at a time; neighbouring warps take the rows of different peers.
__global__ void __launch_bounds__(kThreads, 1)
    copy_rows(const __grid_constant__ Transfer transfer) {
  const int lane = threadIdx.x % kWarp;
  const int warp = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  const int num_warps = gridDim.x * kThreads / kWarp;
  const int vectors = transfer.row_bytes / kVectorBytes;
  for (int item = warp; item < transfer.num_rows * transfer.num_peers; item += num_warps) {
    const int peer = item % transfer.num_peers;
    const int64_t at = static_cast<int64_t>(item / transfer.num_peers) * transfer.row_bytes;
    for (int first = 0; first < vectors; first += kWarp * kVectorsPerLane) {
      const int64_t offset = at + static_cast<int64_t>(first) * kVectorBytes;
      Piece piece;
      load_piece(piece, transfer.source[peer] + offset, vectors - first, lane);
      store_piece(piece, transfer.target[peer] + offset, vectors - first, lane);
    }
  }
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "peer_bandwidth: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// One participant: a GPU with memory that peers read, memory that they write, and its own.
struct Member {
  int device;
  cudaStream_t stream;
  cudaEvent_t begin, end;
  char* read_by_peers;     // [num_rows]
  char* written_by_peers;  // [peers][num_rows]
  char* own;               // [peers][num_rows]
};

class Bench {
 public:
  Bench(int row_bytes, int num_rows, int num_members) : row_bytes_(row_bytes), num_rows_(num_rows) {
    int devices = 0;
    check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    members_.resize(num_members > 0 ? num_members : devices);
    for (int i = 0; i < size(); ++i) open(members_[i], i % devices, devices);
  }

  int size() const { return static_cast<int>(members_.size()); }

  // Bytes a second that each member moves to or from its peers, the slowest member's.
  template <typename Launch>
  double rate(const Launch& launch) {
    for (int i = 0; i < size(); ++i) on(i, [&] { launch(i); });  // warm-up
    synchronize();
    for (int i = 0; i < size(); ++i) {
      on(i, [&] {
        check(cudaEventRecord(members_[i].begin, members_[i].stream), "cudaEventRecord");
        for (int n = 0; n < kIterations; ++n) launch(i);
        check(cudaEventRecord(members_[i].end, members_[i].stream), "cudaEventRecord");
      });
    }
    synchronize();
    float slowest = 0;
    for (Member& m : members_) {
      float ms = 0;
      check(cudaEventElapsedTime(&ms, m.begin, m.end), "cudaEventElapsedTime");
      slowest = std::max(slowest, ms / kIterations);
    }
    return static_cast<double>(num_peers()) * bytes() / (slowest * 1e-3);
  }

  void copy_engine(int i) {
    for (int step = 1; step <= num_peers(); ++step) {
      const Member& peer = members_[(i + step) % size()];
      check(cudaMemcpyPeerAsync(slot(peer.written_by_peers, step), peer.device,
                                members_[i].read_by_peers, members_[i].device, bytes(),
                                members_[i].stream),
            "cudaMemcpyPeerAsync");
    }
  }

  void kernel(int i, int num_blocks, bool push) {
    Transfer transfer{};
    transfer.num_peers = num_peers();
    transfer.num_rows = num_rows_;
    transfer.row_bytes = row_bytes_;
    for (int step = 1; step <= num_peers(); ++step) {
      const Member& peer = members_[(i + step) % size()];
      transfer.source[step - 1] = push ? members_[i].read_by_peers : peer.read_by_peers;
      transfer.target[step - 1] = slot(push ? peer.written_by_peers : members_[i].own, step);
    }
    copy_rows<<<num_blocks, kThreads, 0, members_[i].stream>>>(transfer);
    check(cudaGetLastError(), "copy_rows");
  }

 private:
  int num_peers() const { return std::max(size() - 1, 1); }
  size_t bytes() const { return static_cast<size_t>(row_bytes_) * num_rows_; }
  char* slot(char* base, int step) const { return base + (step - 1) * bytes(); }

  template <typename Action>
  void on(int i, const Action& action) {
    check(cudaSetDevice(members_[i].device), "cudaSetDevice");
    action();
  }

  void synchronize() {
    for (int i = 0; i < size(); ++i) {
      on(i, [&] { check(cudaStreamSynchronize(members_[i].stream), "the copies"); });
    }
  }

  void open(Member& member, int device, int devices) {
    member.device = device;
    check(cudaSetDevice(device), "cudaSetDevice");
    for (int peer = 0; peer < devices; ++peer) {
      if (peer == device) continue;
      const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else if (status != cudaSuccess) {
        std::fprintf(stderr, "peer_bandwidth: GPU %d cannot reach GPU %d: %s\n", device, peer,
                     cudaGetErrorString(status));
        std::exit(1);
      }
    }
    check(cudaStreamCreateWithFlags(&member.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaEventCreate(&member.begin), "cudaEventCreate");
    check(cudaEventCreate(&member.end), "cudaEventCreate");
    check(cudaMalloc(&member.read_by_peers, bytes()), "cudaMalloc");
    check(cudaMalloc(&member.written_by_peers, bytes() * num_peers()), "cudaMalloc");
    check(cudaMalloc(&member.own, bytes() * num_peers()), "cudaMalloc");
    check(cudaMemset(member.read_by_peers, device + 1, bytes()), "cudaMemset");
  }

  std::vector<Member> members_;
  int row_bytes_, num_rows_;
};

int run(int row_bytes, int num_rows, int num_members) {
  Bench bench(row_bytes, num_rows, num_members);
  std::printf(
      "{\"gpus\": %d, \"row_bytes\": %d, \"rows_per_peer\": %d, \"unit\": \"GB/s per GPU\",\n",
      bench.size(), row_bytes, num_rows);
  std::printf(" \"copy_engine\": %.1f", bench.rate([&](int i) { bench.copy_engine(i); }) / 1e9);
  for (const bool push : {false, true}) {
    std::printf(",\n \"%s\": {", push ? "push" : "pull");
    const char* separator = "";
    for (const int blocks : {8, 16, 24, 32, 64}) {
      const double rate = bench.rate([&](int i) { bench.kernel(i, blocks, push); });
      std::printf("%s\"%d\": %.1f", separator, blocks, rate / 1e9);
      separator = ", ";
    }
    std::printf("}");
  }
  std::printf("}\n");
  return 0;
}

int number(int argc, char** argv, int index, int otherwise, int least, int most) {
  const int value = index < argc ? std::atoi(argv[index]) : otherwise;
  if (value < least || value > most) {
    std::fprintf(stderr, "peer_bandwidth: argument %d is %d; it must be %d to %d\n", index, value,
                 least, most);
    std::exit(2);
  }
  return value;
}

}  // namespace
}  // namespace moe_ep

int main(int argc, char** argv) {
  using moe_ep::number;
  const int row_bytes = number(argc, argv, 1, 14336, 16, 1 << 20) / 16 * 16;
  const int num_rows = number(argc, argv, 2, 2048, 1, 1 << 20);
  return moe_ep::run(row_bytes, num_rows, number(argc, argv, 3, 0, 0, moe_ep::kMaxPeers));
}
