// Products by AMX tiles: 16 rows of operands, 16 words each, against 16 vectors.

#pragma once

#include "simd.h"

#if defined(JPAGED_TILES)

namespace jpaged {

// Tiles 0 to 3 hold sums. 4 and 5 hold operands, `rows` of them; 6 and 7 vectors of 16 words. With `words` less than 16
// tiles 5 and 7 are that much narrower than 4 and 6.
class TileShapes {
 public:
  explicit TileShapes(int64_t rows, int words = kLanes) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile : {0, 1, 2, 3, 4, 5}) shapes.rows[tile] = static_cast<uint8_t>(rows);
    shapes.rows[6] = kLanes;
    shapes.rows[7] = static_cast<uint8_t>(words);
    shapes.row_bytes[5] = static_cast<uint16_t>(4 * words);
    // GCC takes the instruction to read the first 8 bytes alone, and may leave out the writes of the others.
    asm volatile("" : : "m"(shapes));
    _tile_loadconfig(&shapes);
  }
  TileShapes(const TileShapes&) = delete;
  ~TileShapes() { _tile_release(); }
};

// One or two blocks of 16 rows of operands, `distance` words apart. They lie as tiles do: 16 rows of 16 words, then the
// next 16 words.
struct TileOperands {
  const uint32_t* data;
  int64_t distance, blocks;
};

// One or two columns of vectors, `distance` words apart; `is_new` if they have yet to come from memory.
struct TileVectors {
  const uint32_t* data;
  int64_t distance, columns;
  bool is_new;
};

constexpr int64_t kTileWordsAhead = 256;  // of a new column, that are fetched while others are multiplied

// Sums over `steps` words. Those of 16 vectors lie beside each other, those of the next row `sums_stride` later. Vectors
// are read past the first cache, as it were: the operands stay there, for the vectors after these.
inline void tile_product(const TileOperands& x, const TileVectors& vectors, int64_t steps, float* sums,
                         int64_t sums_stride) {
  const auto run = [&]<int kBlocks, int kColumns>() {
    const uint32_t *others = x.data + x.distance, *second = vectors.data + vectors.distance;
    _tile_zero(0);
    if constexpr (kColumns > 1) _tile_zero(1);
    if constexpr (kBlocks > 1) _tile_zero(2);
    if constexpr (kBlocks > 1 && kColumns > 1) _tile_zero(3);
    for (int64_t step = 0; step < steps; step += kLanes) {
      if (vectors.is_new) {
        const uint32_t* ahead = vectors.data + step * kLanes + kTileWordsAhead;
        for (int line = 0; line < kLanes; ++line) {
          __builtin_prefetch(ahead + line * kLanes, 0, 2);
          if constexpr (kColumns > 1) __builtin_prefetch(ahead + vectors.distance + line * kLanes, 0, 2);
        }
      }
      _tile_loadd(4, x.data + step * kLanes, 64);
      _tile_stream_loadd(6, vectors.data + step * kLanes, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kColumns > 1) {
        _tile_stream_loadd(7, second + step * kLanes, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kBlocks > 1) {
        _tile_loadd(5, others + step * kLanes, 64);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kColumns > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
    const int64_t sums_bytes = sums_stride * 4;
    float* other_sums = sums + kLanes * sums_stride;
    _tile_stored(0, sums, sums_bytes);
    if constexpr (kColumns > 1) _tile_stored(1, sums + kLanes, sums_bytes);
    if constexpr (kBlocks > 1) _tile_stored(2, other_sums, sums_bytes);
    if constexpr (kBlocks > 1 && kColumns > 1) _tile_stored(3, other_sums + kLanes, sums_bytes);
  };
  if (x.blocks > 1) {
    vectors.columns > 1 ? run.template operator()<2, 2>() : run.template operator()<2, 1>();
  } else {
    vectors.columns > 1 ? run.template operator()<1, 2>() : run.template operator()<1, 1>();
  }
}

}  // namespace jpaged

#endif
