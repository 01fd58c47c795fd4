// Products by AMX tiles: 16 rows of operands, 16 words each, against 16 vectors.

#pragma once

#include "simd.h"

#if defined(JPAGED_TILES)

namespace jpaged {

// Tiles 0 to 3 hold sums and 4 operands, `rows` of them; 6 the vectors of 16 words. 5 and 7 are the same as 4 and 6 for
// 8 words.
class TileShapes {
 public:
  explicit TileShapes(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 32, 64, 64};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile : {0, 1, 2, 3, 4, 5}) shapes.rows[tile] = static_cast<uint8_t>(rows);
    shapes.rows[6] = 16;
    shapes.rows[7] = 8;
    _tile_loadconfig(&shapes);
  }
  TileShapes(const TileShapes&) = delete;
  ~TileShapes() { _tile_release(); }
};

// sums[column][row][lane] over `steps` words, for 16 rows of operands and up to 4 columns of vectors, which lie
// `column_stride` words apart. Fetches `next` from memory meanwhile, as many operands again, unless it is null.
inline void tile_product(const uint32_t* operands, int64_t operand_stride, const uint32_t* vectors,
                         int64_t column_stride, int64_t steps, int64_t columns, const uint32_t* next, float* sums) {
  const int64_t operand_bytes = operand_stride * 4;
  const auto run = [&]<int kColumns>() {
    _tile_zero(0);
    if constexpr (kColumns > 1) _tile_zero(1);
    if constexpr (kColumns > 2) _tile_zero(2);
    if constexpr (kColumns > 3) _tile_zero(3);
    for (int64_t step = 0; step < steps; step += 16) {
      if (next != nullptr) {
        for (int row = 0; row < 16; ++row) __builtin_prefetch(next + row * operand_stride + step);
      }
      _tile_loadd(4, operands + step, operand_bytes);
      const uint32_t* source = vectors + step * kLanes;
      _tile_loadd(6, source, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kColumns > 1) {
        _tile_loadd(6, source + column_stride, 64);
        _tile_dpbf16ps(1, 4, 6);
      }
      if constexpr (kColumns > 2) {
        _tile_loadd(6, source + 2 * column_stride, 64);
        _tile_dpbf16ps(2, 4, 6);
      }
      if constexpr (kColumns > 3) {
        _tile_loadd(6, source + 3 * column_stride, 64);
        _tile_dpbf16ps(3, 4, 6);
      }
    }
    constexpr int kTile = kLanes * kLanes;
    _tile_stored(0, sums, 64);
    if constexpr (kColumns > 1) _tile_stored(1, sums + kTile, 64);
    if constexpr (kColumns > 2) _tile_stored(2, sums + 2 * kTile, 64);
    if constexpr (kColumns > 3) _tile_stored(3, sums + 3 * kTile, 64);
  };
  switch (columns) {
    case 1: return run.template operator()<1>();
    case 2: return run.template operator()<2>();
    case 3: return run.template operator()<3>();
    default: return run.template operator()<4>();
  }
}

}  // namespace jpaged

#endif
