// A rank's end of the exchange between hosts: launches the kernels that move rows along its rail.
// What happens within the host is its Communicator's.
#pragma once

#include <cstdint>

#include "runtime/communicator.h"
#include "shared/rail_view.h"

namespace moe_ep {

struct RailConfig {
  int device = 0;
  int host = 0;
  int num_hosts = 1;
  int local_rank = 0;
  int ranks_per_host = 1;
  int num_local_experts = 1;  // of a rank
  int num_slots = 1;          // K at most
  int max_row_bytes = 16;
  int max_scales = 0;
  int chunk_tokens = 1;  // of a rank, that move at once
};

// Device addresses and sizes of one chunk; 0 where there is no such tensor.
struct RailRows {
  uintptr_t status = 0;          // of the plan
  uintptr_t expert_of_slot = 0;  // int32 [T, K]
  uintptr_t x = 0;               // [T][row_bytes]
  uintptr_t scales = 0;          // float [T, num_scales]
  uintptr_t probs = 0;           // float [T, K]
  int64_t row_bytes = 0;
  int num_scales = 0;
  int64_t num_tokens = 0;   // T
  int64_t first_token = 0;  // of the chunk
};

struct RailSums {
  uintptr_t status = 0;
  uintptr_t expert_of_slot = 0;
  uintptr_t sums = 0;         // of the host, from RailExchange::sums
  uintptr_t values = 0;       // the same, from RailExchange::values
  uintptr_t out = 0;          // [T, H]
  uintptr_t slot_values = 0;  // float [T, K]
  int hidden = 0;
  int type = 0;  // DataType
  int64_t num_tokens = 0;
  int64_t first_token = 0;
};

// What was put to other hosts so far.
struct Border {
  uint64_t rows = 0;         // of tokens or sums
  uint64_t bytes = 0;        // of these rows with what goes with them
  uint64_t other_bytes = 0;  // expert ids and carried values
};

class RailExchange {
 public:
  explicit RailExchange(const RailConfig& config);
  ~RailExchange();
  RailExchange(const RailExchange&) = delete;
  RailExchange& operator=(const RailExchange&) = delete;

  // Bytes of a block of the NVSHMEM heap for `max_tokens` tokens of a rank.
  int64_t block_bytes(int64_t max_tokens) const;
  // A new, zeroed block: chunks are counted anew. All ranks in the same operation.
  void attach(uintptr_t heap, int64_t max_tokens);

  // Where Communicator::notify_hosts is to leave its verdict.
  uintptr_t verdict() const;
  // Where the host's sums of a chunk and the values carried with it belong.
  uintptr_t sums(int chunk) const;
  uintptr_t values(int chunk) const;

  // All asynchronous; see nvshmem/rail_kernels.h.
  void exchange_routing(const Communicator& comm, uintptr_t topk_idx, bool is_64_bit,
                        int64_t num_tokens, int num_slots, uintptr_t expert_of_slot,
                        uintptr_t host_topk, const Launch& launch);
  void agree(const Communicator& comm, const PlanView& plan, bool report, int64_t capacity,
             const Launch& launch);
  void fetch_chunks(const Communicator& comm, const PlanView& plan, int num_chunks, uintptr_t cuts,
                    uintptr_t chunk_headers, const Launch& launch);
  // Rows to FP8 e4m3 with one scale per 128 columns: q [T, hidden], scales [T, hidden/128].
  void quantize(uintptr_t x, int type, int64_t num_tokens, int hidden, bool power_of_two,
                uintptr_t q, uintptr_t scales, const Launch& launch);
  void send_rows(const Communicator& comm, const RailRows& rows, const Launch& launch);
  void stage_rows(const Communicator& comm, const PlanView& plan, const RailRows& rows,
                  const Launch& launch);
  void return_sums(const Communicator& comm, const PlanView& plan, const RailSums& sums,
                   const Launch& launch);
  void add_sums(const Communicator& comm, const RailSums& sums, const Launch& launch);

  // Waits for the device.
  Border border() const;

 private:
  RailShape shape(int64_t max_tokens) const;
  RailView view() const;

  RailConfig config_;
  RailControl* control_ = nullptr;
  char* heap_ = nullptr;
  int64_t max_tokens_ = 0;
};

}  // namespace moe_ep
