// What one call of paged attention is asked for, and how the work is cut into units.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged::attention {

namespace ffi = xla::ffi;

constexpr int kBlock = kLanes;       // KV tokens of a block
constexpr int kTileRows = 48;        // rows of a tile, unless one token has more
constexpr int kMaxChunkBlocks = 16;  // blocks of a chunk
constexpr int64_t kSharedTokens = kMaxChunkBlocks * kBlock;  // what is shared counts in chunks

// A matrix of T tokens as XLA gives it: float32 or bfloat16.
struct Tokens {
  void* data;
  bool is_bf16;

  static Tokens of(const ffi::AnyBuffer& buffer) {
    return {buffer.untyped_data(), buffer.element_type() == ffi::DataType::BF16};
  }

  void read(int64_t first, int64_t count, float* target) const {
    if (is_bf16) {
      const uint16_t* source = static_cast<const uint16_t*>(data) + first;
      for (int64_t i = 0; i < count; ++i) target[i] = widen(source[i]);
    } else {
      memcpy(target, static_cast<const float*>(data) + first, count * sizeof(float));
    }
  }

  void read(int64_t first, int64_t count, uint16_t* target) const {
    if (is_bf16) {
      memcpy(target, static_cast<const uint16_t*>(data) + first, count * sizeof(uint16_t));
    } else {
      const float* source = static_cast<const float*>(data) + first;
      for (int64_t i = 0; i < count; ++i) target[i] = narrow(source[i]);
    }
  }

  // Writes factor * source.
  void write(int64_t first, int64_t count, const float* source, float factor) const {
    if (is_bf16) {
      uint16_t* target = static_cast<uint16_t*>(data) + first;
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) store(target + i, narrow(load<Floats>(source + i) * factor));
      for (; i < count; ++i) target[i] = narrow(source[i] * factor);
    } else {
      float* target = static_cast<float*>(data) + first;
      for (int64_t i = 0; i < count; ++i) target[i] = source[i] * factor;
    }
  }

  void clear(int64_t first, int64_t count) const {
    const size_t size = is_bf16 ? sizeof(uint16_t) : sizeof(float);
    memset(static_cast<char*>(data) + first * size, 0, count * size);
  }
};

// One call's arguments. Sizes are those of the arrays; `group` is query heads per KV head.
struct Call {
  Tokens q, k, v, out;
  uint32_t* pages;
  const int32_t *cu_q_lens, *kv_lens, *page_table;
  const float* sinks;  // or null
  int64_t num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim, group, page_size, pages_per_layer, pages_per_seq;
  int64_t layer;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
};

// Query tokens of one sequence: rows of the flat batch and the positions they have.
struct Tile {
  int64_t sequence, first_row, first_position, length;
  bool whole_sequence;  // of this step's tokens: the tile writes their K and V itself
};

// One tile, or several of one token each, whose sequences have their first tokens in the same pages.
struct Unit {
  int64_t first_tile, num_tiles, shared_tokens;
};

// The step's work.
struct Work {
  std::vector<Tile> tiles;
  std::vector<Unit> units;
};

// The tiles of sequences with several tokens: the largest first, so that no thread is left alone with one at the end.
inline void cut_tiles(const Call& call, Work& work) {
  const int64_t width = std::max<int64_t>(1, kTileRows / call.group);
  for (bool long_ones : {true, false}) {
    for (int64_t sequence = 0; sequence < call.num_seqs; ++sequence) {
      const int64_t first = call.cu_q_lens[sequence], length = call.cu_q_lens[sequence + 1] - first;
      if (length <= 1 || (length > width) != long_ones) continue;
      const int64_t context = call.kv_lens[sequence] - length;
      for (int64_t end = length; end > 0; end -= width) {
        const int64_t start = std::max<int64_t>(0, end - width);
        work.units.push_back({static_cast<int64_t>(work.tiles.size()), 1, 0});
        work.tiles.push_back({sequence, first + start, context + start, end - start, length <= width});
      }
    }
  }
}

// How many tokens, in chunks, two sequences have in the same pages before the positions of both.
inline int64_t count_shared(const Call& call, const Tile& a, const Tile& b) {
  const int32_t *pages = call.page_table + a.sequence * call.pages_per_seq,
                *others = call.page_table + b.sequence * call.pages_per_seq;
  const int64_t limit = std::min(a.first_position, b.first_position) / call.page_size;
  int64_t shared = 0;
  while (shared < limit && pages[shared] == others[shared]) ++shared;
  return shared * call.page_size / kSharedTokens * kSharedTokens;
}

// The units of sequences with one token each. Rows of shared tokens are worth joining up to a tile's, as long as that
// leaves enough units for all threads.
inline void cut_decode_units(const Call& call, int64_t num_threads, Work& work) {
  const int64_t first = work.tiles.size();
  for (int64_t sequence = 0; sequence < call.num_seqs; ++sequence) {
    const int64_t row = call.cu_q_lens[sequence];
    if (call.cu_q_lens[sequence + 1] - row != 1) continue;
    work.tiles.push_back({sequence, row, call.kv_lens[sequence] - 1, 1, true});
  }
  const int64_t count = static_cast<int64_t>(work.tiles.size()) - first;
  int64_t width = std::min(kTileRows / call.group, count * call.num_kv_heads / (2 * num_threads));
  if (call.window || call.group > kLanes) width = 1;
  if (width > 1) {
    // Sequences that may share a chunk come side by side, those that share two within them.
    const auto page_at = [&](const Tile& tile, int64_t token) {
      if (tile.first_position <= token) return int32_t{-1};
      return call.page_table[tile.sequence * call.pages_per_seq + token / call.page_size];
    };
    const auto key = [&](const Tile& tile) {
      return std::pair(page_at(tile, kSharedTokens - 1), page_at(tile, 2 * kSharedTokens - 1));
    };
    std::stable_sort(work.tiles.begin() + first, work.tiles.end(),
                     [&](const Tile& a, const Tile& b) { return key(a) > key(b); });
  }
  for (int64_t tile = first; tile < static_cast<int64_t>(work.tiles.size()); ++tile) {
    if (width > 1 && tile > first) {
      Unit& last = work.units.back();
      const int64_t shared = std::min(count_shared(call, work.tiles[last.first_tile], work.tiles[tile]),
                                      last.num_tiles > 1 ? last.shared_tokens : INT64_MAX);
      // Worth it if fewer tokens are read than without this one.
      if (last.num_tiles < width && shared * last.num_tiles > last.shared_tokens * (last.num_tiles - 1)) {
        ++last.num_tiles;
        last.shared_tokens = shared;
        continue;
      }
    }
    work.units.push_back({tile, 1, 0});
  }
}

}  // namespace jpaged::attention
