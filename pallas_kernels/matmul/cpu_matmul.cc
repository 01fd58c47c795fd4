// x times the transpose of one layer's weights, for a step's rows: y[t][n] = sum over k of x[t][k] * w[n][k].
//
// The weights stay as they are, [layers, N, K]; a layer is read where it lies, once, in order: for few rows that is all
// the time there is. The rows of x, few, are packed into panels of 16 rows,
//   [K / P, 16 rows] words of P numbers (simd.h),
// so a weight word is one operand, a panel's vector what it is multiplied with, and the sums of 16 rows one vector. AMX
// takes both as they lie. What comes out is transposed, 16 outputs by 16 rows. A handful of rows, or with AMX one or two,
// would leave most lanes empty: those are multiplied along K instead, and summed across lanes at the end.

#include <type_traits>

#include "memory.h"
#include "parallel.h"
#include "simd.h"
#include "tiles.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged::matmul {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kMaxLaneRows = 8;        // rows that are multiplied along K
constexpr int64_t kMaxLaneRowsByTiles = 2;  // the same where tiles would do it
constexpr int64_t kUnitBytes = 256 << 10;  // weights of a unit of work, at most: long runs are read faster
constexpr int64_t kUnitsPerThread = 2;     // at least, so that no thread waits long for another

struct Call {
  const float* x;
  const char* weights;
  float* y;
  int64_t rows, outputs, inputs;
};

// Formats of weights in memory: how a weight word meets a vector of the panel.

struct FloatWeights {
  using Number = float;
  using Panel = Float32;
  static Floats multiply_add(Floats sum, const Panel::Vector& x, uint32_t word) { return sum + x.v * bits<float>(word); }
};

#if defined(JPAGED_BF16_DOT)
struct Bfloat16Weights {
  using Number = uint16_t;
  using Panel = Bfloat16Dot;
  static Floats multiply_add(Floats sum, const Panel::Vector& x, uint32_t word) {
    return Panel::multiply_add(sum, x, &word);
  }
};
#else
// Without instructions for it, both sides are widened again.
struct Bfloat16Weights {
  using Number = uint16_t;
  using Panel = Bfloat16;
  static Floats multiply_add(Floats sum, const Panel::Vector& x, uint32_t word) {
    return sum + x.even * bits<float>(word << 16) + x.odd * bits<float>(word & 0xffff0000u);
  }
};
#endif

template <class Weights>
class Product {
 public:
  explicit Product(const Call& call, uint32_t* packed) : call_(call), packed_(packed) {}

  // Words that the packed rows take.
  static size_t packed_words(const Call& call) {
    if (by_lanes(call)) return call.rows * lane_stride(call);
    return num_panels(call) * panel_words(call) + kMaxColumns * kLanes;
  }
  static int64_t num_packs(const Call& call) { return by_lanes(call) ? call.rows : num_panels(call); }

  void pack(int64_t index) const;
  void multiply(int64_t first, int64_t last) const;

 private:
  using Panel = typename Weights::Panel;
  using Number = typename Weights::Number;
  static constexpr int kPack = sizeof(uint32_t) / sizeof(Number);

  static bool by_lanes(const Call& call) {
#if defined(JPAGED_TILES)
    if (std::is_same_v<Weights, Bfloat16Weights> && tiles_fit(call)) return call.rows <= kMaxLaneRowsByTiles;
#endif
    return call.rows <= kMaxLaneRows;
  }
  static bool tiles_fit(const Call& call) { return call.inputs % 32 == 0; }
  static int64_t num_panels(const Call& call) { return (call.rows + kLanes - 1) / kLanes; }
  static int64_t panel_words(const Call& call) { return call.inputs / kPack * kLanes; }
  static int64_t lane_stride(const Call& call) { return (call.inputs / kPack + kLanes - 1) / kLanes * kLanes * Panel::kOperands; }

  const uint32_t* weight_row(int64_t n) const {
    return reinterpret_cast<const uint32_t*>(call_.weights + n * call_.inputs * sizeof(Number));
  }

  void multiply_by_panels(int64_t first, int64_t last) const;
  void multiply_by_lanes(int64_t first, int64_t last) const;
  template <int kRows, int kColumns>
  void panel_sums(int64_t n, int64_t panel, float* tiles) const;
  template <int kRows>
  void lane_sums(int64_t n, int64_t last) const;
  void store_transposed(const float* tile, int64_t panel, int64_t n, int64_t outputs) const;

  const Call& call_;
  uint32_t* packed_;
};

// Packs panel `index`, or row `index` when the rows are multiplied along K.
template <class Weights>
void Product<Weights>::pack(int64_t index) const {
  const int64_t inputs = call_.inputs;
  if (by_lanes(call_)) {
    // As the weights lie, padded with zeros; widened bfloat16 has even and odd numbers in vectors of their own.
    uint32_t* target = packed_ + index * lane_stride(call_);
    const float* x = call_.x + index * inputs;
    for (int64_t k = 0; k < lane_stride(call_) / Panel::kOperands * kPack; ++k) {
      const float number = k < inputs ? x[k] : 0.0f;
      if constexpr (std::is_same_v<typename Panel::Operand, float>) {
        const int64_t word = k / kPack;
        const float kept = kPack == 1 ? number : widen(narrow(number));
        target[(word / kLanes * kPack + k % kPack) * kLanes + word % kLanes] = bits<uint32_t>(kept);
      } else {
        reinterpret_cast<uint16_t*>(target)[k] = narrow(number);
      }
    }
    return;
  }
  uint32_t* target = packed_ + index * panel_words(call_);
  const int64_t first_row = index * kLanes, rows = std::min<int64_t>(kLanes, call_.rows - first_row);
  const int64_t words = inputs / kPack;
  int64_t step = 0;
  for (; step + kLanes <= words; step += kLanes) {
    Floats lines[kLanes] = {};
    for (int64_t row = 0; row < rows; ++row) {
      const float* x = call_.x + (first_row + row) * inputs + step * kPack;
      if constexpr (kPack == 1) lines[row] = load<Floats>(x);
      else lines[row] = bits<Floats>(narrow_pairs(x));
    }
    transpose(lines);
    for (int i = 0; i < kLanes; ++i) store(target + (step + i) * kLanes, lines[i]);
  }
  for (; step < words; ++step) {
    for (int64_t row = 0; row < kLanes; ++row) {
      const float* x = call_.x + (first_row + std::min(row, rows - 1)) * inputs + step * kPack;
      uint32_t word;
      if constexpr (kPack == 1) word = bits<uint32_t>(x[0]);
      else word = narrow(x[0]) | uint32_t{narrow(x[1])} << 16;
      target[step * kLanes + row] = word;
    }
  }
}

// Outputs [first, last) of all rows.
template <class Weights>
void Product<Weights>::multiply(int64_t first, int64_t last) const {
  if (by_lanes(call_)) {
    multiply_by_lanes(first, last);
  } else {
    multiply_by_panels(first, last);
  }
}

// A tile holds 16 outputs by 16 rows of x; `outputs` of them are written.
template <class Weights>
void Product<Weights>::store_transposed(const float* tile, int64_t panel, int64_t n, int64_t outputs) const {
  const int64_t first_row = panel * kLanes, rows = std::min<int64_t>(kLanes, call_.rows - first_row);
  float* y = call_.y + first_row * call_.outputs + n;
  if (outputs < kLanes || rows <= 4) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < outputs; ++i) y[row * call_.outputs + i] = tile[i * kLanes + row];
    }
    return;
  }
  Floats lines[kLanes];
  for (int i = 0; i < kLanes; ++i) lines[i] = load<Floats>(tile + i * kLanes);
  transpose(lines);
  for (int64_t row = 0; row < rows; ++row) store(y + row * call_.outputs, lines[row]);
}

// tiles[column][row] = sums of kRows outputs from n and kColumns panels.
template <class Weights>
template <int kRows, int kColumns>
void Product<Weights>::panel_sums(int64_t n, int64_t panel, float* tiles) const {
  Floats sums[kRows][kColumns] = {};
  const uint32_t* weights[kRows];
  for (int i = 0; i < kRows; ++i) weights[i] = weight_row(n + i);
  const uint32_t* x = packed_ + panel * panel_words(call_);
  for (int64_t step = 0; step < call_.inputs / kPack; ++step) {
    for (int j = 0; j < kColumns; ++j) {
      const auto vector = Panel::read(x + j * panel_words(call_) + step * kLanes);
      for (int i = 0; i < kRows; ++i) sums[i][j] = Weights::multiply_add(sums[i][j], vector, weights[i][step]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) store(tiles + (j * kLanes + i) * kLanes, sums[i][j]);
  }
}

template <class Weights>
void Product<Weights>::multiply_by_panels(int64_t first, int64_t last) const {
  alignas(64) float tiles[4][kLanes][kLanes];
  static_assert(kMaxColumns <= 4);
  const int64_t panels = num_panels(call_);
#if defined(JPAGED_TILES)
  if constexpr (std::is_same_v<Weights, Bfloat16Weights>) {
    if (tiles_fit(call_)) {
      const TileShapes shapes(kLanes);
      const int64_t words = call_.inputs / 2;
      // Two by two tiles: each is read once for two products. The panels of a pair stay in the first cache.
      const int64_t tiles_end = first + (last - first) / kLanes * kLanes;
      for (int64_t panel = 0; panel < panels; panel += 2) {
        for (int64_t n = first; n < tiles_end; n += 2 * kLanes) {
          const int64_t blocks = n + kLanes < tiles_end ? 2 : 1, columns = std::min<int64_t>(2, panels - panel);
          const uint32_t* next = panel == 0 && n + 4 * kLanes <= call_.outputs ? weight_row(n + 2 * kLanes) : nullptr;
          tile_product(weight_row(n), words, packed_ + panel * panel_words(call_), panel_words(call_), words, blocks,
                       columns, next, &tiles[0][0][0]);
          for (int64_t block = 0; block < blocks; ++block) {
            for (int64_t j = 0; j < columns; ++j) {
              store_transposed(&tiles[2 * block + j][0][0], panel + j, n + block * kLanes, kLanes);
            }
          }
        }
      }
      first = tiles_end;
    }
  }
#endif
  for (int64_t n = first; n < last; n += kLanes) {
    const int64_t outputs = std::min<int64_t>(kLanes, last - n);
    const auto sums = [&]<int kColumns>(int64_t panel) {
      by_rows(outputs, [&]<int kRows>(int64_t row) {
        panel_sums<kRows, kColumns>(n + row, panel, &tiles[0][0][0] + row * kLanes);
      });
      for (int j = 0; j < kColumns; ++j) store_transposed(&tiles[j][0][0], panel + j, n, outputs);
    };
    int64_t panel = 0;
    for (; panel + kMaxColumns <= panels; panel += kMaxColumns) sums.template operator()<kMaxColumns>(panel);
    for (; panel < panels; ++panel) sums.template operator()<1>(panel);
  }
}

// Outputs [n, last) of kRows rows, four outputs at a time.
template <class Weights>
template <int kRows>
void Product<Weights>::lane_sums(int64_t row, int64_t n) const {
  constexpr int kOutputs = 4;
  const int64_t words = call_.inputs / kPack;
  const int64_t outputs = std::min<int64_t>(kOutputs, call_.outputs - n);
  const uint32_t* weights[kOutputs];
  for (int i = 0; i < kOutputs; ++i) weights[i] = weight_row(n + std::min<int64_t>(i, outputs - 1));
  const uint32_t* x = packed_ + row * lane_stride(call_);
  Floats sums[kOutputs][kRows] = {};
  const auto add = [&](const uint32_t* const* from, int64_t step) {
    for (int i = 0; i < kOutputs; ++i) {
      const auto vector = Panel::read(from[i]);
      for (int j = 0; j < kRows; ++j) {
        sums[i][j] = Panel::multiply_add_lanes(sums[i][j], vector, x + j * lane_stride(call_) + step * Panel::kOperands);
      }
    }
  };
  int64_t step = 0;
  for (; step + kLanes <= words; step += kLanes) {
    const uint32_t* from[kOutputs];
    for (int i = 0; i < kOutputs; ++i) {
      from[i] = weights[i] + step;
      __builtin_prefetch(from[i] + kOutputs * words);
    }
    add(from, step);
  }
  if (step < words) {
    uint32_t rest[kOutputs][kLanes] = {};
    const uint32_t* from[kOutputs];
    for (int i = 0; i < kOutputs; ++i) {
      std::copy(weights[i] + step, weights[i] + words, rest[i]);
      from[i] = rest[i];
    }
    add(from, step);
  }
  for (int j = 0; j < kRows; ++j) {
    for (int64_t i = 0; i < outputs; ++i) call_.y[(row + j) * call_.outputs + n + i] = sum(sums[i][j]);
  }
}

template <class Weights>
void Product<Weights>::multiply_by_lanes(int64_t first, int64_t last) const {
  // Units end at multiples of four outputs, but for the last.
  for (int64_t n = first; n < last; n += 4) {
    by_rows(call_.rows, [&]<int kRows>(int64_t row) { lane_sums<kRows>(row, n); });
  }
}

template <class Weights, class Pool>
void run_as(const Call& call, Pool& pool) {
  static thread_local Scratch<uint32_t> scratch;
  const Product<Weights> product(call, scratch.at_least(Product<Weights>::packed_words(call)));
  const int64_t packs = Product<Weights>::num_packs(call);
  if (call.rows <= 64) {
    for (int64_t pack = 0; pack < packs; ++pack) product.pack(pack);
  } else {
    parallel_for(pool, packs, [&](int64_t pack) { product.pack(pack); });
  }
  const int64_t row_bytes = call.inputs * static_cast<int64_t>(sizeof(typename Weights::Number));
  const int64_t fair_bytes = call.outputs * row_bytes / (kUnitsPerThread * std::max<int64_t>(1, pool.num_threads()));
  const int64_t width = std::max<int64_t>(1, std::min(kUnitBytes, fair_bytes) / row_bytes / kLanes) * kLanes;
  parallel_for(pool, (call.outputs + width - 1) / width, [&](int64_t unit) {
    product.multiply(unit * width, std::min(call.outputs, (unit + 1) * width));
  });
}

template <class Pool>
void run(const Call& call, bool is_bf16, Pool& pool) {
  is_bf16 ? run_as<Bfloat16Weights>(call, pool) : run_as<FloatWeights>(call, pool);
}

// x float32 [T, K]; weights [layers, N, K]; y float32 [T, N].
ffi::Error project(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weights, ffi::Buffer<ffi::S32> layer,
                   ffi::ResultBuffer<ffi::F32> y) {
  const int64_t outputs = weights.dimensions()[1], inputs = weights.dimensions()[2];
  const bool is_bf16 = weights.element_type() == ffi::DataType::BF16;
  const Call call{
      .x = x.typed_data(),
      .weights = static_cast<const char*>(weights.untyped_data()) +
                 *layer.typed_data() * outputs * inputs * (is_bf16 ? 2 : 4),
      .y = y->typed_data(),
      .rows = x.dimensions()[0],
      .outputs = outputs,
      .inputs = inputs,
  };
  move_to_huge_pages(weights.untyped_data(), weights.size_bytes());
  run(call, is_bf16, pool);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged::matmul

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_project, jpaged::matmul::project,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
#pragma GCC visibility pop
