#include "nvshmem/host.h"

#include <cuda_runtime.h>
#include <nvshmem_host.h>

#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>

#include "nvshmem/ping.h"
#include "runtime/error.h"
#include "shared/types.h"

namespace moe_ep {
namespace {

constexpr int kAlignment = 256;

// What NVSHMEM itself keeps per process.
struct World {
  std::string members;  // of the first start; empty before
  int users = 0;
  bool stuck = false;  // a call has not come back
};

World& world() {
  static World only;
  return only;
}

// Runs `call` on a thread of its own, which is left behind if it takes longer than `timeout_s`.
template <typename T, typename Call>
std::optional<T> bounded(double timeout_s, Call call) {
  if (world().stuck) {
    throw std::runtime_error(
        "an earlier NVSHMEM call of this process has not come back; the process must be restarted");
  }
  auto task = std::make_shared<std::packaged_task<T()>>(std::move(call));
  std::future<T> result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  if (result.wait_for(std::chrono::duration<double>(timeout_s)) != std::future_status::ready) {
    world().stuck = true;
    return std::nullopt;
  }
  return result.get();
}

std::string version_text(int major, int minor, int patch) {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

int initialize(int device, int rank, int num_ranks, const std::string& unique_id) {
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  std::memcpy(&id, unique_id.data(), unique_id.size());
  int status = nvshmemx_set_attr_uniqueid_args(rank, num_ranks, &id, &attributes);
  if (status != 0) return status;
  // nvshmemx_init_attr() would do the same, but it ends the process where this returns a status.
  const nvshmemi_version_t version{NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                   NVSHMEM_VENDOR_PATCH_VERSION};
  int provided = 0;
  return nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, NVSHMEMX_INIT_WITH_UNIQUEID,
                              &attributes, version);
}

void check_world(int rank, int num_ranks) {
  if (nvshmem_my_pe() == rank && nvshmem_n_pes() == num_ranks) return;
  throw std::runtime_error("NVSHMEM says that this is PE " + std::to_string(nvshmem_my_pe()) +
                           " of " + std::to_string(nvshmem_n_pes()) + "; it is rank " +
                           std::to_string(rank) + " of " + std::to_string(num_ranks));
}

PingArgs ping_args(uintptr_t block, int rank, int num_ranks) {
  PingArgs args{};
  args.signals = reinterpret_cast<uint64_t*>(block);
  args.inbox = args.signals + align_up(num_ranks, kAlignment / sizeof(uint64_t));
  args.outbox = args.inbox + num_ranks * (kPingBytes / sizeof(uint64_t));
  args.rank = rank;
  args.num_ranks = num_ranks;
  return args;
}

std::vector<uint64_t> read_words(const uint64_t* device_words, size_t count) {
  std::vector<uint64_t> words(count);
  check_cuda(cudaMemcpy(words.data(), device_words, count * sizeof(uint64_t), cudaMemcpyDefault),
             "cudaMemcpy");
  return words;
}

}  // namespace

std::string compiled_nvshmem_version() {
  return version_text(NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                      NVSHMEM_VENDOR_PATCH_VERSION);
}

std::string loaded_nvshmem_version() {
  int major = 0, minor = 0, patch = 0;
  nvshmemx_vendor_get_version_info(&major, &minor, &patch);
  return version_text(major, minor, patch);
}

std::string nvshmem_members() { return world().members; }

bool nvshmem_is_running() { return world().users > 0; }

int network_write_order(int device) {
  int order = 0;
  check_cuda(cudaDeviceGetAttribute(&order, cudaDevAttrGPUDirectRDMAWritesOrdering, device),
             "cudaDeviceGetAttribute");
  return order;
}

std::string nvshmem_unique_id() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (nvshmemx_get_uniqueid(&id) != 0) {
    throw std::runtime_error("nvshmemx_get_uniqueid failed; NVSHMEM_DEBUG=INFO says why");
  }
  return std::string(reinterpret_cast<const char*>(&id), sizeof(id));
}

NvshmemHost::NvshmemHost(int device, int rank, int num_ranks, const std::string& members)
    : device_(device), rank_(rank), num_ranks_(num_ranks), members_(members) {
  if (!world().members.empty() && world().members != members) {
    throw std::invalid_argument("NVSHMEM of this process spans " + world().members +
                                " until it ends; it cannot span " + members);
  }
}

bool NvshmemHost::start(const std::string& unique_id, double timeout_s) {
  if (world().users == 0) {
    if (unique_id.size() != sizeof(nvshmemx_uniqueid_t)) {
      throw std::invalid_argument("a unique id of " + std::to_string(unique_id.size()) +
                                  " bytes; NVSHMEM's have " +
                                  std::to_string(sizeof(nvshmemx_uniqueid_t)));
    }
    world().members = members_;
    const int device = device_, rank = rank_, num_ranks = num_ranks_;
    const auto status = bounded<int>(timeout_s, [device, rank, num_ranks, unique_id] {
      return initialize(device, rank, num_ranks, unique_id);
    });
    if (!status) return false;
    if (*status != 0) {
      throw std::runtime_error("NVSHMEM " + loaded_nvshmem_version() +
                               " could not be initialised (status " + std::to_string(*status) +
                               "); NVSHMEM_DEBUG=INFO says why");
    }
    check_world(rank_, num_ranks_);
  }
  world().users += 1;
  started_ = true;
  return true;
}

std::optional<uintptr_t> NvshmemHost::allocate(int64_t bytes, double timeout_s) {
  const int device = device_;
  return bounded<uintptr_t>(timeout_s, [device, bytes] {
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    void* memory = nvshmem_align(kAlignment, bytes);
    if (memory == nullptr) {
      throw std::runtime_error("NVSHMEM has no symmetric memory of " + std::to_string(bytes) +
                               " bytes; NVSHMEM_SYMMETRIC_SIZE bounds it where the GPU has no "
                               "virtual memory management");
    }
    check_cuda(cudaMemset(memory, 0, bytes), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return reinterpret_cast<uintptr_t>(memory);
  });
}

bool NvshmemHost::free(uintptr_t address, double timeout_s) {
  const int device = device_;
  return bounded<int>(timeout_s,
                      [device, address] {
                        check_cuda(cudaSetDevice(device), "cudaSetDevice");
                        nvshmem_free(reinterpret_cast<void*>(address));
                        return 0;
                      })
      .has_value();
}

uintptr_t NvshmemHost::peer_address(uintptr_t address, int rank) const {
  return reinterpret_cast<uintptr_t>(nvshmem_ptr(reinterpret_cast<void*>(address), rank));
}

bool NvshmemHost::finish(double timeout_s) {
  if (!started_) return true;
  started_ = false;
  world().users -= 1;
  if (world().users > 0) return true;
  const int device = device_;
  return bounded<int>(timeout_s,
                      [device] {
                        check_cuda(cudaSetDevice(device), "cudaSetDevice");
                        nvshmemi_finalize();
                        return 0;
                      })
      .has_value();
}

int64_t NvshmemHost::ping_block_bytes() const {
  const PingArgs args = ping_args(0, rank_, num_ranks_);
  return reinterpret_cast<int64_t>(args.outbox) + kPingBytes;
}

bool NvshmemHost::ping(uintptr_t block, uint64_t number, double timeout_s) {
  const int device = device_;
  PingArgs args = ping_args(block, rank_, num_ranks_);
  args.number = number;
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  check_cuda(cudaDeviceSynchronize(), "work before the ping kernel");
  // The kernel waits until its messages have arrived, for as long as the transport takes.
  return bounded<int>(timeout_s,
                      [device, args] {
                        check_cuda(cudaSetDevice(device), "cudaSetDevice");
                        check_cuda(launch_ping(args, nullptr), "ping kernel");
                        check_cuda(cudaStreamSynchronize(nullptr), "ping kernel");
                        return 0;
                      })
      .has_value();
}

bool NvshmemHost::gpu_sends() const {
  bool answer = false;
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  check_cuda(read_gpu_sends(&answer), "NVSHMEM's device state");
  return answer;
}

std::vector<int> NvshmemHost::missing_pings(uintptr_t block, uint64_t number) const {
  constexpr size_t kWords = kPingBytes / sizeof(uint64_t);
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  const PingArgs args = ping_args(block, rank_, num_ranks_);
  const std::vector<uint64_t> signals = read_words(args.signals, num_ranks_);  // before the payload
  const std::vector<uint64_t> inbox = read_words(args.inbox, num_ranks_ * kWords);
  std::vector<int> missing;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    bool arrived = signals[peer] >= number;
    for (size_t i = 0; arrived && i < kWords; ++i) {
      arrived = inbox[peer * kWords + i] >= ping_word(peer, number);
    }
    if (!arrived) missing.push_back(peer);
  }
  return missing;
}

}  // namespace moe_ep
