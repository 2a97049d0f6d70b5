// The arrays of a plan: the routing of one dispatch, in ordinary device memory of this rank.
#pragma once

#include "shared/types.h"

namespace moe_ep {

// Offsets in the plan's header, an int32 array. Begin arrays have one entry more than they name.
struct PlanHeader {
  int32_t num_rows;         // N, padding included
  int32_t num_rank_rows;    // M
  int32_t num_items;        // N without padding
  int32_t status;           // NotifyStatus
  int32_t rank_row_begin;   // [R+1] first rank row of each source rank
  int32_t item_begin;       // [R+1] first item of each source rank
  int32_t source_rank_row;  // [R] where our segment begins in that source's published rank rows
  int32_t source_item;      // [R] the same for its items
  int32_t expert_begin;     // [L+1] first row of each local expert's block
  int32_t expert_count;     // [L] rows of it that hold a token
  int32_t total;            // int32 words
};

MOE_EP_HOST_DEVICE PlanHeader plan_header(int32_t num_ranks, int32_t num_local_experts) {
  PlanHeader header{};
  header.num_rows = 0;
  header.num_rank_rows = 1;
  header.num_items = 2;
  header.status = 3;
  header.rank_row_begin = 4;
  header.item_begin = header.rank_row_begin + num_ranks + 1;
  header.source_rank_row = header.item_begin + num_ranks + 1;
  header.source_item = header.source_rank_row + num_ranks;
  header.expert_begin = header.source_item + num_ranks;
  header.expert_count = header.expert_begin + num_local_experts + 1;
  header.total = header.expert_count + num_local_experts;
  return header;
}

// Where the arrays of a plan lie in its memory, in int32 words.
struct PlanMemory {
  int64_t row_of_slot, num_partials, partial_slots, item_of_slot, rank_rows, items;
  int64_t total;
};

// rank_rows, items: elements of the lists; 0 where nobody knows yet how many there will be.
inline PlanMemory plan_memory(int64_t header_words, int64_t num_tokens, int32_t num_slots,
                              int32_t destinations, int64_t rank_rows, int64_t items) {
  int64_t end = header_words;
  auto take = [&end](int64_t words) {
    const int64_t begin = end;
    end += words;
    return begin;
  };
  PlanMemory memory{};
  memory.row_of_slot = take(num_tokens * num_slots);
  memory.num_partials = take(num_tokens);
  memory.partial_slots = take(num_tokens * destinations);
  memory.item_of_slot = take(num_tokens * num_slots);
  end = align_up(end, alignof(RankRow) / sizeof(int32_t));
  memory.rank_rows = take(rank_rows * static_cast<int64_t>(sizeof(RankRow) / sizeof(int32_t)));
  memory.items = take(items * static_cast<int64_t>(sizeof(Item) / sizeof(int32_t)));
  memory.total = end;
  return memory;
}

// A plan as the kernels see it. The first five arrays exist before the exchange of counts.
struct PlanView {
  int32_t* header;         // [plan_header().total]
  int32_t* row_of_slot;    // [T*K] row at the destination, -1 for unused slots
  int32_t* num_partials;   // [T] destination ranks of each token
  int32_t* partial_slots;  // [T*D] combine slots of a token's partial sums, by destination rank
  int32_t* item_of_slot;   // [T*K] index of the slot's item in what this rank published
  RankRow* rank_rows;      // [M] in order of source rank, then token
  Item* items;             // [N without padding], in order of their rank rows
  int64_t num_tokens;      // T
  int32_t num_slots;       // K
  int64_t rows_limit;      // rows the result has room for
};

}  // namespace moe_ep
