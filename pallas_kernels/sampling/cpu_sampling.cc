// Draws a step's tokens from their logits and says how likely tokens are; a row is a unit of work.
//
// A row's logits are copied once, changed as its request wishes, and stay in the core's own cache. They are looked at
// in blocks, whose largest are known: what wants large logits alone, and most does, passes over nearly all of the row.
//
// A token is drawn as argmax(scaled + noise), where the noise of each token is a function of a hash: nearly all tokens
// are out of the question by a bound on their noise, which is cheap, and logarithms are taken of a few dozen.

#include <bit>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "parallel.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged::sampling {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kBlock = 8 * kLanes;  // tokens whose largest logit is known
constexpr int64_t kFew = 64;            // as many values are rather sorted than halved
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr uint32_t kGolden = 0x9E3779B9u;
constexpr float kLeastNoise = -3.0f, kMostNoise = 23.0f;  // there is none beyond
constexpr int32_t kInPrompt = 1 << 30;                    // in counts: more than any history is long

// The lanes for which a condition holds, as bits.
inline uint32_t lanes_of(Ints condition) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)condition);
#elif defined(__AVX2__)
  __m256 halves[2];
  memcpy(halves, &condition, sizeof condition);
  return _mm256_movemask_ps(halves[0]) | _mm256_movemask_ps(halves[1]) << 8;
#else
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= (condition[i] & 1) << i;
  return lanes;
#endif
}

// Appends the lanes of a vector that `lanes` names; up to a whole vector is written.
inline float* append(float* target, Floats v, uint32_t lanes) {
#if defined(__AVX512F__)
  _mm512_storeu_ps(target, _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), (__m512)v));
  return target + std::popcount(lanes);
#else
  for (; lanes != 0; lanes &= lanes - 1) *target++ = v[std::countr_zero(lanes)];
  return target;
#endif
}

// The noise of jpaged/execution/noise.py: the same hash, the same uniform numbers.

template <class Word>
inline Word mix(Word x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

struct Keys {
  uint32_t first, second;
  // Of tokens, given their ids times kGolden.
  template <class Word>
  Word bits(Word spread_ids) const {
    return mix(mix(spread_ids ^ first) + second);
  }
};

// Standard Gumbel noise: -log(-log(1 - v)). In float64, so that it is the same with every instruction set.
inline float noise_of(uint32_t bits) {
  const float fine = static_cast<float>(bits >> 8) + (static_cast<float>(bits & 0xff) + 0.5f) / 256;
  const float v = std::min(fine * 0x1p-24f, 1 - 0x1p-24f);
  return static_cast<float>(-std::log(-std::log1p(-static_cast<double>(v))));
}

// No noise exceeds -log(v), and no log2 of a float is less than what its bits are as a number. So with n = v * 2^24,
// rounded down, noise <= kBoundOffset - kBoundSlope * bits(n).
constexpr float kLog2 = 0.693147181f;
constexpr float kBoundSlope = kLog2 * 0x1p-23f;
constexpr float kBoundOffset = kLog2 * (127 + 24) + 1e-4f;  // and for rounding

inline Floats below_bound(Words bits_of_noise) {
  const Floats n = __builtin_convertvector(bits<Ints>(bits_of_noise >> 8), Floats);
  return __builtin_convertvector(bits<Ints>(n), Floats) * kBoundSlope;
}

// What a thread keeps from row to row.
struct Workspace {
  Scratch<float> values, maxima, order, chosen, weights;
  std::vector<int32_t> counts;  // all zero between rows
};

inline Workspace& workspace() {
  static thread_local Workspace own;
  return own;
}

// A copy of a row's logits, padded to whole blocks by tokens that are never drawn; NaN counts as one.
class Row {
 public:
  Row(const float* source, int64_t size, Workspace& space)
      : size_(size), num_blocks_((size + kBlock - 1) / kBlock), space_(space) {
    values_ = space.values.at_least(num_blocks_ * kBlock);
    maxima_ = space.maxima.at_least(num_blocks_);
    take(source);
  }

  int64_t size() const { return size_; }
  float* values() { return values_; }
  float operator[](int64_t token) const { return values_[token]; }
  float largest() const { return largest_; }

  // To be called when values have changed.
  void find_largest() { take(values_); }

  // The first of the tokens with the largest logit.
  int32_t argmax() const {
    for (int64_t block = 0; block < num_blocks_; ++block) {
      if (maxima_[block] < largest_) continue;
      const float* found = std::find(values_ + block * kBlock, values_ + (block + 1) * kBlock, largest_);
      return static_cast<int32_t>(std::min<int64_t>(found - values_, size_ - 1));
    }
    return 0;
  }

  // A value that at least `count` others of the row reach.
  float reached_by(int64_t count) const {
    if (count > num_blocks_) return kNever;
    float* order = space_.order.at_least(num_blocks_);
    std::copy(maxima_, maxima_ + num_blocks_, order);
    std::nth_element(order, order + count - 1, order + num_blocks_, std::greater<float>());
    return order[count - 1];
  }

  // Calls body(vector, first token) for all vectors of blocks that may reach a value, which body may raise.
  template <class Body>
  void for_each(const float& low, const Body& body) const {
    for (int64_t block = 0; block < num_blocks_; ++block) {
      if (maxima_[block] < low) continue;
      for (int64_t token = block * kBlock; token < (block + 1) * kBlock; token += kLanes) {
        body(load<Floats>(values_ + token), token);
      }
    }
  }

 private:
  void take(const float* source) {
    largest_ = kNever;
    const int64_t whole = size_ / kBlock;
    for (int64_t block = 0; block < whole; ++block) take_block(block, source + block * kBlock);
    if (whole < num_blocks_) {
      float last[kBlock];
      std::fill(last, last + kBlock, kNever);
      std::copy(source + whole * kBlock, source + size_, last);
      take_block(whole, last);
    }
  }

  void take_block(int64_t block, const float* source) {
    Floats top = broadcast(kNever);
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Floats v = max(load<Floats>(source + i), broadcast(kNever));  // the second, if the first is NaN
      store(values_ + block * kBlock + i, v);
      top = max(v, top);
    }
    maxima_[block] = jpaged::largest(top);
    largest_ = std::max(largest_, maxima_[block]);
  }

  int64_t size_, num_blocks_;
  Workspace& space_;
  float *values_, *maxima_, largest_;
};

// What requests do to logits before a token is drawn.

struct DrawCall {
  const float *logits, *numbers, *bias_values;
  const int32_t *words, *history, *blocked, *bias_ids;
  int32_t* drawn;
  int64_t rows, vocabulary, max_length, num_blocked, num_biases;

  // Fields of a row, as they lie in `numbers`, float32, and in `words`, int32.
  enum Number { kTemperature, kTopP, kLogMinP, kPresence, kFrequency, kRepetition, kNumbers };
  enum Word { kTopK, kFirstKey, kSecondKey, kRow, kPromptLength, kHistoryLength, kHasBias, kWords };
  float of(int64_t place, Number field) const { return numbers[field * rows + place]; }
  int32_t of(int64_t place, Word field) const { return words[field * rows + place]; }
};

inline bool is_token(int32_t id, int64_t vocabulary) { return id >= 0 && id < vocabulary; }

// Repetition as in CTRL (Keskar et al. 2019) and transformers; frequency and presence as OpenAI defines them.
bool penalise(const DrawCall& call, int64_t place, float* values, std::vector<int32_t>& counts) {
  const float repetition = call.of(place, DrawCall::kRepetition);
  const float frequency = call.of(place, DrawCall::kFrequency), presence = call.of(place, DrawCall::kPresence);
  const int64_t stop = std::min<int64_t>(call.of(place, DrawCall::kHistoryLength), call.max_length);
  const int64_t prompt = call.of(place, DrawCall::kPromptLength);
  const int64_t start = repetition != 1 ? 0 : prompt;
  if (start >= stop) return false;
  counts.resize(call.vocabulary);
  const int32_t* history = call.history + call.of(place, DrawCall::kRow) * call.max_length;
  for (int64_t position = start; position < stop; ++position) {
    if (!is_token(history[position], call.vocabulary)) continue;
    int32_t& count = counts[history[position]];
    count = position < prompt ? kInPrompt : count + 1;
  }
  for (int64_t position = start; position < stop; ++position) {
    if (!is_token(history[position], call.vocabulary)) continue;
    const int32_t count = std::exchange(counts[history[position]], 0);
    if (count == 0) continue;  // seen before in this loop
    float& value = values[history[position]];
    const int32_t generated = count & (kInPrompt - 1);
    value = value > 0 ? value / repetition : value * repetition;
    value -= frequency * static_cast<float>(generated);
    if (generated > 0) value -= presence;
  }
  return true;
}

// Blocks tokens, adds biases and penalises; returns whether anything has changed.
bool change(const DrawCall& call, int64_t place, Row& row, std::vector<int32_t>& counts) {
  bool changed = false;
  for (int64_t i = 0; i < call.num_blocked; ++i) {
    const int32_t id = call.blocked[place * call.num_blocked + i];
    if (!is_token(id, call.vocabulary)) continue;
    row.values()[id] = kNever;
    changed = true;
  }
  if (call.of(place, DrawCall::kHasBias)) {
    const int64_t first = call.of(place, DrawCall::kRow) * call.num_biases;
    for (int64_t i = first; i < first + call.num_biases; ++i) {
      if (is_token(call.bias_ids[i], call.vocabulary)) row.values()[call.bias_ids[i]] += call.bias_values[i];
    }
    changed = true;
  }
  return penalise(call, place, row.values(), counts) || changed;
}

// Draws a row's token, as jpaged/execution/sampler.py does: of what min_p, then top_k, then top_p keep, by logits from
// which the largest is subtracted and which are divided by the temperature.
class Draw {
 public:
  Draw(const DrawCall& call, int64_t place, const Row& row, Workspace& space)
      : row_(row),
        space_(space),
        temperature_(call.of(place, DrawCall::kTemperature)),
        rate_(std::min(1 / temperature_, std::numeric_limits<float>::max())),
        top_p_(call.of(place, DrawCall::kTopP)),
        log_min_p_(call.of(place, DrawCall::kLogMinP)),
        top_k_(call.of(place, DrawCall::kTopK)),
        keys_{static_cast<uint32_t>(call.of(place, DrawCall::kFirstKey)),
              static_cast<uint32_t>(call.of(place, DrawCall::kSecondKey))} {}

  int32_t token() const;

 private:
  // Some of the row's logits; without weights, each counts one.
  struct Chosen {
    float *values, *weights;
    int64_t count;
  };

  template <class Number>
  Number scale(Number logit) const {
    return (logit - row_.largest()) / temperature_;
  }
  float lowest_kept() const;
  // Below any logit that `scale` takes to this or more.
  float logit_below(float scaled) const { return slightly_below(row_.largest() + scaled * temperature_); }
  float slightly_below(float logit) const {
    return logit == kNever ? kLowest : logit - 1e-6f * (std::abs(logit) + std::abs(row_.largest()));
  }
  Chosen choose(float low, float lowest_scaled) const;
  double weigh(Chosen& chosen) const;
  float reaching(Chosen chosen, double wanted) const;

  const Row& row_;
  Workspace& space_;
  float temperature_, rate_, top_p_, log_min_p_;
  int64_t top_k_;
  Keys keys_;
};

// The lowest scaled logit that the filters keep.
float Draw::lowest_kept() const {
  const bool is_counted = top_k_ > 0 && top_k_ < row_.size(), is_weighed = top_p_ < 1;
  float lowest = log_min_p_;
  if (!is_counted && !is_weighed) return lowest;
  float low = logit_below(lowest);
  if (is_counted) low = std::max(low, slightly_below(row_.reached_by(top_k_)));
  Chosen chosen = choose(low, lowest);
  if (is_counted && top_k_ <= chosen.count) {
    lowest = std::max(lowest, scale(reaching(chosen, static_cast<double>(top_k_))));
    if (is_weighed) chosen = choose(logit_below(lowest), lowest);
  }
  if (is_weighed && chosen.count > 0) {
    // Below the clamp the product could round to zero, which no token at all would satisfy.
    const double wanted = std::max(top_p_, 1e-30f) * weigh(chosen);
    lowest = std::max(lowest, scale(reaching(chosen, wanted)));
  }
  return lowest;
}

// The logits that scale to `lowest_scaled` or more, given that none below `low` does.
Draw::Chosen Draw::choose(float low, float lowest_scaled) const {
  float* values = space_.chosen.at_least(row_.size() + 2 * kBlock);
  float* end = values;
  row_.for_each(low, [&](Floats v, int64_t) {
    uint32_t lanes = lanes_of(v >= low);
    if (lanes != 0 && lowest_scaled > kNever) lanes &= lanes_of(scale(v) >= lowest_scaled);
    if (lanes != 0) end = append(end, v, lanes);
  });
  return {values, nullptr, end - values};
}

// Gives them weights, their probabilities but for a factor, and returns what those sum to.
double Draw::weigh(Chosen& chosen) const {
  chosen.weights = space_.weights.at_least(chosen.count + kLanes);
  std::fill(chosen.values + chosen.count, chosen.values + chosen.count + kLanes, kNever);
  Floats total = {};
  for (int64_t i = 0; i < chosen.count; i += kLanes) {
    const Floats weights = exp((load<Floats>(chosen.values + i) - row_.largest()) * rate_);
    store(chosen.weights + i, weights);
    total += weights;
  }
  return sum(total);
}

// The largest value for which it and those above sum to what is wanted, or the smallest of all.
//
// The interval in which it lies is halved; what lies outside is dropped now and then.
float Draw::reaching(Chosen chosen, double wanted) const {
  float *values = chosen.values, *weights = chosen.weights;
  int64_t count = chosen.count;
  double above = 0;  // of what was dropped for being too large
  const auto pad = [&] { std::fill(values + count, values + count + kLanes, kNever); };
  const auto sum_from = [&](float low) {
    Floats total = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      const Ints reaches = load<Floats>(values + i) >= low;
      total += select(reaches, weights == nullptr ? broadcast(1) : load<Floats>(weights + i), Floats{});
    }
    return above + sum(total);
  };
  pad();
  // Above all values, and no denormal, which XLA's threads take for zero.
  float low = kNever, high = row_.largest() + std::max(1e-6f * std::abs(row_.largest()), 1e-30f);
  while (count > kFew) {
    Floats top = broadcast(kNever), bottom = broadcast(kNever);  // of the values, and of the values negated
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats v = load<Floats>(values + i);
      top = max(v, top);
      bottom = max(select(v > kNever, -v, bottom), bottom);
    }
    low = -largest(bottom);
    if (low == largest(top)) return low;
    for (int round = 0; round < 2; ++round) {
      const float middle = low / 2 + high / 2;
      if (!(low < middle && middle < high)) return low;
      (sum_from(middle) >= wanted ? low : high) = middle;
    }
    above = sum_from(high);
    float *kept_values = values, *kept_weights = weights;
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats v = load<Floats>(values + i);
      const uint32_t lanes = lanes_of((v >= low) & (v < high));
      if (lanes == 0) continue;
      if (weights != nullptr) kept_weights = append(kept_weights, load<Floats>(weights + i), lanes);
      kept_values = append(kept_values, v, lanes);
    }
    count = kept_values - values;
    pad();
  }
  std::pair<float, float> rest[kFew];
  for (int64_t i = 0; i < count; ++i) rest[i] = {values[i], weights == nullptr ? 1.0f : weights[i]};
  std::sort(rest, rest + count, std::greater<>());
  for (int64_t i = 0; i < count; ++i) {
    above += rest[i].second;
    if (above >= wanted) return rest[i].first;
  }
  return count > 0 ? rest[count - 1].first : low;
}

int32_t Draw::token() const {
  int32_t token = row_.argmax();
  if (!(temperature_ > 0) || !std::isfinite(row_.largest())) return token;
  const float lowest = lowest_kept(), kept_from = logit_below(lowest);
  float best = kNever, low = kept_from, limit;
  const auto raise = [&](float noisy) {
    best = noisy;
    // The most likely token is always kept, so that the best is at least its least.
    const float reached = std::max(best, kLeastNoise);
    limit = reached - kBoundOffset;
    low = std::max(kept_from, logit_below(reached - kMostNoise));
  };
  raise(kNever);
  const Words steps = bits<Words>(lane_numbers()) * kGolden;
  row_.for_each(low, [&](Floats v, int64_t first) {
    const Words noise = keys_.bits(steps + static_cast<uint32_t>(first) * kGolden);
    const Floats reach = (v - row_.largest()) * rate_ - below_bound(noise);
    uint32_t lanes = lanes_of((reach > limit) & (v >= kept_from));
    for (; lanes != 0; lanes &= lanes - 1) {
      const int lane = std::countr_zero(lanes);
      const float scaled = scale(v[lane]), noisy = scaled + noise_of(noise[lane]);
      if (scaled < lowest || !(noisy > best)) continue;
      raise(noisy);
      token = static_cast<int32_t>(first + lane);
    }
  });
  return token;
}

template <class Pool>
void run(const DrawCall& call, Pool& pool) {
  parallel_for(pool, call.rows, [&](int64_t place) {
    Workspace& space = workspace();
    Row row(call.logits + place * call.vocabulary, call.vocabulary, space);
    if (change(call, place, row, space.counts)) row.find_largest();
    call.drawn[place] = Draw(call, place, row, space).token();
  });
}

// How likely tokens are.

struct DescribeCall {
  const float *logits, *temperatures;
  const int32_t* token_ids;
  int32_t* described;
  int64_t rows, vocabulary, num_best;
};

// The `count` largest logits and their tokens, the first token first among equals, -inf beyond the vocabulary.
void find_best(const Row& row, int64_t count, std::vector<std::pair<float, int32_t>>& best) {
  const float low = row.reached_by(count);
  int64_t equal = 0;
  best.clear();
  row.for_each(low, [&](Floats v, int64_t first) {
    for (uint32_t lanes = lanes_of(v >= low); lanes != 0; lanes &= lanes - 1) {
      const int64_t token = first + std::countr_zero(lanes);
      // Of those at the bound, of which there may be any number, the first are enough.
      if (token < row.size() && (row[token] > low || equal++ < count)) best.emplace_back(row[token], token);
    }
  });
  const auto by_rank = [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  };
  const auto end = best.begin() + std::min<int64_t>(count, static_cast<int64_t>(best.size()));
  std::partial_sort(best.begin(), end, best.end(), by_rank);
  best.resize(count, {kNever, 0});
}

void describe_row(const DescribeCall& call, int64_t place) {
  const Row row(call.logits + place * call.vocabulary, call.vocabulary, workspace());
  const float temperature = call.temperatures[place];
  const float own = row[std::clamp<int64_t>(call.token_ids[place], 0, call.vocabulary - 1)];
  int64_t rank = 0;
  row.for_each(own, [&](Floats v, int64_t) { rank += std::popcount(lanes_of(v >= own)); });
  Floats mass = {};
  const float rate = 1 / temperature, largest = row.largest();
  row.for_each(kNever, [&](Floats v, int64_t) { mass += exp((v - largest) * rate); });
  const float log_mass = std::log(sum(mass));
  static thread_local std::vector<std::pair<float, int32_t>> best;
  find_best(row, call.num_best, best);
  const auto logprob = [&](float logit) { return bits<int32_t>((logit - largest) / temperature - log_mass); };
  int32_t* target = call.described + place * (2 + 2 * call.num_best);
  target[0] = logprob(own);
  target[1] = static_cast<int32_t>(std::min(rank, call.vocabulary));  // padding is never in front
  for (int64_t i = 0; i < call.num_best; ++i) {
    target[2 + i] = best[i].second;
    target[2 + call.num_best + i] = logprob(best[i].first);
  }
}

template <class Pool>
void run(const DescribeCall& call, Pool& pool) {
  parallel_for(pool, call.rows, [&](int64_t place) { describe_row(call, place); });
}

// Letters: S places, V vocabulary, R rows of histories of up to M tokens, B blocked tokens, N biases of a row.
ffi::Error draw(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::F32> numbers,
                ffi::Buffer<ffi::S32> words, ffi::Buffer<ffi::S32> history, ffi::Buffer<ffi::S32> blocked,
                ffi::Buffer<ffi::S32> bias_ids, ffi::Buffer<ffi::F32> bias_values, ffi::ResultBuffer<ffi::S32> drawn) {
  const DrawCall call{
      .logits = logits.typed_data(),            // [S, V]
      .numbers = numbers.typed_data(),          // [kNumbers, S]
      .bias_values = bias_values.typed_data(),  // [R, N]
      .words = words.typed_data(),              // [kWords, S]
      .history = history.typed_data(),          // [R, M]
      .blocked = blocked.typed_data(),          // [S, B]
      .bias_ids = bias_ids.typed_data(),        // [R, N]
      .drawn = drawn->typed_data(),             // [S]
      .rows = logits.dimensions()[0],
      .vocabulary = logits.dimensions()[1],
      .max_length = history.dimensions()[1],
      .num_blocked = blocked.dimensions()[1],
      .num_biases = bias_ids.dimensions()[1],
  };
  if (numbers.dimensions()[0] != DrawCall::kNumbers || words.dimensions()[0] != DrawCall::kWords) {
    return ffi::Error::InvalidArgument("fields of rows are missing");
  }
  run(call, pool);
  return ffi::Error::Success();
}

ffi::Error describe(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> token_ids,
                    ffi::Buffer<ffi::F32> temperatures, ffi::ResultBuffer<ffi::S32> described) {
  const DescribeCall call{
      .logits = logits.typed_data(),              // [S, V]
      .temperatures = temperatures.typed_data(),  // [S]
      .token_ids = token_ids.typed_data(),        // [S]
      .described = described->typed_data(),       // [S, 2 + 2 * num_best]
      .rows = logits.dimensions()[0],
      .vocabulary = logits.dimensions()[1],
      .num_best = (described->dimensions()[1] - 2) / 2,
  };
  run(call, pool);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged::sampling

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_draw, jpaged::sampling::draw,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_describe, jpaged::sampling::describe,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());
#pragma GCC visibility pop
