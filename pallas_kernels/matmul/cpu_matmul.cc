// Products of a step's rows with one layer's weights: y[t][n] = sum over k of x[t][k] * w[n][k], and the gated
// feed-forward block made of two of them.
//
// Weights are packed once, when they are loaded, into blocks of 16 outputs,
//   [layers, N / 16, K / P, 16 outputs] words of P numbers (simd.h),
// with zeros where N or K end early. A word of a row of x is an operand, what it is multiplied with a vector of 16
// outputs, and so are the sums: nothing is added across lanes or transposed, and few rows, for which reading the weights
// is all the time there is, read them in order. AMX takes both as they lie. With many rows the time goes into reading
// and writing activations: what lies between the two products of a feed-forward block never leaves the cache as float32.

#include <cmath>
#include <type_traits>

#include "memory.h"
#include "parallel.h"
#include "simd.h"
#include "tiles.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged::matmul {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kUnitBytes = 512 << 10;   // weights of a unit of work, about: long runs are read faster
constexpr int64_t kUnitsPerThread = 2;      // at least, so that no thread waits long for another
constexpr int64_t kPanelRows = 2 * kLanes;  // rows that meet a unit's weights at once
constexpr int64_t kSerialRows = 16;         // of x, that one thread converts
constexpr int64_t kWordsAhead = 512;         // of a run of weights, that are fetched while others are multiplied
constexpr int64_t kMaxPatchColumns = std::max(2, kMaxColumns);

#if defined(JPAGED_BF16_DOT)
using Bfloat16Weights = Bfloat16Dot;
#else
using Bfloat16Weights = Bfloat16;
#endif

// One layer of packed weights.
struct Weights {
  const uint32_t* data;
  int64_t outputs, words;

  int64_t num_blocks() const { return (outputs + kLanes - 1) / kLanes; }
  int64_t block_words() const { return words * kLanes; }
  const uint32_t* block_at(int64_t block) const { return data + block * block_words(); }
};

// Rows [rows, count], and how they are normalised before they are multiplied: each is divided by the root of the mean of
// its squares, plus eps under it, and multiplied with the weights; not at all if those are null.
struct Input {
  const float* x;
  int64_t rows, count;
  const float* norm_weights;
  float eps;
};

// Rows as operands of packed weights.
template <class Format>
class Operands {
 public:
  using Operand = typename Format::Operand;

  Operands(Scratch<Operand>& scratch, int64_t rows, int64_t words)
      : rows_(rows),
        // Rows are written 16 numbers at a time, by several threads: none may reach into the next one.
        stride_((words + kLanes - 1) / kLanes * kLanes * Format::kOperands),
        data_(scratch.at_least((rows + kLanes) / kLanes * kLanes * stride_)) {}

  int64_t rows() const { return rows_; }
  int64_t stride() const { return stride_; }

  // One or two rows do not fill tiles; otherwise operands lie as tile_product wants them.
  bool as_tiles() const {
#if defined(JPAGED_TILES)
    return std::is_same_v<Format, Bfloat16Dot> && rows_ > 2;
#else
    return false;
#endif
  }

  const Operand* row_at(int64_t row) const { return data_ + row * stride_; }

  // 16 numbers of a row, from number k on, a multiple of 16.
  void put(int64_t row, int64_t k, Floats numbers) const {
    const int64_t word = k / Format::kPack;
    Operand* target = data_ + row * stride_ + word * Format::kOperands;
    if (as_tiles()) {
      target = data_ + row / kLanes * kLanes * stride_;
      target += (word / kLanes * kLanes + row % kLanes) * kLanes + word % kLanes;
    }
    // Widened operands are rounded all the same: what instruction sets compute differs in the order of sums alone.
    if constexpr (std::is_same_v<Format, Bfloat16>) numbers = widen(narrow(numbers));
    store_operands<Format>(target, numbers);
  }

  template <class Pool>
  void put_rows(const Input& input, Pool& pool) const {
    parallel_for(pool, (rows_ + kSerialRows - 1) / kSerialRows, [&](int64_t unit) {
      const int64_t end = std::min(rows_, (unit + 1) * kSerialRows);
      for (int64_t row = unit * kSerialRows; row < end; ++row) put_row(row, input);
    });
  }

 private:
  // All of a row, with zeros behind.
  void put_row(int64_t row, const Input& input) const {
    const float* x = input.x + row * input.count;
    const int64_t padded = stride_ / Format::kOperands * Format::kPack;
    if (input.norm_weights == nullptr) {
      for (int64_t k = 0; k < padded; k += kLanes) put(row, k, load_some(x + k, input.count - k));
      return;
    }
    Floats squares = {};
    for (int64_t k = 0; k < input.count; k += kLanes) {
      const Floats numbers = load_some(x + k, input.count - k);
      squares += numbers * numbers;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(input.count) + input.eps);
    for (int64_t k = 0; k < padded; k += kLanes) {
      const int64_t rest = input.count - k;
      put(row, k, load_some(x + k, rest) * scale * load_some(input.norm_weights + k, rest));
    }
  }

  int64_t rows_, stride_;
  Operand* data_;
};

// sums[i][16 j ...] of rows from `row` on and `columns` blocks, `distance` blocks apart. Up to 15 rows more are written.
template <class Format>
class Patch {
 public:
  const Operands<Format>& x;
  const Weights& weights;
  int64_t row, rows, block, columns, distance;
  float* sums;
  int64_t sums_stride;

  void multiply() const {
#if defined(JPAGED_TILES)
    if constexpr (std::is_same_v<Format, Bfloat16Dot>) {
      if (x.as_tiles()) {
        return tile_product(
            {x.row_at(row), kLanes * x.stride(), (rows + kLanes - 1) / kLanes},
            {weights.block_at(block), distance * weights.block_words(), columns, /*is_new=*/row == 0}, weights.words,
            sums, sums_stride);
      }
    }
#endif
    int64_t column = 0;
    if constexpr (kMaxColumns > 2) {
      for (; column + kMaxColumns <= columns; column += kMaxColumns) multiply_columns<kMaxColumns>(column);
    }
    if constexpr (kMaxColumns > 1) {
      for (; column + 2 <= columns; column += 2) multiply_columns<2>(column);
    }
    for (; column < columns; ++column) multiply_columns<1>(column);
  }

 private:
  template <int kColumns>
  void multiply_columns(int64_t column) const {
    by_rows(rows, [&]<int kRows>(int64_t first) { multiply_vectors<kRows, kColumns>(first, column); });
  }

  template <int kRows, int kColumns>
  void multiply_vectors(int64_t first, int64_t column) const {
    Floats totals[kRows][kColumns] = {};
    const uint32_t* vectors[kColumns];
    const typename Format::Operand* operands[kRows];
    for (int j = 0; j < kColumns; ++j) vectors[j] = weights.block_at(block + (column + j) * distance);
    for (int i = 0; i < kRows; ++i) operands[i] = x.row_at(row + first + i);
    for (int64_t word = 0; word < weights.words; ++word) {
      for (int j = 0; j < kColumns; ++j) {
        __builtin_prefetch(vectors[j] + word * kLanes + kWordsAhead);
        const auto vector = Format::read(vectors[j] + word * kLanes);
        for (int i = 0; i < kRows; ++i) {
          totals[i][j] = Format::multiply_add(totals[i][j], vector, operands[i] + word * Format::kOperands);
        }
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kColumns; ++j) store(sums + (first + i) * sums_stride + (column + j) * kLanes, totals[i][j]);
    }
  }
};

// Calls body(first, last) for parts of `count` things that are `bytes` each; parts are multiples of `width`, but for the
// last one.
template <class Pool, class Body>
void by_units(Pool& pool, int64_t count, int64_t bytes, int64_t width, const Body& body) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads()), patches = (count + width - 1) / width;
  const int64_t rounds = std::max(kUnitsPerThread, (count * bytes + threads * kUnitBytes - 1) / (threads * kUnitBytes));
  // As many for each thread, and as large as each other.
  const int64_t units = std::min(patches, threads * rounds);
  parallel_for(pool, units, [&](int64_t unit) {
#if defined(JPAGED_TILES)
    const TileShapes shapes(kLanes);
#endif
    body(unit * patches / units * width, std::min(count, (unit + 1) * patches / units * width));
  });
}

// Where products go: y [rows, outputs], and what is added to them, or null.
struct Result {
  float* y;
  const float* residual;
  int64_t outputs;

  float* at(int64_t row, int64_t block) const { return y + row * outputs + block * kLanes; }

  // 16 sums of a row, less where the outputs end; they may lie there already.
  void put(int64_t row, int64_t block, const float* sums) const {
    const int64_t count = std::min<int64_t>(kLanes, outputs - block * kLanes);
    Floats total = load<Floats>(sums);
    if (residual != nullptr) total += load_some(residual + row * outputs + block * kLanes, count);
    store_some(at(row, block), total, count);
  }
};

// The result = x times the transposed weights, plus what is to be added.
template <class Format, class Pool>
void multiply(const Operands<Format>& x, const Weights& weights, const Result& result, Pool& pool) {
  const int64_t width = x.as_tiles() ? 2 : kMaxColumns;
  // Columns of few rows lie as far apart as can be: each is then one long run to read. Those of many lie side by side,
  // because then writing to as many places costs more; and whole patches matter more than even parts.
  const bool few = x.rows() <= kLanes;
  by_units(pool, weights.num_blocks(), weights.block_words() * 4, few ? 1 : width, [&](int64_t first, int64_t last) {
    alignas(64) float sums[kPanelRows][kMaxPatchColumns * kLanes];
    const bool apart = few && last - first > width;
    const int64_t distance = apart ? (last - first + width - 1) / width : 1;
    const int64_t end = apart ? first + distance : last, step = apart ? 1 : width;
    for (int64_t row = 0; row < x.rows(); row += kPanelRows) {
      const int64_t rows = std::min(kPanelRows, x.rows() - row);
      for (int64_t block = first; block < end; block += step) {
        const int64_t columns = std::min(width, (last - block + distance - 1) / distance);
        const bool fits = !apart && (block + columns) * kLanes <= result.outputs &&
                          (rows % kLanes == 0 || !x.as_tiles());
        float* target = fits ? result.at(row, block) : &sums[0][0];
        const int64_t stride = fits ? result.outputs : kMaxPatchColumns * kLanes;
        Patch<Format>{x, weights, row, rows, block, columns, distance, target, stride}.multiply();
        if (fits && result.residual == nullptr) continue;
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < columns; ++j) {
            result.put(row + i, block + j * distance, target + i * stride + j * kLanes);
          }
        }
      }
    }
  });
}

enum class Activation : int64_t { kSilu, kGeluTanh };

inline Floats activate(Activation activation, Floats x) {
  // Beyond this exp would overflow, and the result is 0 anyway.
  if (activation == Activation::kSilu) return x / (1.0f + exp(select(x < -80.0f, broadcast(80.0f), -x)));
  constexpr float kSqrt2OverPi = 0.7978845608028654f;
  return 0.5f * x * (1.0f + tanh(kSqrt2OverPi * (x + 0.044715f * x * x * x)));
}

// Weights of gates and of what they let through, in turns: `group` blocks of gates, then as many of the other.
struct GatedWeights {
  Weights weights;
  int64_t group;
  Activation activation;
};

// gated = activation(gates) * ups, as operands of the next product.
template <class Format, class Pool>
void multiply_gated(const Operands<Format>& x, const GatedWeights& gate_up, const Operands<Format>& gated, Pool& pool) {
  const Weights& weights = gate_up.weights;
  by_units(pool, weights.num_blocks() / 2, weights.block_words() * 8, 1, [&](int64_t first, int64_t last) {
    alignas(64) float sums[kPanelRows][2 * kLanes];
    for (int64_t row = 0; row < x.rows(); row += kPanelRows) {
      const int64_t rows = std::min(kPanelRows, x.rows() - row);
      for (int64_t feature = first; feature < last; ++feature) {
        const int64_t block = feature + feature / gate_up.group * gate_up.group;
        Patch<Format>{x, weights, row, rows, block, 2, gate_up.group, &sums[0][0], 2 * kLanes}.multiply();
        for (int64_t i = 0; i < rows; ++i) {
          const Floats gate = load<Floats>(sums[i]), up = load<Floats>(sums[i] + kLanes);
          gated.put(row + i, feature * kLanes, activate(gate_up.activation, gate) * up);
        }
      }
    }
  });
}

template <class Format, class Pool>
void project_as(const Input& input, const Weights& weights, const Result& result, Pool& pool) {
  static thread_local Scratch<typename Format::Operand> scratch;
  const Operands<Format> operands(scratch, input.rows, weights.words);
  operands.put_rows(input, pool);
  multiply(operands, weights, result, pool);
}

template <class Format, class Pool>
void feed_forward_as(const Input& input, const GatedWeights& gate_up, const Weights& down, const Result& result,
                     Pool& pool) {
  static thread_local Scratch<typename Format::Operand> scratch, gated_scratch;
  const Operands<Format> operands(scratch, input.rows, gate_up.weights.words);
  operands.put_rows(input, pool);
  const Operands<Format> gated(gated_scratch, input.rows, down.words);
  // An odd number of blocks of features leaves half a tile empty.
  const int64_t features = gate_up.weights.outputs / 2;
  for (int64_t k = features; k < down.words * Format::kPack; k += kLanes) {
    for (int64_t row = 0; row < input.rows; ++row) gated.put(row, k, Floats{});
  }
  multiply_gated(operands, gate_up, gated, pool);
  multiply(gated, down, result, pool);
}

template <class Pool>
void project(const Input& input, const Weights& weights, bool is_bf16, const Result& result, Pool& pool) {
  is_bf16 ? project_as<Bfloat16Weights>(input, weights, result, pool)
          : project_as<Float32>(input, weights, result, pool);
}

template <class Pool>
void feed_forward(const Input& input, const GatedWeights& gate_up, const Weights& down, bool is_bf16,
                  const Result& result, Pool& pool) {
  is_bf16 ? feed_forward_as<Bfloat16Weights>(input, gate_up, down, result, pool)
          : feed_forward_as<Float32>(input, gate_up, down, result, pool);
}

// Weights [layers, N, K] as 16-bit or 32-bit numbers, and where they are packed.
struct Packing {
  const char* weights;
  uint32_t* packed;
  int64_t layers, outputs, inputs, words, number_bytes;
};

// Packs one block of 16 outputs.
inline void pack_block(const Packing& packing, int64_t layer, int64_t block) {
  const int64_t blocks = (packing.outputs + kLanes - 1) / kLanes, row_bytes = packing.inputs * packing.number_bytes;
  const char* rows = packing.weights + (layer * packing.outputs + block * kLanes) * row_bytes;
  const int64_t num_rows = std::min<int64_t>(kLanes, packing.outputs - block * kLanes);
  uint32_t* target = packing.packed + (layer * blocks + block) * packing.words * kLanes;
  for (int64_t word = 0; word < packing.words; word += kLanes) {
    Floats lines[kLanes] = {};
    const int64_t begin = word * 4, bytes = std::clamp<int64_t>(row_bytes - begin, 0, kLanes * 4);
    for (int64_t row = 0; row < num_rows; ++row) memcpy(&lines[row], rows + row * row_bytes + begin, bytes);
    transpose(lines);
    const int64_t count = std::min<int64_t>(kLanes, packing.words - word);
    for (int64_t i = 0; i < count; ++i) store(target + (word + i) * kLanes, lines[i]);
  }
}

template <class Pool>
void pack(const Packing& packing, Pool& pool) {
  prefer_huge_pages(packing.packed, packing.layers * packing.outputs * packing.words * 4);
  const int64_t blocks = (packing.outputs + kLanes - 1) / kLanes;
  parallel_for(pool, packing.layers * blocks,
               [&](int64_t unit) { pack_block(packing, unit / blocks, unit % blocks); });
}

// weights [layers, N, K]; packed as above, [layers, blocks, words, 16, P].
ffi::Error pack_weights(ffi::ThreadPool pool, ffi::AnyBuffer weights, ffi::Result<ffi::AnyBuffer> packed) {
  const Packing packing{
      .weights = static_cast<const char*>(weights.untyped_data()),
      .packed = static_cast<uint32_t*>(packed->untyped_data()),
      .layers = weights.dimensions()[0],
      .outputs = weights.dimensions()[1],
      .inputs = weights.dimensions()[2],
      .words = packed->dimensions()[2],
      .number_bytes = weights.element_type() == ffi::DataType::BF16 ? 2 : 4,
  };
  pack(packing, pool);
  return ffi::Error::Success();
}

Weights layer_of(ffi::AnyBuffer packed, int64_t layer, int64_t outputs) {
  const int64_t blocks = packed.dimensions()[1], words = packed.dimensions()[2];
  const uint32_t* data = static_cast<const uint32_t*>(packed.untyped_data());
  return {data + layer * blocks * words * kLanes, outputs, words};
}

// Rows, and the layer's weights of the norm before them, if there is one.
Input input_of(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> norm_weights, int64_t layer, float eps) {
  const int64_t count = x.dimensions()[1];
  return {x.typed_data(), x.dimensions()[0], count,
          norm_weights.element_count() ? norm_weights.typed_data() + layer * count : nullptr, eps};
}

Result result_of(ffi::Result<ffi::Buffer<ffi::F32>> y, ffi::Buffer<ffi::F32> residual) {
  return {y->typed_data(), residual.element_count() ? residual.typed_data() : nullptr, y->dimensions()[1]};
}

// x float32 [T, K]; weights packed; norm_weights [layers, K] or empty; residual [T, N] or empty; y float32 [T, N].
ffi::Error project_rows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weights,
                        ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::F32> norm_weights,
                        ffi::Buffer<ffi::F32> residual, ffi::ResultBuffer<ffi::F32> y, float eps) {
  const int64_t index = *layer.typed_data();
  project(input_of(x, norm_weights, index, eps), layer_of(weights, index, y->dimensions()[1]),
          weights.element_type() == ffi::DataType::BF16, result_of(y, residual), pool);
  return ffi::Error::Success();
}

// x float32 [T, E]; gate_up and down packed, of 2 F and E outputs; norm_weights [layers, E] or empty; residual [T, E] or
// empty; y float32 [T, E].
ffi::Error feed_rows_forward(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer gate_up, ffi::AnyBuffer down,
                             ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::F32> norm_weights,
                             ffi::Buffer<ffi::F32> residual, ffi::ResultBuffer<ffi::F32> y, int64_t group,
                             int64_t activation, float eps) {
  const int64_t index = *layer.typed_data();
  const GatedWeights gated{layer_of(gate_up, index, gate_up.dimensions()[1] * kLanes), group,
                           static_cast<Activation>(activation)};
  feed_forward(input_of(x, norm_weights, index, eps), gated, layer_of(down, index, y->dimensions()[1]),
               down.element_type() == ffi::DataType::BF16, result_of(y, residual), pool);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged::matmul

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_pack_weights, jpaged::matmul::pack_weights,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_project, jpaged::matmul::project_rows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_feed_forward, jpaged::matmul::feed_rows_forward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("activation")
                                  .Attr<float>("eps"));
#pragma GCC visibility pop
