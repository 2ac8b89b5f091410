// The gated delta rule and the scan of Mamba-2, row after row. Called through ctypes by recurrence.py.
//
// A state is [V, K] for each head. Rows of V do not touch each other, so work is split over sequences, heads and blocks of V. Each
// state row goes through the same arithmetic whatever the block, the chunk or the call: results have the same bits however a
// sequence is cut into passes.
#include "slots.h"

using namespace hybridserve;

namespace {

// Rows of the batch that are prepared together; state rows that are updated together, in groups that fill the vector registers.
constexpr int64_t CHUNK = 16;
constexpr int STATE_ROWS = 8;
constexpr int GROUPS = 2;

struct Rows {
    elements data;
    int64_t row_stride, head_stride;

    int64_t at(int64_t row, int64_t head) const { return row * row_stride + head * head_stride; }
};

struct Recurrence {
    Rows q, k, v, log_decay, beta; // beta without data: the scan
    bool decay_per_channel, qk_l2norm;
    float scale;
    char *pool;
    int64_t slot_nbytes;
    void *out;
    bool out_is_bf16;
    int64_t key_heads, heads, key_size, value_size;
    int threads;

    int64_t padded() const { return round_up(key_size, LANES); }
};

// One chunk of one head, fp32, ready for the state rows.
struct Chunk {
    int64_t count, padded;
    float *q, *k;     // [CHUNK, padded]
    float *decay;     // [CHUNK, padded] per channel, else [CHUNK]
    float *overlap;   // [CHUNK]: k . q
    float *beta;      // [CHUNK]
};

// State rows: where they come from or go to.
struct Place {
    float *rows;
    int64_t stride;

    Place at(int64_t row) const { return {rows + row * stride, stride}; }
};

float dot(const float *a, const float *b, int64_t padded) {
    vf sum = {};
    for (int64_t i = 0; i < padded; i += LANES)
        sum = fma(load(a + i), load(b + i), sum);
    return sum_lanes(sum);
}

void scale_row(float *row, float factor, int64_t padded) {
    for (int64_t i = 0; i < padded; i += LANES)
        store(row + i, load(row + i) * splat(factor));
}

void prepare(const Recurrence &r, int64_t first, int64_t head, Chunk &c) {
    int64_t key_head = head / (r.heads / r.key_heads);
    for (int64_t t = 0; t < c.count; t++) {
        int64_t row = first + t;
        float *q = c.q + t * c.padded, *k = c.k + t * c.padded;
        r.q.data.widen(r.q.at(row, key_head), r.key_size, q);
        r.k.data.widen(r.k.at(row, key_head), r.key_size, k);
        if (r.qk_l2norm) {
            scale_row(q, 1.0f / sqrtf(dot(q, q, c.padded) + 1e-6f), c.padded);
            scale_row(k, 1.0f / sqrtf(dot(k, k, c.padded) + 1e-6f), c.padded);
        }
        scale_row(q, r.scale, c.padded);
        c.overlap[t] = dot(q, k, c.padded);
        if (r.decay_per_channel) {
            float *decay = c.decay + t * c.padded;
            r.log_decay.data.widen(r.log_decay.at(row, head), r.key_size, decay);
            for (int64_t i = 0; i < c.padded; i += LANES)
                store(decay + i, exp_lanes(load(decay + i)));
        } else
            c.decay[t] = expf(r.log_decay.data.at(r.log_decay.at(row, head)));
        if (r.beta.data.data != nullptr)
            c.beta[t] = r.beta.data.at(r.beta.at(row, head));
    }
}

// S <- (S + u before^T) decay in work, then S k and S q. Of the first row in a chunk S comes from elsewhere and u is nothing.
template <int R, bool FIRST, bool DELTA, bool PER_CHANNEL>
static inline void walk(const Chunk &c, int64_t t, Place from, float *work, const float *u, vf *with_k, vf *with_q) {
    const float *q = c.q + t * c.padded, *k = c.k + t * c.padded, *before = k - c.padded;
    const float *decay = c.decay + (PER_CHANNEL ? t * c.padded : t);
    vf fade = splat(*decay), add[R], sum_k[R] = {}, sum_q[R] = {};
    for (int r = 0; r < R; r++)
        add[r] = splat(u[r]);
    for (int64_t i = 0; i < c.padded; i += LANES) {
        if (PER_CHANNEL)
            fade = load_aligned(decay + i);
        vf ki = load_aligned(k + i), qi = load_aligned(q + i), last = FIRST ? vf{} : load_aligned(before + i);
        for (int r = 0; r < R; r++) {
            float *row = work + r * c.padded + i;
            vf s;
            if (FIRST) {
                const float *source = from.rows + r * from.stride + i;
                __builtin_prefetch(source + R * from.stride);
                s = load(source);
            } else
                s = fma(add[r], last, load_aligned(row));
            s = s * fade;
            store_aligned(row, s);
            if (DELTA)
                sum_k[r] = fma(s, ki, sum_k[r]);
            sum_q[r] = fma(s, qi, sum_q[r]);
        }
    }
    for (int r = 0; r < R; r++) {
        with_k[r] = sum_k[r];
        with_q[r] = sum_q[r];
    }
}

// What a row of the batch adds to R state rows, u = beta (v - S k) or v, and its answers y = S q + u (k . q).
template <int R, bool DELTA>
static inline void conclude(const Chunk &c, int64_t t, const vf *with_k, const vf *with_q, const float *v, float *y, float *u) {
    float seen[R] = {}, answer[R];
    if constexpr (R == 4) {
        v4 q = sum_lanes(with_q[0], with_q[1], with_q[2], with_q[3]);
        memcpy(answer, &q, 16);
        if (DELTA) {
            v4 k = sum_lanes(with_k[0], with_k[1], with_k[2], with_k[3]);
            memcpy(seen, &k, 16);
        }
    } else
        for (int r = 0; r < R; r++) {
            answer[r] = sum_lanes(with_q[r]);
            seen[r] = sum_lanes(with_k[r]);
        }
    for (int r = 0; r < R; r++) {
        u[r] = DELTA ? c.beta[t] * (v[r] - seen[r]) : v[r];
        y[r] = fmaf(u[r], c.overlap[t], answer[r]);
    }
}

// Takes GROUPS times R state rows through the chunk: S <- S decay; S <- S + u k^T; y = S q. While one group's sums end, the next
// one's walk has begun. v, y: [CHUNK, stride] at the first state row; work: [GROUPS * R, padded].
template <int GROUPS, int R, bool DELTA, bool PER_CHANNEL>
void update_rows(const Chunk &c, Place from, Place to, float *work, const float *v, float *y, int64_t stride) {
    float u[GROUPS][R] = {};
    vf with_k[R], with_q[R];
    for (int g = 0; g < GROUPS; g++) {
        walk<R, true, DELTA, PER_CHANNEL>(c, 0, from.at(g * R), work + g * R * c.padded, u[g], with_k, with_q);
        conclude<R, DELTA>(c, 0, with_k, with_q, v + g * R, y + g * R, u[g]);
    }
    for (int64_t t = 1; t < c.count; t++)
        for (int g = 0; g < GROUPS; g++) {
            walk<R, false, DELTA, PER_CHANNEL>(c, t, from, work + g * R * c.padded, u[g], with_k, with_q);
            conclude<R, DELTA>(c, t, with_k, with_q, v + t * stride + g * R, y + t * stride + g * R, u[g]);
        }
    const float *last = c.k + (c.count - 1) * c.padded;
    for (int r = 0; r < GROUPS * R; r++) {
        vf add = splat(u[r / R][r % R]);
        for (int64_t i = 0; i < c.padded; i += LANES)
            store(to.rows + r * to.stride + i, fma(add, load_aligned(last + i), load_aligned(work + r * c.padded + i)));
    }
}

template <bool DELTA, bool PER_CHANNEL>
void update_block(const Chunk &c, Place from, Place to, int64_t count, float *work, const float *v, float *y, int64_t stride) {
    int64_t r = 0;
    for (; r + STATE_ROWS <= count; r += STATE_ROWS)
        update_rows<GROUPS, STATE_ROWS / GROUPS, DELTA, PER_CHANNEL>(c, from.at(r), to.at(r), work, v + r, y + r, stride);
    for (; r < count; r++)
        update_rows<1, 1, DELTA, PER_CHANNEL>(c, from.at(r), to.at(r), work, v + r, y + r, stride);
}

void update_block(const Recurrence &rec, const Chunk &c, Place from, Place to, int64_t count, float *work, const float *v, float *y,
                  int64_t stride) {
    if (rec.beta.data.data == nullptr)
        update_block<false, false>(c, from, to, count, work, v, y, stride);
    else if (rec.decay_per_channel)
        update_block<true, true>(c, from, to, count, work, v, y, stride);
    else
        update_block<true, false>(c, from, to, count, work, v, y, stride);
}

void copy_rows(Place from, Place to, int64_t count, int64_t size) {
    for (int64_t r = 0; r < count; r++)
        memcpy(to.rows + r * to.stride, from.rows + r * from.stride, size * 4);
}

// What one thread needs for one block of state rows.
struct Workspace {
    Chunk chunk;
    float *work, *v, *y;
    Place carry; // [block, padded]: the state between chunks
    int64_t v_stride;

    Workspace(Scratch &scratch, const Recurrence &r, int64_t block) {
        int64_t padded = r.padded();
        v_stride = round_up(block, LANES);
        float *at = scratch.floats(CHUNK * (3 * padded + 2 + 2 * v_stride) + (STATE_ROWS + block) * padded);
        auto take = [&at](int64_t count) { return std::exchange(at, at + count); };
        chunk.padded = padded;
        chunk.q = take(CHUNK * padded);
        chunk.k = take(CHUNK * padded);
        chunk.decay = take(CHUNK * padded);
        work = take(STATE_ROWS * padded);
        carry = {take(block * padded), padded};
        v = take(CHUNK * v_stride);
        y = take(CHUNK * v_stride);
        chunk.overlap = take(CHUNK);
        chunk.beta = take(CHUNK);
    }
};

// One sequence, head and block of state rows, through all of the sequence's rows.
void run_block(const Recurrence &r, const Slots &slots, const Sequence &sequence, int64_t head, int64_t first, int64_t count, Workspace &w) {
    int64_t offset = (head * r.value_size + first) * r.key_size;
    bool padded = r.key_size != w.chunk.padded;
    auto in_slot = [&](const char *state) { return Place{reinterpret_cast<float *>(const_cast<char *>(state)) + offset, r.key_size}; };
    Place from = w.carry;
    if (sequence.start == nullptr || padded)
        memset(from.rows, 0, count * from.stride * 4);
    if (sequence.start != nullptr && padded)
        copy_rows(in_slot(sequence.start), from, count, r.key_size);
    else if (sequence.start != nullptr)
        from = in_slot(sequence.start);
    int64_t write = sequence.first_write;
    for (int64_t row = sequence.row; row < sequence.end;) {
        int64_t end = smaller(row + CHUNK, sequence.end);
        if (write < sequence.end_write)
            end = smaller(end, slots.write_row(write) + 1);
        bool kept = write < sequence.end_write && slots.write_row(write) == end - 1;
        w.chunk.count = end - row;
        prepare(r, row, head, w.chunk);
        for (int64_t t = 0; t < w.chunk.count; t++)
            r.v.data.widen(r.v.at(row + t, head) + first, count, w.v + t * w.v_stride);
        // A state that is kept is made where it belongs, and read on from there; padded rows need a copy.
        Place to = kept && !padded ? in_slot(slots.target(write)) : w.carry;
        update_block(r, w.chunk, from, to, count, w.work, w.v, w.y, w.v_stride);
        for (; write < sequence.end_write && slots.write_row(write) == end - 1; write++) {
            Place target = in_slot(slots.target(write));
            if (target.rows != to.rows)
                copy_rows(to, target, count, r.key_size);
        }
        for (int64_t t = 0; t < w.chunk.count; t++) {
            int64_t at = ((row + t) * r.heads + head) * r.value_size + first;
            for (int64_t i = 0; i < count; i += LANES)
                store_elements(r.out, r.out_is_bf16, at + i, load_some(w.y + t * w.v_stride + i, count - i), count - i);
        }
        from = to;
        row = end;
    }
}

void run(const Recurrence &r, const StateTable &table) {
    Slots slots(table, r.pool, r.slot_nbytes, r.heads * r.value_size * r.key_size * 4);
    int64_t pairs = table.num_sequences * r.heads, block = r.value_size;
    while (pairs * ((r.value_size + block - 1) / block) < 4 * r.threads && block > STATE_ROWS)
        block = round_up(block / 2, STATE_ROWS);
    int64_t blocks = (r.value_size + block - 1) / block;
#pragma omp parallel num_threads(r.threads) if (r.threads > 1)
    {
        FlushDenormals flush;
        static thread_local Scratch scratch;
        Workspace workspace(scratch, r, block);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < pairs * blocks; item++) {
            int64_t first = item % blocks * block, pair = item / blocks;
            run_block(r, slots, slots.sequences[pair / r.heads], pair % r.heads, first, smaller(block, r.value_size - first), workspace);
        }
    }
}

} // namespace

// q, k: [T, key_heads, K]; v: [T, heads, V]; log_decay: [T, heads] or [T, heads, K]; beta: [T, heads] or null for the scan; each with
// strides of rows and heads, dense in the last dimension. pool: fp32 [slots, heads, V, K], slots `slot_stride` floats apart. out: [T,
// heads, V] contiguous.
extern "C" void hs_recurrence(const void *q, int32_t q_is_bf16, int64_t q_row, int64_t q_head, const void *k, int32_t k_is_bf16, int64_t k_row,
                              int64_t k_head, const void *v, int32_t v_is_bf16, int64_t v_row, int64_t v_head, const void *log_decay,
                              int32_t decay_is_bf16, int64_t decay_row, int64_t decay_head, int32_t decay_per_channel, const void *beta,
                              int32_t beta_is_bf16, int64_t beta_row, int64_t beta_head, float *pool, int64_t slot_stride, void *out,
                              int32_t out_is_bf16, const int32_t *cu_seqlens, const int64_t *start_slots, const int64_t *write_rows,
                              const int64_t *write_slots, int64_t num_sequences, int64_t num_writes, int64_t key_heads, int64_t heads,
                              int64_t key_size, int64_t value_size, float scale, int32_t qk_l2norm, int32_t threads) {
    Recurrence r{{{q, q_is_bf16 != 0}, q_row, q_head},
                 {{k, k_is_bf16 != 0}, k_row, k_head},
                 {{v, v_is_bf16 != 0}, v_row, v_head},
                 {{log_decay, decay_is_bf16 != 0}, decay_row, decay_head},
                 {{beta, beta_is_bf16 != 0}, beta_row, beta_head},
                 decay_per_channel != 0,
                 qk_l2norm != 0,
                 scale,
                 reinterpret_cast<char *>(pool),
                 slot_stride * 4,
                 out,
                 out_is_bf16 != 0,
                 key_heads,
                 heads,
                 key_size,
                 value_size,
                 threads};
    run(r, {cu_seqlens, start_slots, write_rows, write_slots, num_sequences, num_writes});
}
