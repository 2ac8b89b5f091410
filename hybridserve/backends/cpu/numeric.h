// Vectors of fp32 with loads and stores of fp32 and bf16. Included by every kernel; knows nothing of tensors or operations.
//
// Results must not depend on how a kernel is tiled: multiply-adds are written as fma(), the flags forbid the compiler to contract or
// reassociate anything else, and lanes are always summed in the order of sum_lanes().
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hybridserve {

// SIXTEEN_LANES gives a processor with AVX2 the vectors of one with AVX-512, as pairs: so that the order of sums there is tested here.
#if defined(__AVX512F__) || defined(SIXTEEN_LANES)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

struct bf16 {
    uint16_t bits;
};

typedef float vf __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// While it lives, denormal numbers are zero for this thread's fp32 arithmetic. On many processors one of them costs as much as a hundred
// others, and a state that fades reaches them. What was set before comes back, since the thread is not ours alone.
class FlushDenormals {
#if defined(__SSE2__)
    static constexpr unsigned FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZERO = 0x0040;
    unsigned before_ = _mm_getcsr();

  public:
    FlushDenormals() { _mm_setcsr(before_ | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO); }
    ~FlushDenormals() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
    static constexpr uint64_t FLUSH_TO_ZERO = 1u << 24;
    uint64_t before_;

  public:
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(before_ | FLUSH_TO_ZERO));
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }
#else
  public:
    FlushDenormals() {}
    ~FlushDenormals() {}
#endif
    FlushDenormals(const FlushDenormals &) = delete;
    FlushDenormals &operator=(const FlushDenormals &) = delete;
};

static inline vf splat(float x) { return x - vf{}; }

static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(SIXTEEN_LANES)
    __m256 half[3][2];
    memcpy(half[0], &a, sizeof a), memcpy(half[1], &b, sizeof b), memcpy(half[2], &c, sizeof c);
    for (int i = 0; i < 2; i++)
        half[0][i] = _mm256_fmadd_ps(half[0][i], half[1][i], half[2][i]);
    memcpy(&a, half[0], sizeof a);
    return a;
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline vf load(const bf16 *p) {
    vh half;
    memcpy(&half, p, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

// Two vectors of weights or of what they are multiplied with. bf16 is widened to its even and its odd entries, one cheap
// instruction each; so the fp32 side of a product with bf16 is kept in that order too.
struct pair {
    vf first, second;
};
static inline pair load_pair(const float *p) { return {load(p), load(p + LANES)}; }
static inline pair load_pair(const bf16 *p) {
    vu bits;
    memcpy(&bits, p, sizeof bits);
    return {(vf)(bits << 16), (vf)(bits & 0xffff0000u)};
}

// The first n lanes; the others are zero and their memory is not touched.
template <class T> static inline vf load_first(const T *p, int64_t n) {
    T padded[LANES] = {};
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
template <class T> static inline pair load_pair_first(const T *p, int64_t n) {
    T padded[2 * LANES] = {};
    memcpy(padded, p, n * sizeof(T));
    return load_pair(padded);
}

// bf16 rounds to nearest even; a NaN stays a NaN.
static inline void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
static inline void store(bf16 *p, vf v) {
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vi is_nan = v != v;
    rounded = (rounded & ~(vu)is_nan) | (0x7fc0 & (vu)is_nan);
    vh half = __builtin_convertvector(rounded, vh);
    memcpy(p, &half, sizeof half);
}
// To memory that is aligned to whole vectors: on some processors the other form is two stores.
static inline void store_aligned(float *p, vf v) { *(vf *)__builtin_assume_aligned(p, sizeof v) = v; }
static inline vf load_aligned(const float *p) { return *(const vf *)__builtin_assume_aligned(p, sizeof(vf)); }
template <class T> static inline void store_first(T *p, vf v, int64_t n) {
    T padded[LANES];
    store(padded, v);
    memcpy(p, padded, n * sizeof(T));
}

template <class T> static inline vf load_some(const T *p, int64_t n) { return n >= LANES ? load(p) : load_first(p, n); }
template <class T> static inline void store_some(T *p, vf v, int64_t n) {
    if (n >= LANES)
        store(p, v);
    else
        store_first(p, v, n);
}

typedef float v4 __attribute__((vector_size(16)));

static inline v4 fold_to_four(vf v) {
    v4 part[LANES / 4];
    memcpy(part, &v, sizeof v);
#if defined(__AVX512F__) || defined(SIXTEEN_LANES)
    return (part[0] + part[1]) + (part[2] + part[3]);
#elif defined(__AVX__)
    return part[0] + part[1];
#else
    return part[0];
#endif
}

// Sums of the lanes of four vectors. Every sum of lanes in this backend has this order, whatever the tile.
static inline v4 sum_lanes(vf a, vf b, vf c, vf d) {
    v4 p = fold_to_four(a), q = fold_to_four(b), r = fold_to_four(c), s = fold_to_four(d);
    typedef int32_t i4 __attribute__((vector_size(16)));
    v4 pq = __builtin_shuffle(p, q, i4{0, 4, 1, 5}) + __builtin_shuffle(p, q, i4{2, 6, 3, 7});
    v4 rs = __builtin_shuffle(r, s, i4{0, 4, 1, 5}) + __builtin_shuffle(r, s, i4{2, 6, 3, 7});
    return __builtin_shuffle(pq, rs, i4{0, 1, 4, 5}) + __builtin_shuffle(pq, rs, i4{2, 3, 6, 7});
}
static inline float sum_lanes(vf a) {
    v4 p = fold_to_four(a);
    return (p[0] + p[2]) + (p[1] + p[3]);
}

static inline vf choose(vi condition, vf yes, vf no) { return (vf)(((vi)yes & condition) | ((vi)no & ~condition)); }

// A NaN passes; what is outside becomes the limit.
static inline vf within(float low, vf x, float high) {
    x = choose(x < splat(low), splat(low), x);
    return choose(x > splat(high), splat(high), x);
}

// e^x within 2 units in the last place, in place, for x between -87 and 88. One vector is a long chain of dependent instructions: N
// vectors abreast take hardly more time.
template <int N> static inline void exp_in_range(vf *x) {
    vf shifted[N], r[N], p[N];
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
    vf magic = splat(12582912.0f);
    for (int i = 0; i < N; i++)
        shifted[i] = fma(x[i], splat(1.44269504f), magic);
    for (int i = 0; i < N; i++)
        r[i] = fma(shifted[i] - magic, splat(-0.693359375f), x[i]);
    for (int i = 0; i < N; i++)
        r[i] = fma(shifted[i] - magic, splat(2.12194440e-4f), r[i]);
    for (int i = 0; i < N; i++)
        p[i] = fma(splat(1.9875691500e-4f), r[i], splat(1.3981999507e-3f));
    constexpr float COEFFICIENTS[] = {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (float coefficient : COEFFICIENTS)
        for (int i = 0; i < N; i++)
            p[i] = fma(p[i], r[i], splat(coefficient));
    for (int i = 0; i < N; i++) {
        vf y = fma(p[i], r[i] * r[i], r[i]) + splat(1.0f);
        // The low bits of `shifted` are an integer: moved into the exponent they multiply by that power of 2.
        x[i] = (vf)((vi)y + ((vi)shifted[i] << 23));
    }
}

// e^x in place; 0 below -87, infinity above 88.
template <int N> static inline void exp_lanes(vf *x) {
    vf y[N];
    for (int i = 0; i < N; i++)
        y[i] = within(-87.0f, x[i], 88.0f);
    exp_in_range<N>(y);
    for (int i = 0; i < N; i++) {
        y[i] = choose(x[i] > splat(88.0f), splat(INFINITY), y[i]);
        x[i] = choose(x[i] < splat(-87.0f), vf{}, choose(x[i] == x[i], y[i], x[i]));
    }
}
static inline vf exp_lanes(vf x) {
    exp_lanes<1>(&x);
    return x;
}

// 1 / (1 + e^-x), in place.
template <int N> static inline void sigmoid_lanes(vf *x) {
    vf y[N];
    for (int i = 0; i < N; i++)
        y[i] = within(-87.0f, -x[i], 88.0f);
    exp_in_range<N>(y);
    for (int i = 0; i < N; i++)
        x[i] = choose(x[i] < splat(-88.0f), vf{}, choose(x[i] == x[i], splat(1.0f) / (splat(1.0f) + y[i]), x[i]));
}
static inline vf sigmoid_lanes(vf x) {
    sigmoid_lanes<1>(&x);
    return x;
}

static inline vf round_to_bf16(vf v) {
    bf16 rounded[LANES];
    store(rounded, v);
    return load(rounded);
}

// Elements whose type is known only at run time.
struct elements {
    const void *data;
    bool is_bf16;

    float at(int64_t i) const { return is_bf16 ? to_float(static_cast<const bf16 *>(data)[i]) : static_cast<const float *>(data)[i]; }
    vf some(int64_t i, int64_t n) const {
        return is_bf16 ? load_some(static_cast<const bf16 *>(data) + i, n) : load_some(static_cast<const float *>(data) + i, n);
    }
    // `count` elements from i on as fp32, with zeros up to a whole number of vectors.
    void widen(int64_t i, int64_t count, float *out) const {
        for (int64_t p = 0; p < count; p += LANES)
            store(out + p, some(i + p, count - p));
    }
};

static inline void store_elements(void *data, bool is_bf16, int64_t at, vf v, int64_t count) {
    if (is_bf16)
        store_some(static_cast<bf16 *>(data) + at, v, count);
    else
        store_some(static_cast<float *>(data) + at, v, count);
}

// Memory that a thread keeps between calls: kernels run in a fixed pool of threads, so this is bounded by the largest call.
class Scratch {
  public:
    float *floats(int64_t count) {
        if (count > capacity_) {
            free(memory_);
            capacity_ = round_up(count, 1024);
            memory_ = static_cast<float *>(aligned_alloc(64, capacity_ * 4));
            if (memory_ == nullptr)
                abort();
        }
        return memory_;
    }
    ~Scratch() { free(memory_); }

  private:
    float *memory_ = nullptr;
    int64_t capacity_ = 0;
};

} // namespace hybridserve
