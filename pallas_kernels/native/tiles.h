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
    _tile_loadconfig(&shapes);
  }
  TileShapes(const TileShapes&) = delete;
  ~TileShapes() { _tile_release(); }
};

// sums[2 * block + column][row][lane] over `steps` words, for one or two blocks of 16 rows of operands and one or two
// columns of vectors, which lie `column_stride` words apart. Fetches the operands after these meanwhile, from `next` on,
// unless it is null: in the order of memory, which keeps more reads going than the order of use.
inline void tile_product(const uint32_t* operands, int64_t operand_stride, const uint32_t* vectors,
                         int64_t column_stride, int64_t steps, int64_t blocks, int64_t columns, const uint32_t* next,
                         float* sums) {
  const int64_t operand_bytes = operand_stride * 4;
  const uint32_t* others = operands + kLanes * operand_stride;
  const auto run = [&]<int kBlocks, int kColumns>() {
    _tile_zero(0);
    if constexpr (kColumns > 1) _tile_zero(1);
    if constexpr (kBlocks > 1) _tile_zero(2);
    if constexpr (kBlocks > 1 && kColumns > 1) _tile_zero(3);
    for (int64_t step = 0; step < steps; step += kLanes) {
      if (next != nullptr) {
        const uint32_t* lines = next + step * kBlocks * kLanes;
        for (int line = 0; line < kBlocks * kLanes; ++line) __builtin_prefetch(lines + line * kLanes, 0, 2);
      }
      _tile_loadd(4, operands + step, operand_bytes);
      _tile_loadd(6, vectors + step * kLanes, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kColumns > 1) {
        _tile_loadd(7, vectors + column_stride + step * kLanes, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kBlocks > 1) {
        _tile_loadd(5, others + step, operand_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kColumns > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
    constexpr int kTile = kLanes * kLanes;
    _tile_stored(0, sums, 64);
    if constexpr (kColumns > 1) _tile_stored(1, sums + kTile, 64);
    if constexpr (kBlocks > 1) _tile_stored(2, sums + 2 * kTile, 64);
    if constexpr (kBlocks > 1 && kColumns > 1) _tile_stored(3, sums + 3 * kTile, 64);
  };
  if (blocks > 1) {
    columns > 1 ? run.template operator()<2, 2>() : run.template operator()<2, 1>();
  } else {
    columns > 1 ? run.template operator()<1, 2>() : run.template operator()<1, 1>();
  }
}

}  // namespace jpaged

#endif
