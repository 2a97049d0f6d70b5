// How a row is cut into pieces: one warp moves one piece at a time, held in registers as a whole.
#pragma once

#include "shared/types.h"

namespace moe_ep {

constexpr int kWarp = 32;
constexpr int kVectorsPerLane = 8;

struct RowShape {
  int64_t row_bytes;      // a multiple of 16
  int32_t vectors;        // 16-byte vectors of a row
  int32_t pieces;         // of a row
  int32_t piece_vectors;  // of every piece but the last, which may be shorter

  // Vectors of piece `index`.
  MOE_EP_HOST_DEVICE int32_t vectors_of(int32_t index) const {
    const int32_t left = vectors - index * piece_vectors;
    return left < piece_vectors ? left : piece_vectors;
  }
  MOE_EP_HOST_DEVICE int64_t offset_of(int32_t index) const {
    return static_cast<int64_t>(index) * piece_vectors * kVectorBytes;
  }
};

// In min_pieces pieces or more, where a row has that many vectors for each lane.
inline RowShape row_shape(int64_t row_bytes, int64_t min_pieces = 1) {
  RowShape shape{};
  shape.row_bytes = row_bytes;
  shape.vectors = static_cast<int32_t>(row_bytes / kVectorBytes);
  int64_t at_least = ceil_div(shape.vectors, kWarp * kVectorsPerLane);
  if (at_least < min_pieces) at_least = min64(min_pieces, ceil_div(shape.vectors, kWarp));
  shape.piece_vectors = static_cast<int32_t>(align_up(ceil_div(shape.vectors, at_least), kWarp));
  shape.pieces = static_cast<int32_t>(ceil_div(shape.vectors, shape.piece_vectors));
  return shape;
}

}  // namespace moe_ep
