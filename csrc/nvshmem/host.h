// NVSHMEM as the runtime of one process: versions, the world of its ranks, symmetric memory.
//
// NVSHMEM is one per process. It can be finalised and initialised again, but not with other ranks:
// with 3.4.5 that has ended in a segmentation fault. So what the objects below share is kept in one
// place, in host.cc, and nowhere else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moe_ep {

// "3.4.5": of the headers and of the device library that this module was compiled and linked with;
// of the host library that the process has loaded.
std::string compiled_nvshmem_version();
std::string loaded_nvshmem_version();

// The ranks that NVSHMEM spans in this process until it ends, as given to the NvshmemHost that
// started it first; empty before. Whether somebody uses it now.
std::string nvshmem_members();
bool nvshmem_is_running();

// Which GPUs see in order what a network card writes into the memory of `device`: 0 none, 100 the
// device itself, 200 all (cudaGPUDirectRDMAWritesOrdering).
int network_write_order(int device);

// What one rank makes and every rank passes to NvshmemHost::start, anew for each initialisation.
std::string nvshmem_unique_id();

// One user of NVSHMEM in this process; several over the same ranks share it. Every collective call
// runs on a thread of its own and is bounded: where it does not come back, it returns false (or no
// value), its thread is left behind and NVSHMEM is not called by this process again.
class NvshmemHost {
 public:
  // members: any text that is equal in all objects over the same ranks in the same order.
  // Throws std::invalid_argument where NVSHMEM spans others in this process.
  NvshmemHost(int device, int rank, int num_ranks, const std::string& members);
  NvshmemHost(const NvshmemHost&) = delete;
  NvshmemHost& operator=(const NvshmemHost&) = delete;

  // Collective; initialises NVSHMEM if nobody uses it yet. Throws std::runtime_error where it
  // reports an error.
  bool start(const std::string& unique_id, double timeout_s);
  // Collective: zeroed symmetric memory, aligned to 256 bytes. A group barrier belongs between this
  // and its first use by a peer.
  std::optional<uintptr_t> allocate(int64_t bytes, double timeout_s);
  // Collective; nobody may use the memory any more.
  bool free(uintptr_t address, double timeout_s);
  // Where this process can load and store rank's copy of symmetric memory; 0 where it cannot.
  uintptr_t peer_address(uintptr_t address, int rank) const;
  // Collective: leaves NVSHMEM, which is finalised once nobody uses it.
  bool finish(double timeout_s);

  // A put with signal to every rank. `number` must grow from call to call. False: the transport has
  // not taken the messages in time.
  bool ping(uintptr_t block, uint64_t number, double timeout_s);
  // The ranks whose ping `number` (or a later one) has not arrived, payload included.
  std::vector<int> missing_pings(uintptr_t block, uint64_t number) const;
  // Bytes of the symmetric block that pings need.
  int64_t ping_block_bytes() const;

  // Whether the GPU hands its messages to the network itself (IBGDA).
  bool gpu_sends() const;

 private:
  int device_, rank_, num_ranks_;
  std::string members_;
  bool started_ = false;
};

}  // namespace moe_ep
