// Paged attention on a CPU: writes the new K and V into their pages and attends over each sequence's pages.
//
// The work is cut into units: a tile of one sequence's query tokens for one KV head, whose G query heads per token make
// the rows of the tile. A unit walks over its KV tokens in chunks and keeps a running softmax (Flash Attention, arXiv
// 2205.14135), so its memory does not grow with the context. Units are independent and run on XLA's thread pool.
//
// Decoding sequences that begin with the same pages make one unit: their rows walk over the shared chunks together, which
// are read once for all (as in ChunkAttention, arXiv 2402.15220), and each over the rest of its own. Chunks begin at the
// same tokens either way, so a row's sums, and with them its result to the last bit, do not depend on its company.
//
// A page holds, for every head, blocks of 16 tokens, and a block K and V as packed vectors (simd.h), P numbers a word:
//   K [head_dim / P, 16 tokens] words of P channels: a vector gives 16 tokens' share of their logits;
//   V [16 / P, head_dim] words of P tokens: a vector gives the tokens' share of 16 channels of the result.
// So logits and results both come out in vectors, nothing is summed across lanes, and both blocks are what AMX takes.

#include <cstring>
#include <optional>
#include <type_traits>

#include "cpu_attention_work.h"
#include "memory.h"
#include "parallel.h"
#include "simd.h"
#include "tiles.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged::attention {
namespace {

constexpr int kChunkLogits = 12288;  // logits of a tile and a chunk, about
constexpr float kFloor = -1e30f;     // below every real logit, yet finite: exp(-inf - kFloor) is 0

// A tile's rows at work: row r is token r / group and query head r % group of the KV head.
template <class Format>
struct Rows {
  using Operand = typename Format::Operand;
  int64_t count;
  Operand* queries;   // [rows, head_dim / kPack words]
  float* logits;      // [rows, chunk]
  Operand* weights;   // [rows, chunk / kPack words]
  float* weighted;    // [rows, head_dim rounded up to 16]: the sum so far of weight * V, relative to exp(top)
  float *top, *total;  // [rows]
  int64_t query_stride, chunk, weight_stride, weighted_stride;

  Rows part(int64_t first, int64_t rows) const {
    Rows part = *this;
    part.count = rows;
    part.queries += first * query_stride;
    part.logits += first * chunk;
    part.weights += first * weight_stride;
    part.weighted += first * weighted_stride;
    part.top += first;
    part.total += first;
    return part;
  }
};

template <class Format>
struct Buffers {
  Scratch<typename Format::Operand> queries, weights;
  Scratch<float> logits, weighted, softmax, token;
  Scratch<uint32_t> first_values, last_values;
};

template <class Format>
class Attention {
 public:
  explicit Attention(const Call& call) : call_(call) {}

  void write_token(int64_t row, int64_t sequence, int64_t position, int64_t head) const;
  void attend(const Tile* tiles, const Unit& unit, int64_t head) const;

 private:
  using Operand = typename Format::Operand;
  static constexpr int kPack = Format::kPack, kOperands = Format::kOperands;

  int64_t half_words() const { return call_.head_dim * kBlock / kPack; }  // of a block: its K, or its V

  // Block number `block` of a sequence: K, and V after it.
  uint32_t* block_at(int64_t sequence, int64_t block, int64_t head) const {
    const int64_t blocks = call_.page_size / kBlock;
    const int64_t page = call_.page_table[sequence * call_.pages_per_seq + block / blocks];
    const int64_t place = (call_.layer * call_.pages_per_layer + page) * call_.num_kv_heads + head;
    return call_.pages + (place * blocks + block % blocks) * 2 * half_words();
  }

  Rows<Format> start_rows(const Tile* tiles, int64_t num_tiles, int64_t head, Buffers<Format>& buffers) const;
  void walk(const Rows<Format>& rows, const Tile& tile, int64_t head, int64_t first_token, int64_t end,
            Buffers<Format>& buffers) const;
  const uint32_t* cleaned(const uint32_t* values, int64_t from, int64_t to, uint32_t* target) const;
  void score(const Rows<Format>& rows, const uint32_t* const* blocks, int64_t num_blocks) const;
  void weigh(const Rows<Format>& rows, const uint32_t* const* values, int64_t num_blocks) const;
  void update_softmax(const Rows<Format>& rows, const Tile& tile, int64_t first_token, int64_t num_blocks) const;

  template <int kRows, int kColumns>
  void score_blocks(const Rows<Format>& rows, int64_t row, const uint32_t* const* blocks, int64_t block) const;
  template <int kRows, int kColumns>
  void weigh_values(const Rows<Format>& rows, int64_t row, const uint32_t* const* values, int64_t num_blocks,
                    int64_t column) const;

  const Call& call_;
};

template <class Format>
void Attention<Format>::write_token(int64_t row, int64_t sequence, int64_t position, int64_t head) const {
  using Number = std::conditional_t<kPack == 2, uint16_t, float>;
  static thread_local Scratch<uint32_t> scratch;
  const int64_t head_dim = call_.head_dim, token = position % kBlock;
  uint32_t* words = scratch.at_least(head_dim);
  Number* numbers = reinterpret_cast<Number*>(words);
  uint32_t* keys = block_at(sequence, position / kBlock, head);
  Number* values = reinterpret_cast<Number*>(keys + half_words());
  call_.k.read((row * call_.num_kv_heads + head) * head_dim, head_dim, numbers);
  for (int64_t word = 0; word < head_dim / kPack; ++word) keys[word * kBlock + token] = words[word];
  call_.v.read((row * call_.num_kv_heads + head) * head_dim, head_dim, numbers);
  values += token / kPack * head_dim * kPack + token % kPack;
  for (int64_t d = 0; d < head_dim; ++d) values[d * kPack] = numbers[d];
}

// Reads the queries of a tile, or of several with one token each, and sets the softmax to what has seen nothing but the
// sinks.
template <class Format>
Rows<Format> Attention<Format>::start_rows(const Tile* tiles, int64_t num_tiles, int64_t head,
                                           Buffers<Format>& buffers) const {
  const int64_t group = call_.group, head_dim = call_.head_dim, length = tiles[0].length;
  const int64_t count = num_tiles * length * group;
  // Rows up to the next multiple of 16 take part where products are made by tiles; nobody reads their results.
  const int64_t padded = count <= kLanes ? count : (count + kLanes - 1) / kLanes * kLanes;
  Rows<Format> rows;
  rows.count = count;
  rows.chunk = std::clamp<int64_t>(kChunkLogits / padded / kBlock, 1, kMaxChunkBlocks) * kBlock;
  rows.query_stride = head_dim / kPack * kOperands;
  rows.weight_stride = rows.chunk / kPack * kOperands;
  rows.weighted_stride = (head_dim + kLanes - 1) / kLanes * kLanes;
  rows.queries = buffers.queries.at_least(padded * rows.query_stride + kLanes);
  rows.logits = buffers.logits.at_least(padded * rows.chunk);
  rows.weights = buffers.weights.at_least(padded * rows.weight_stride);
  rows.weighted = buffers.weighted.at_least(padded * rows.weighted_stride);
  rows.top = buffers.softmax.at_least(2 * padded);
  rows.total = rows.top + padded;

  float* numbers = buffers.token.at_least(head_dim + kLanes);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t q_head = head * group + r % group, token = r / group;
    const int64_t row = tiles[token / length].first_row + token % length;
    call_.q.read((row * call_.num_q_heads + q_head) * head_dim, head_dim, numbers);
    Operand* target = rows.queries + r * rows.query_stride;
    // A full vector may run over into the next row's place, which is written after it.
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store_operands<Format>(target + d / kPack * kOperands, load<Floats>(numbers + d));
    }
    rows.top[r] = call_.sinks ? call_.sinks[q_head] : kFloor;
    rows.total[r] = call_.sinks ? 1.0f : 0.0f;
  }
  std::fill(rows.weighted, rows.weighted + padded * rows.weighted_stride, 0.0f);
  return rows;
}

// V of a block with tokens outside [from, to) zero: a slot that holds no token may hold NaN, and 0 * NaN is NaN.
template <class Format>
const uint32_t* Attention<Format>::cleaned(const uint32_t* values, int64_t from, int64_t to, uint32_t* target) const {
  for (int64_t word = 0; word < kBlock / kPack; ++word) {
    uint32_t mask = ~uint32_t{0};
    if constexpr (kPack == 2) {
      const int64_t token = 2 * word;
      mask = (token >= from && token < to ? 0xffffu : 0) | (token + 1 >= from && token + 1 < to ? 0xffff0000u : 0);
    } else if (word < from || word >= to) {
      mask = 0;
    }
    for (int64_t d = 0; d < call_.head_dim; ++d) {
      target[word * call_.head_dim + d] = values[word * call_.head_dim + d] & mask;
    }
  }
  return target;
}

// logits[row + i][block + j] for kRows rows and kColumns blocks.
template <class Format>
template <int kRows, int kColumns>
void Attention<Format>::score_blocks(const Rows<Format>& rows, int64_t row, const uint32_t* const* blocks,
                                     int64_t block) const {
  Floats sums[kRows][kColumns] = {};
  const int64_t steps = call_.head_dim / kPack;
  const Operand* queries = rows.queries + row * rows.query_stride;
  for (int64_t step = 0; step < steps; ++step) {
    for (int j = 0; j < kColumns; ++j) {
      // Pages lie anywhere: the machine cannot guess what is read next.
      __builtin_prefetch(blocks[block + kColumns + j] + step * kLanes);
      const auto vector = Format::read(blocks[block + j] + step * kLanes);
      for (int i = 0; i < kRows; ++i) {
        sums[i][j] = Format::multiply_add(sums[i][j], vector, queries + i * rows.query_stride + step * kOperands);
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) store(rows.logits + (row + i) * rows.chunk + (block + j) * kBlock, sums[i][j]);
  }
}

// weighted[row + i][column + j] += weights * V for kRows rows and kColumns vectors of channels.
template <class Format>
template <int kRows, int kColumns>
void Attention<Format>::weigh_values(const Rows<Format>& rows, int64_t row, const uint32_t* const* values,
                                     int64_t num_blocks, int64_t column) const {
  Floats sums[kRows][kColumns];
  float* weighted = rows.weighted + row * rows.weighted_stride + column * kLanes;
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) sums[i][j] = load<Floats>(weighted + i * rows.weighted_stride + j * kLanes);
  }
  for (int64_t block = 0; block < num_blocks; ++block) {
    const uint32_t* source = values[block] + column * kLanes;
    const uint32_t* next = values[block + 1] + column * kLanes;
    const Operand* weights = rows.weights + row * rows.weight_stride + block * (kBlock / kPack) * kOperands;
    for (int step = 0; step < kBlock / kPack; ++step) {
      for (int j = 0; j < kColumns; ++j) {
        __builtin_prefetch(next + step * call_.head_dim + j * kLanes);
        const auto vector = Format::read(source + step * call_.head_dim + j * kLanes);
        for (int i = 0; i < kRows; ++i) {
          sums[i][j] = Format::multiply_add(sums[i][j], vector, weights + i * rows.weight_stride + step * kOperands);
        }
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) store(weighted + i * rows.weighted_stride + j * kLanes, sums[i][j]);
  }
}

template <class Format>
void Attention<Format>::score(const Rows<Format>& rows, const uint32_t* const* blocks, int64_t num_blocks) const {
  by_rows(rows.count, [&]<int kRows>(int64_t row) {
    int64_t block = 0;
    for (; block + kMaxColumns <= num_blocks; block += kMaxColumns) {
      score_blocks<kRows, kMaxColumns>(rows, row, blocks, block);
    }
    for (; block < num_blocks; ++block) score_blocks<kRows, 1>(rows, row, blocks, block);
  });
}

template <class Format>
void Attention<Format>::weigh(const Rows<Format>& rows, const uint32_t* const* values, int64_t num_blocks) const {
  const int64_t columns = rows.weighted_stride / kLanes;
  by_rows(rows.count, [&]<int kRows>(int64_t row) {
    int64_t column = 0;
    for (; column + kMaxColumns <= columns; column += kMaxColumns) {
      weigh_values<kRows, kMaxColumns>(rows, row, values, num_blocks, column);
    }
    for (; column < columns; ++column) weigh_values<kRows, 1>(rows, row, values, num_blocks, column);
  });
}

#if defined(JPAGED_TILES)
// bfloat16 products by AMX: 16 rows against 16 words and lanes at a time. head_dim must be a multiple of 16.
struct Bfloat16Tiles : Bfloat16Dot {};

template <>
void Attention<Bfloat16Tiles>::score(const Rows<Bfloat16Tiles>& rows, const uint32_t* const* blocks,
                                     int64_t num_blocks) const {
  const int64_t steps = call_.head_dim / 2, query_bytes = rows.query_stride * 4, logit_bytes = rows.chunk * 4;
  for (int64_t row = 0; row < rows.count; row += kLanes) {
    const uint32_t* queries = rows.queries + row * rows.query_stride;
    for (int64_t block = 0; block < num_blocks; block += 2) {
      const bool both = block + 1 < num_blocks;
      const uint32_t *keys = blocks[block], *others = blocks[block + both];
      if (row == 0) {
        for (int64_t step = 0; step < steps; ++step) {
          __builtin_prefetch(blocks[block + 2] + step * kLanes);
          __builtin_prefetch(blocks[block + 3] + step * kLanes);
        }
      }
      _tile_zero(0);
      _tile_zero(1);
      int64_t step = 0;
      for (; step + 16 <= steps; step += 16) {
        _tile_loadd(4, queries + step, query_bytes);
        _tile_loadd(6, keys + step * kLanes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(6, others + step * kLanes, 64);
        _tile_dpbf16ps(1, 4, 6);
      }
      if (step < steps) {
        _tile_loadd(5, queries + step, query_bytes);
        _tile_loadd(7, keys + step * kLanes, 64);
        _tile_dpbf16ps(0, 5, 7);
        _tile_loadd(7, others + step * kLanes, 64);
        _tile_dpbf16ps(1, 5, 7);
      }
      float* logits = rows.logits + row * rows.chunk + block * kBlock;
      _tile_stored(0, logits, logit_bytes);
      if (both) _tile_stored(1, logits + kBlock, logit_bytes);
    }
  }
}

template <>
void Attention<Bfloat16Tiles>::weigh(const Rows<Bfloat16Tiles>& rows, const uint32_t* const* values,
                                     int64_t num_blocks) const {
  const int64_t value_bytes = call_.head_dim * 4, weight_bytes = rows.weight_stride * 4;
  const int64_t weighted_bytes = rows.weighted_stride * 4;
  for (int64_t row = 0; row < rows.count; row += kLanes) {
    for (int64_t d = 0; d < call_.head_dim; d += 4 * kLanes) {
      const int64_t columns = std::min<int64_t>(4, (call_.head_dim - d) / kLanes);
      float* weighted = rows.weighted + row * rows.weighted_stride + d;
      _tile_loadd(0, weighted, weighted_bytes);
      if (columns > 1) _tile_loadd(1, weighted + kLanes, weighted_bytes);
      if (columns > 2) _tile_loadd(2, weighted + 2 * kLanes, weighted_bytes);
      if (columns > 3) _tile_loadd(3, weighted + 3 * kLanes, weighted_bytes);
      for (int64_t block = 0; block < num_blocks; ++block) {
        const uint32_t* source = values[block] + d;
        if (row == 0) {
          for (int64_t line = 0; line < columns * 8; ++line) {
            __builtin_prefetch(values[block + 1] + d + line / columns * call_.head_dim + line % columns * kLanes);
          }
        }
        _tile_loadd(5, rows.weights + row * rows.weight_stride + block * (kBlock / 2), weight_bytes);
        _tile_loadd(7, source, value_bytes);
        _tile_dpbf16ps(0, 5, 7);
        if (columns > 1) {
          _tile_loadd(7, source + kLanes, value_bytes);
          _tile_dpbf16ps(1, 5, 7);
        }
        if (columns > 2) {
          _tile_loadd(7, source + 2 * kLanes, value_bytes);
          _tile_dpbf16ps(2, 5, 7);
        }
        if (columns > 3) {
          _tile_loadd(7, source + 3 * kLanes, value_bytes);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, weighted, weighted_bytes);
      if (columns > 1) _tile_stored(1, weighted + kLanes, weighted_bytes);
      if (columns > 2) _tile_stored(2, weighted + 2 * kLanes, weighted_bytes);
      if (columns > 3) _tile_stored(3, weighted + 3 * kLanes, weighted_bytes);
    }
  }
}
#endif

// Takes a chunk's logits into the running softmax and leaves its weights; first_token is the chunk's first position.
template <class Format>
void Attention<Format>::update_softmax(const Rows<Format>& rows, const Tile& tile, int64_t first_token,
                                       int64_t num_blocks) const {
  const Floats hidden = broadcast(-std::numeric_limits<float>::infinity());
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t position = tile.first_position + r / call_.group;
    const int64_t first_seen = call_.window ? std::max<int64_t>(0, position - call_.window + 1) : 0;
    float* logits = rows.logits + r * rows.chunk;
    Floats tops = hidden;
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t token = first_token + block * kBlock;
      Floats x = load<Floats>(logits + block * kBlock) * call_.scale;
      if (call_.soft_cap != 0) x = call_.soft_cap * tanh(x / call_.soft_cap);
      if (token < first_seen || token + kBlock > position + 1) {
        const Ints place = lane_numbers();
        const int32_t from = static_cast<int32_t>(std::clamp<int64_t>(first_seen - token, 0, kBlock));
        const int32_t to = static_cast<int32_t>(std::clamp<int64_t>(position + 1 - token, 0, kBlock));
        x = select((place >= from) & (place < to), x, hidden);
      }
      store(logits + block * kBlock, x);
      tops = max(tops, x);
    }
    const float top = std::max(rows.top[r], largest(tops));
    Floats totals = {};
    Operand* weights = rows.weights + r * rows.weight_stride;
    for (int64_t block = 0; block < num_blocks; ++block) {
      const Floats weight = exp(load<Floats>(logits + block * kBlock) - top);
      totals += weight;
      store_operands<Format>(weights + block * (kBlock / kPack) * kOperands, weight);
    }
    const float decay = exp(broadcast(rows.top[r] - top))[0];
    if (decay != 1.0f) {
      float* weighted = rows.weighted + r * rows.weighted_stride;
      for (int64_t d = 0; d < rows.weighted_stride; d += kLanes) store(weighted + d, load<Floats>(weighted + d) * decay);
    }
    rows.top[r] = top;
    rows.total[r] = rows.total[r] * decay + sum(totals);
  }
}

// Takes the KV tokens [first_token, end) of a tile's sequence into the rows' results; first_token begins a chunk.
template <class Format>
void Attention<Format>::walk(const Rows<Format>& rows, const Tile& tile, int64_t head, int64_t first_token, int64_t end,
                             Buffers<Format>& buffers) const {
#if defined(JPAGED_TILES)
  std::optional<TileShapes> shapes;
  if constexpr (std::is_same_v<Format, Bfloat16Tiles>) shapes.emplace(std::min<int64_t>(rows.count, kLanes), kBlock / 2);
#endif
  const int64_t first_seen =
      call_.window ? std::max<int64_t>(first_token, tile.first_position - call_.window + 1) : first_token;
  const int64_t first_block = first_seen / kBlock, last_block = (end - 1) / kBlock;
  uint32_t* first_values = buffers.first_values.at_least(half_words() + kLanes);
  uint32_t* last_values = buffers.last_values.at_least(half_words() + kLanes);

  const uint32_t *keys[kMaxChunkBlocks + kMaxColumns + 2], *values[kMaxChunkBlocks + kMaxColumns + 2];
  for (int64_t begin = first_block; begin <= last_block; begin += rows.chunk / kBlock) {
    const int64_t num_blocks = std::min(rows.chunk / kBlock, last_block + 1 - begin);
    // Some blocks more than the chunk has, for prefetching.
    for (int64_t i = 0; i < num_blocks + kMaxColumns + 2; ++i) {
      keys[i] = block_at(tile.sequence, std::min(begin + i, last_block), head);
      values[i] = keys[i] + half_words();
    }
    score(rows, keys, num_blocks);
    update_softmax(rows, tile, begin * kBlock, num_blocks);
    const auto clean = [&](int64_t block, uint32_t* target) {
      const int64_t token = block * kBlock;
      if (block < begin || block >= begin + num_blocks || (token >= first_seen && token + kBlock <= end)) return;
      values[block - begin] = cleaned(values[block - begin], first_seen - token, end - token, target);
    };
    clean(first_block, first_values);
    if (last_block != first_block) clean(last_block, last_values);
    weigh(rows, values, num_blocks);
  }
}

template <class Format>
void Attention<Format>::attend(const Tile* tiles, const Unit& unit, int64_t head) const {
  static thread_local Buffers<Format> buffers;
  const Rows<Format> rows = start_rows(tiles, unit.num_tiles, head, buffers);
  // Every position is behind what is shared, so that any of the tiles may stand for all.
  if (unit.shared_tokens > 0) walk(rows, tiles[0], head, 0, unit.shared_tokens, buffers);
  const int64_t group = call_.group, rows_each = tiles[0].length * group;
  for (int64_t t = 0; t < unit.num_tiles; ++t) {
    const Tile& tile = tiles[t];
    const Rows<Format> part = rows.part(t * rows_each, rows_each);
    if (tile.whole_sequence) {
      for (int64_t i = 0; i < tile.length; ++i) {
        write_token(tile.first_row + i, tile.sequence, tile.first_position + i, head);
      }
    }
    walk(part, tile, head, unit.shared_tokens, tile.first_position + tile.length, buffers);
    for (int64_t r = 0; r < part.count; ++r) {
      const int64_t place = (tile.first_row + r / group) * call_.num_q_heads + head * group + r % group;
      call_.out.write(place * call_.head_dim, call_.head_dim, part.weighted + r * part.weighted_stride,
                      1.0f / part.total[r]);
    }
  }
}

template <class Format, class Pool>
void run_as(const Call& call, Pool& pool) {
  const Attention<Format> attention(call);
  Work work;
  cut_tiles(call, work);
  // Tiles of one sequence read what each other's tokens write: those go first.
  const auto first_whole = std::find_if(work.tiles.begin(), work.tiles.end(),
                                        [](const Tile& tile) { return tile.whole_sequence; }) - work.tiles.begin();
  parallel_for(pool, first_whole, [&](int64_t index) {
    const Tile& tile = work.tiles[index];
    for (int64_t i = 0; i < tile.length; ++i) {
      for (int64_t head = 0; head < call.num_kv_heads; ++head) {
        attention.write_token(tile.first_row + i, tile.sequence, tile.first_position + i, head);
      }
    }
  });
  cut_decode_units(call, pool.num_threads(), work);
  parallel_for(pool, static_cast<int64_t>(work.units.size()) * call.num_kv_heads, [&](int64_t index) {
    const Unit& unit = work.units[index / call.num_kv_heads];
    attention.attend(&work.tiles[unit.first_tile], unit, index % call.num_kv_heads);
  });
  const int64_t used = call.num_seqs > 0 ? call.cu_q_lens[call.num_seqs] : 0;
  const int64_t row = call.num_q_heads * call.head_dim;
  call.out.clear(used * row, (call.num_tokens - used) * row);
}

template <class Pool>
void run(const Call& call, bool pages_are_bf16, Pool& pool) {
  if (!pages_are_bf16) return run_as<Float32>(call, pool);
#if defined(JPAGED_TILES)
  if (call.q.is_bf16 && call.head_dim % kLanes == 0) return run_as<Bfloat16Tiles>(call, pool);
#endif
#if defined(JPAGED_BF16_DOT)
  if (call.q.is_bf16) return run_as<Bfloat16Dot>(call, pool);
#endif
  run_as<Bfloat16>(call, pool);
}

// q and out [T, Hq, D]; k and v [T, H, D]; pages_in and pages [layers, pages, H, page_size * 2 * D], the same memory;
// the rest as AttentionBatch says; sinks [Hq] or empty.
ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer pages_in,
                  ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::S32> kv_lens, ffi::Buffer<ffi::S32> page_table,
                  ffi::Buffer<ffi::S32> num_seqs, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::F32> sinks,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> pages, float scale, float soft_cap,
                  int64_t window) {
  if (pages_in.untyped_data() != pages->untyped_data()) return ffi::Error::Internal("the pages are not aliased");
  const int64_t head_dim = q.dimensions()[2], num_q_heads = q.dimensions()[1], num_kv_heads = k.dimensions()[1];
  const Call call{
      .q = Tokens::of(q),
      .k = Tokens::of(k),
      .v = Tokens::of(v),
      .out = Tokens::of(*out),
      .pages = static_cast<uint32_t*>(pages->untyped_data()),
      .cu_q_lens = cu_q_lens.typed_data(),
      .kv_lens = kv_lens.typed_data(),
      .page_table = page_table.typed_data(),
      .sinks = sinks.element_count() ? sinks.typed_data() : nullptr,
      .num_tokens = q.dimensions()[0],
      .num_seqs = *num_seqs.typed_data(),
      .num_q_heads = num_q_heads,
      .num_kv_heads = num_kv_heads,
      .head_dim = head_dim,
      .group = num_q_heads / num_kv_heads,
      .page_size = pages->dimensions()[3] / (2 * head_dim),
      .pages_per_layer = pages->dimensions()[1],
      .pages_per_seq = page_table.dimensions()[1],
      .layer = *layer.typed_data(),
      .scale = scale,
      .soft_cap = soft_cap,
      .window = window,
  };
  run(call, pages->element_type() == ffi::DataType::BF16, pool);
  return ffi::Error::Success();
}

// An empty pool, on huge pages from its first byte on.
ffi::Error make_pages(ffi::ThreadPool pool, ffi::Result<ffi::AnyBuffer> pages) {
  constexpr int64_t kPart = int64_t{32} << 20;
  const int64_t bytes = pages->size_bytes();
  char* data = static_cast<char*>(pages->untyped_data());
  prefer_huge_pages(data, bytes);
  parallel_for(pool, (bytes + kPart - 1) / kPart, [&](int64_t part) {
    std::memset(data + part * kPart, 0, std::min(kPart, bytes - part * kPart));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged::attention

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_make_pages, jpaged::attention::make_pages,
                              xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Ret<xla::ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_attend, jpaged::attention::attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window"));
#pragma GCC visibility pop
