// One rank's symmetric memory and the mappings of its peers'.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/memory_block.h"
#include "shared/symmetric_layout.h"

namespace moe_ep {

// Memory of this rank that its peers map. It never comes from a caching allocator, so that it can
// be shared whatever that allocator's settings are.
class SymmetricMemory {
 public:
  SymmetricMemory(int device, int rank, const SymmetricShape& shape, MemoryKind kind);
  // With a layout of the caller's: signals first, all before `rank_rows` starts at zero.
  SymmetricMemory(int device, int rank, const SymmetricShape& shape, const SymmetricLayout& layout,
                  MemoryKind kind);
  ~SymmetricMemory();
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  // What the peers need to map this rank's memory (see MemoryBlock); empty where there are none.
  std::string handle() const;
  // Maps the peers' memory. Returns one text per rank: empty, or why it cannot be mapped.
  std::vector<std::string> open(const std::vector<std::string>& handles);
  // Leaves this rank's mark in every peer's memory; returns what went wrong, per rank.
  std::vector<std::string> mark(Signal kind);
  // Looks for the mark of every peer in this rank's memory; returns what is missing, per rank.
  std::vector<std::string> missing_marks(Signal kind) const;
  // Unmaps the peers. A group barrier belongs between this and the destructor.
  void close();

  const SymmetricShape& shape() const { return shape_; }
  const SymmetricLayout& layout() const { return layout_; }
  char* peer(int rank) const { return blocks_[rank] == nullptr ? nullptr : blocks_[rank]->data(); }

 private:
  char* signal_word(Signal kind, int owner, int writer) const;

  int device_;
  int rank_;
  SymmetricShape shape_;
  MemoryKind kind_;
  SymmetricLayout layout_;
  std::vector<std::unique_ptr<MemoryBlock>> blocks_;  // by rank; of a peer once it is mapped
};

}  // namespace moe_ep
