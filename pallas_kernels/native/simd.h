// Vectors of 16 lanes for every instruction set, and products of rows of operands with packed vectors.
//
// A translation unit is compiled for one instruction set: the compiler splits a vector over as many registers as it
// needs, and JPAGED_* says which special instructions may be used.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define JPAGED_BF16_DOT 1
#endif
#if defined(__AMX_BF16__) && defined(JPAGED_BF16_DOT)
#define JPAGED_TILES 1
#endif

namespace jpaged {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// How many rows and columns of sums fit the registers beside what is multiplied.
#if defined(__AVX512F__)
constexpr int kMaxRows = 4, kMaxColumns = 4;
#elif defined(__AVX2__)
constexpr int kMaxRows = 4, kMaxColumns = 1;
#else
constexpr int kMaxRows = 2, kMaxColumns = 1;
#endif

template <class Vector>
inline Vector load(const void* source) {
  Vector v;
  memcpy(&v, source, sizeof v);
  return v;
}

// The first `count` of 16 numbers, and zeros.
inline Floats load_some(const float* source, int64_t count) {
  if (count >= kLanes) return load<Floats>(source);
  Floats v = {};
  if (count > 0) memcpy(&v, source, static_cast<size_t>(count) * sizeof(float));
  return v;
}

template <class Vector>
inline void store(void* target, Vector v) {
  memcpy(target, &v, sizeof v);
}

template <class To, class From>
inline To bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &v, sizeof to);
  return to;
}

inline Floats broadcast(float x) { return Floats{} + x; }

inline Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

inline Floats select(Ints condition, Floats yes, Floats no) {
  return bits<Floats>((condition & bits<Ints>(yes)) | (~condition & bits<Ints>(no)));
}

inline Floats max(Floats a, Floats b) { return select(a > b, a, b); }

inline float largest(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float top = v[0];
  for (int i = 1; i < kLanes; ++i) top = std::max(top, v[i]);
  return top;
#endif
}

inline float sum(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

// exp, to about 1 ulp, for x up to 88; 0 below -87. Range reduction and polynomial are those of Cephes' expf.
inline Floats exp(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  Floats clamped = select(x > -87.0f, x, broadcast(-87.0f));
  Floats n = (clamped * 1.44269504088896341f + kRound) - kRound;
  Floats r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return select(x > -87.0f, p * bits<Floats>(exponent), Floats{});
}

inline Floats tanh(Floats x) {
  Floats clamped = select(x > 15.0f, broadcast(15.0f), select(x < -15.0f, broadcast(-15.0f), x));
  return 1.0f - 2.0f / (exp(clamped * 2.0f) + 1.0f);
}

inline float widen(uint16_t x) { return bits<float>(uint32_t{x} << 16); }

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t narrow(float x) {
  uint32_t u = bits<uint32_t>(x);
  if (x != x) return (u >> 16) | 0x40;
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

// 16 floats as bfloat16, lane by lane.
inline Halves narrow(Floats v) {
#if defined(JPAGED_BF16_DOT)
  return bits<Halves>(_mm512_cvtneps_pbh((__m512)v));
#else
  const Words u = bits<Words>(v);
  const Words rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, nan = (u >> 16) | 0x40;
  const Words is_number = bits<Words>(v == v);
  return __builtin_convertvector((rounded & is_number) | (nan & ~is_number), Halves);
#endif
}

inline Floats widen(Halves v) { return bits<Floats>(__builtin_convertvector(v, Words) << 16); }

// Writes the first `count` of 16 numbers.
inline void store_some(float* target, Floats v, int64_t count) {
  if (count >= kLanes) {
    store(target, v);
  } else {
    memcpy(target, &v, static_cast<size_t>(count) * sizeof(float));
  }
}

// A format says how numbers lie in packed vectors. A packed vector has 16 words; each word holds kPack numbers that are
// multiplied with kPack operands and summed. Operands are kept as kOperands values a word.

struct Float32 {
  using Operand = float;
  static constexpr int kPack = 1, kOperands = 1;
  struct Vector {
    Floats v;
  };
  static Vector read(const uint32_t* words) { return {load<Floats>(words)}; }
  static Floats multiply_add(Floats sum, const Vector& x, const Operand* operand) { return sum + x.v * operand[0]; }
};

// bfloat16 in pairs, multiplied in float32.
struct Bfloat16 {
  using Operand = float;
  static constexpr int kPack = 2, kOperands = 2;
  struct Vector {
    Floats even, odd;
  };
  static Vector read(const uint32_t* words) {
    Words pair = load<Words>(words);
    return {bits<Floats>(pair << 16), bits<Floats>(pair & 0xffff0000u)};
  }
  static Floats multiply_add(Floats sum, const Vector& x, const Operand* operand) {
    sum = sum + x.even * operand[0];
    return sum + x.odd * operand[1];
  }
};

#if defined(JPAGED_BF16_DOT)
// bfloat16 in pairs against operands in bfloat16 pairs.
struct Bfloat16Dot {
  using Operand = uint32_t;
  static constexpr int kPack = 2, kOperands = 1;
  struct Vector {
    __m512bh v;
  };
  static Vector read(const uint32_t* words) { return {load<__m512bh>(words)}; }
  static Floats multiply_add(Floats sum, const Vector& x, const Operand* operand) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, x.v, (__m512bh)_mm512_set1_epi32((int)*operand));
  }
};
#endif

// Puts 16 numbers where operands of 16 / kPack words are read.
template <class Format>
inline void store_operands(typename Format::Operand* target, Floats v) {
  if constexpr (sizeof(typename Format::Operand) * Format::kOperands / Format::kPack == 2) {
    store(target, narrow(v));
  } else {
    store(target, v);
  }
}

// Calls body.template operator()<kRows>(first) for all of `count` rows, as many at a time as there are registers for.
template <class Body>
inline void by_rows(int64_t count, const Body& body) {
  int64_t row = 0;
  for (; row + kMaxRows <= count; row += kMaxRows) body.template operator()<kMaxRows>(row);
  switch (count - row) {
    case 3:
      if constexpr (kMaxRows > 3) body.template operator()<3>(row);
      break;
    case 2:
      if constexpr (kMaxRows > 2) body.template operator()<2>(row);
      break;
    case 1:
      body.template operator()<1>(row);
      break;
  }
}

// 16 vectors as a matrix, transposed by four perfect shuffles of its rows' halves.
inline void transpose(Floats (&lines)[kLanes]) {
  for (int round = 0; round < 4; ++round) {
    Floats shuffled[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      const Floats a = lines[i], b = lines[i + kLanes / 2];
#if defined(__clang__)
      shuffled[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      shuffled[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
      shuffled[2 * i] = __builtin_shuffle(a, b, Ints{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
      shuffled[2 * i + 1] = __builtin_shuffle(a, b, Ints{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#endif
    }
    for (int i = 0; i < kLanes; ++i) lines[i] = shuffled[i];
  }
}

// Memory that is kept by a thread from call to call and grows as needed.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { free(data_); }

  T* at_least(size_t count) {
    if (count > count_) {
      free(data_);
      data_ = static_cast<T*>(aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64));
      if (data_ == nullptr) throw std::bad_alloc();
      count_ = count;
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace jpaged
