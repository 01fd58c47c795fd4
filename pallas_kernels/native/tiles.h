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

// Sums over `steps` words, for one or two blocks of 16 rows of operands and one or two columns of vectors, which lie
// `block_stride` and `column_stride` words apart. Operands lie as tiles do: 16 rows of 16 words, then the next 16 words.
// Sums of 16 vectors lie beside each other, those of the next row `sums_stride` later. Fetches as many vectors from
// `next` on meanwhile, unless it is null. Vectors are read past the first cache, as it were: the operands stay there, for
// the vectors after these.
inline void tile_product(const uint32_t* operands, int64_t block_stride, const uint32_t* vectors, int64_t column_stride,
                         int64_t steps, int64_t blocks, int64_t columns, const uint32_t* next, float* sums,
                         int64_t sums_stride) {
  const uint32_t* others = operands + block_stride;
  const auto run = [&]<int kBlocks, int kColumns>() {
    _tile_zero(0);
    if constexpr (kColumns > 1) _tile_zero(1);
    if constexpr (kBlocks > 1) _tile_zero(2);
    if constexpr (kBlocks > 1 && kColumns > 1) _tile_zero(3);
    for (int64_t step = 0; step < steps; step += kLanes) {
      if (next != nullptr) {
        const uint32_t* lines = next + step * kColumns * kLanes;
        for (int line = 0; line < kColumns * kLanes; ++line) __builtin_prefetch(lines + line * kLanes, 0, 2);
      }
      _tile_loadd(4, operands + step * kLanes, 64);
      _tile_stream_loadd(6, vectors + step * kLanes, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kColumns > 1) {
        _tile_stream_loadd(7, vectors + column_stride + step * kLanes, 64);
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
  if (blocks > 1) {
    columns > 1 ? run.template operator()<2, 2>() : run.template operator()<2, 1>();
  } else {
    columns > 1 ? run.template operator()<1, 2>() : run.template operator()<1, 1>();
  }
}

}  // namespace jpaged

#endif
